"""What the cache holds is reused only where that gives the text of a cold run: plain and sliding-window models."""

from __future__ import annotations

from pathlib import Path

import pytest

import hybridgen_gguf

pytestmark = pytest.mark.real
STORY = " ".join(f"On day {day} the fox walked {day * 3} miles and met a crow." for day in range(1, 61))


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_text_after_reuse_equals_a_cold_run(name: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(name)
    prompts = [STORY, STORY + " Then the crow said", STORY[:400] + " Suddenly", STORY[:400] + " Suddenly"]
    with hybridgen_gguf.load(str(path), n_ctx=2048) as model:
        warm = [model.generate(prompt, temperature=0, max_tokens=12) for prompt in prompts]
        reused = [reply.usage.reused_tokens for reply in warm]
        cold = []
        for prompt in prompts:
            model.opened.context.clear()
            model._decoder.tokens.clear()
            cold.append(model.generate(prompt, temperature=0, max_tokens=12))
    assert [reply.text for reply in warm] == [reply.text for reply in cold]
    assert reused[0] == 0 and reused[1] > 700  # a longer prompt continues
    assert reused[3] == warm[3].usage.prompt_tokens - 1  # the same prompt again reads one token
