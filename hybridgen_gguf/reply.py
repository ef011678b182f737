"""What a request gives: text as it comes (`Chunk`) and the finished answer (`Reply`). Data, and one clock (`Written`).

Invariant: `Reply.as_json` holds the keys that `hgguf run --json` promises.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .plan import Plan
from .prompt.messages import Message
from .sample import Draw
from .sample.types import Scored
from .text import FinishReason

if TYPE_CHECKING:
    from .engine.tiers import TierCounters


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt, of the answer, and of the prompt that the cache already held."""

    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds to load and to the first token; tokens a second of prefill and of decode."""

    load_s: float
    ttft_s: float
    prompt_tps: float | None
    decode_tps: float | None


@dataclass
class Written:
    """What has happened in one request so far; moments as time.perf_counter gives them, 0 before they come."""

    started: float
    tokens: list[int] = field(default_factory=list)
    kept: list[Draw] = field(default_factory=list)
    reused: int = 0
    prompt_done: float = 0.0
    first_token: float = 0.0

    def take(self, draw: Draw) -> None:
        """One more token; what was asked for beside it is kept."""
        if not self.tokens:
            self.first_token = time.perf_counter()
        self.tokens.append(draw.token)
        if draw.draws or draw.top or draw.logprob is not None:
            self.kept.append(draw)

    def timings(self, load_s: float, usage: Usage) -> Timings:
        """As measured until now."""
        now = time.perf_counter()
        read = usage.prompt_tokens - usage.reused_tokens
        written = len(self.tokens) - 1  # the first comes with the prompt
        prefill_s = self.prompt_done - self.started if self.prompt_done else 0.0
        decode_s = now - self.first_token if written > 0 else 0.0
        return Timings(
            load_s=round(load_s, 6),
            ttft_s=round((self.first_token or now) - self.started, 6),
            prompt_tps=round(read / prefill_s, 3) if prefill_s > 0 else None,
            decode_tps=round(written / decode_s, 3) if decode_s > 0 else None,
        )


@dataclass(frozen=True)
class Chunk:
    """A piece of the answer as it comes, or of the thoughts before it. `reply` is set on the last one alone."""

    text: str
    reply: Reply | None = None
    reasoning: str = ""


@dataclass(frozen=True)
class Reply:
    """A finished answer. `draws` and `logprobs` hold one entry a token when they were asked for.

    `reasoning`: the model's thoughts, which are not in `text`; None where the template marks none. `message`: the
    answer without thoughts, for the next turn's messages.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    usage: Usage
    timings: Timings
    plan: Plan
    tiers: TierCounters | None = None
    draws: tuple[tuple[Scored, ...], ...] = ()
    logprobs: tuple[Draw, ...] = ()
    reasoning: str | None = None
    message: Message = field(default=Message("assistant", ""))

    def as_json(self) -> dict[str, Any]:
        """The keys that `hgguf run --json` promises."""
        answer: dict[str, Any] = {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "usage": asdict(self.usage),
            "timings": asdict(self.timings),
            "plan": self.plan.as_json(),
        }
        if self.reasoning is not None:
            answer["reasoning"] = self.reasoning
        if self.tiers is not None:
            answer["tiers"] = asdict(self.tiers)
        if self.draws:
            answer["draws"] = [[asdict(scored) for scored in draws] for draws in self.draws]
        if self.logprobs:
            answer["logprobs"] = [
                {"token": d.token, "logprob": d.logprob, "top": [asdict(scored) for scored in d.top]}
                for d in self.logprobs
            ]
        return answer
