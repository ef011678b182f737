"""A grammar (GBNF) in the engine, and JSON schemas as grammars (include/hg-grammar.h of our patches).

Knows tokens of one vocabulary, neither thoughts nor sampling. The work of each call has a bound in the engine, but a
text that no child process has compiled before may end this one: parentheses nested too deep for the stack.
Invariant: whatever was made is freed once.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
from numpy.typing import NDArray

from ..closing import Closing
from ..errors import EngineError, SampleError, UsageError
from .handles import Model
from .library import Library

ROOT = "root"
_NOT_ALLOWED = -2
_ROOM = 1 << 16  # bytes of a first try; a grammar is some times as long as its schema


class Grammar(Closing):
    """Where a text stands in a grammar. Raises UsageError for a grammar that cannot be used, in the parser's words."""

    def __init__(self, model: Model, text: str) -> None:
        self._llama = library_with_grammars(model.library).llama
        self.n_vocab = model.n_vocab
        room = ctypes.create_string_buffer(len(text.encode()) + 256)
        self._handle = self._llama.hg_grammar_init(model.vocab, text.encode(), ROOT.encode(), room, len(room))
        if not self._handle:
            raise UsageError(room.value.decode("utf-8", "replace"))
        self._free = weakref.finalize(self, self._llama.hg_grammar_free, self._handle)

    def allowed(self, ids: NDArray[np.int64] | None) -> NDArray[np.bool_]:
        """Which of `ids` (None: of all tokens) may come next; end tokens may where the grammar may end."""
        tokens = None if ids is None else np.ascontiguousarray(ids, np.int32)
        count = self.n_vocab if tokens is None else len(tokens)
        found = np.empty(count, np.bool_)
        address = None if tokens is None else tokens.ctypes.data
        if self._llama.hg_grammar_allowed(self._handle, address, count, found.ctypes.data) < 0:
            raise _too_complex()
        return found

    def accept(self, token: int) -> None:
        """Goes on by one token. Raises SampleError for one that is not allowed."""
        self._check(self._llama.hg_grammar_accept(self._handle, token), f"token {token}")

    def accept_text(self, text: str) -> None:
        """As `accept`, for text. After an error the grammar is of no more use."""
        self._check(self._llama.hg_grammar_accept_text(self._handle, text.encode()), "the beginning of the answer")

    @property
    def finished(self) -> bool:
        """Whether the text may end here."""
        return bool(self._llama.hg_grammar_finished(self._handle))

    def _check(self, status: int, what: str) -> None:
        if status == _NOT_ALLOWED:
            raise SampleError(f"{what} does not fit the grammar", "a model that thinks may need --reasoning off")
        if status < 0:
            raise _too_complex()

    def close(self) -> None:
        self._free()


def grammar_of_schema(library: Library, schema: str) -> str:
    """The grammar of a JSON schema's texts, as llama.cpp's own programs make it. For child processes alone: a hostile
    schema can end the process. Raises UsageError for one that it cannot turn."""
    convert = library_with_grammars(library).llama.hg_json_schema_to_grammar
    size = _ROOM
    while True:
        room = ctypes.create_string_buffer(size)
        length = convert(schema.encode(), room, size)
        if -1 - length >= 0:
            raise UsageError(room.value.decode("utf-8", "replace"))
        if length < size:
            return room.value.decode("utf-8", "replace")
        size = length + 1


def library_with_grammars(library: Library) -> Library:
    """The engine, if it has grammars. Raises EngineError for another."""
    if not library.has_grammar:
        raise EngineError("this engine has no grammars of hgguf", "scripts/setup builds the engine that has them")
    return library


def _too_complex() -> SampleError:
    return SampleError("the grammar became too complex: too many ways to go on", "make it less ambiguous")
