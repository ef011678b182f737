"""Hub repositories whose file names are awkward: whole words, drafts, doubt (A-10)."""

from __future__ import annotations

import pytest
from command_line import call, refused

from hybridgen_gguf.errors import NotFound
from hybridgen_gguf.models.hub import pick
from hybridgen_gguf.models.registry import HubSource, load_registry

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("names", "quant", "chosen"),
    [
        (["Flora_7B-Q4_K_M.gguf"], "Q4_K_M", "Flora_7B-Q4_K_M.gguf"),
        (["exploration-7b.Q4_K_M.gguf"], "Q4_K_M", "exploration-7b.Q4_K_M.gguf"),
        (["MTP/gemma-4-Q4_K_M.gguf", "gemma-4-Q4_K_M.gguf"], "Q4_K_M", "gemma-4-Q4_K_M.gguf"),
        (["m-q4_k_m.GGUF"], "Q4_K_M", "m-q4_k_m.GGUF"),
        (["a-lora-Q8_0.gguf", "a-Q8_0.gguf", "mmproj-a-Q8_0.gguf", "a-draft-Q8_0.gguf"], "Q8_0", "a-Q8_0.gguf"),
        (["m-Q4_0.gguf", "m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf"], "Q4_0", "m-Q4_0.gguf"),
    ],
)
def test_the_model_is_found(names: list[str], quant: str, chosen: str) -> None:
    assert pick(names, HubSource("a/b", quant=quant)) == (chosen,)


def test_parts_in_capitals() -> None:
    names = ["M-Q4_0-00001-of-00002.GGUF", "M-Q4_0-00002-of-00002.GGUF"]
    assert pick(names, HubSource("a/b", quant="q4_0")) == tuple(names)


def test_several_that_fit_are_listed() -> None:
    names = ["small-Q4_K_M.gguf", "large-Q4_K_M.gguf"]
    for source in (HubSource("a/b", quant="Q4_K_M"), HubSource("a/b")):
        with pytest.raises(NotFound, match=r"several models of a/b fit: large-Q4_K_M\.gguf, small-Q4_K_M\.gguf"):
            pick(names, source)
    assert pick(names, HubSource("a/b", file="small-Q4_K_M.gguf")) == ("small-Q4_K_M.gguf",)


@pytest.mark.parametrize("tag", ["Q4_K", "latest"])
def test_a_tag_that_is_none_is_refused_with_what_there_is(tag: str) -> None:
    with pytest.raises(NotFound, match=tag) as caught:
        pick(["m-Q4_K_M.gguf", "m-Q4_K_S.gguf"], HubSource("a/b", quant=tag))
    assert caught.value.hint == "it has Q4_K_M, Q4_K_S"


def test_a_file_of_a_repository_by_flags(capsys: Capture) -> None:
    entry = load_registry().resolve("user/repo:sub/m-Q4_0.gguf").entry
    assert entry is not None and entry.sources == (HubSource("user/repo", file="sub/m-Q4_0.gguf"),)
    refused(call(capsys, "inspect", "-hff", "m.gguf"), 2, "-hff m.gguf needs a repository")
    refused(call(capsys, "inspect", "-mu", "https://example.org/m.gguf"), 2, "is not the address of a GGUF file")
    refused(call(capsys, "inspect", "x.gguf", "-hf", "a/b"), 2, "two models were given")
