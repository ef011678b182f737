"""What the pinned llama-vocab.cpp knows: names of pre-tokenizers and their expressions, read out of its text.

Invariant: a form of the source that is not understood fails the test, it is never skipped.
"""

from __future__ import annotations

import re
from functools import cache

from hybridgen_gguf.make.convert import converter_folder

_CASE = re.compile(r"case (LLAMA_VOCAB_PRE_TYPE_\w+):")
_ESCAPES = {"\\": "\\", '"': '"', "n": "\n", "r": "\r", "t": "\t"}


@cache
def _source() -> str:
    text = (converter_folder() / "src" / "llama-vocab.cpp").read_text(encoding="utf-8")
    return "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("//"))


@cache
def names() -> dict[str, str]:
    """Each value of `tokenizer.ggml.pre` that the engine takes, and the pre-tokenizer type it stands for."""
    found: dict[str, str] = {}
    for condition, kind in re.findall(
        r'if \(\s*((?:tokenizer_pre == "[^"]+"(?:\s*\|\|\s*)?)+)\) \{\s*pre_type = (LLAMA_VOCAB_PRE_TYPE_\w+);',
        _source(),
    ):
        found.update(dict.fromkeys(re.findall(r'"([^"]+)"', condition), kind))
    mentioned = set(re.findall(r'tokenizer_pre == "([^"]+)"', _source()))
    assert found and mentioned == set(found), f"not understood: {mentioned ^ set(found)}"
    return found


@cache
def expressions() -> dict[str, tuple[str, ...]]:
    """The expressions of each pre-tokenizer type, in the order in which they cut; under "" those of all other types."""
    start = _source().index("struct llm_tokenizer_bpe :")
    body = _source()[start : _source().index("std::vector<std::string> regex_exprs;", start)]
    found: dict[str, tuple[str, ...]] = {}
    for part in re.split(r"break;", body)[:-1]:
        block = re.search(r"regex_exprs = \{(.*?)\n\s*\};", part, re.DOTALL)
        assert block, f"not understood: {part}"
        literals = re.findall(r'"((?:[^"\\]|\\.)*)"', block[1])
        value = tuple(re.sub(r"\\(.)", lambda mark: _ESCAPES[mark[1]], literal) for literal in literals)
        kinds = _CASE.findall(part)
        assert value and (kinds or "default:" in part), f"not understood: {part}"
        found.update(dict.fromkeys(kinds or [""], value))
    return found
