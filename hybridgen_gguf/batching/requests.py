"""What a model that answers many requests at once can do beside streams: `batch`, `score`, and what they are made of.

A part of `LanguageModel`. Knows prompts, options and the loop; no files.
Invariant: everything here needs the loop, and says how to get one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import UsageError
from ..loader import OpenModel
from ..owner import Owner
from ..prompt.encode import Message, Prompt, encode_part, encode_raw
from ..prompt.renderer import Renderer
from ..prompt.shared_renderer import SharedRenderer
from ..reply import Reply
from ..request import GenerateOptions, merged
from ..sample.types import NativeSampler
from ..writing import Writing
from .loop import BatchLoop, Counts
from .many import Done, Score, answers, ordered, scores


class ManyRequests:
    """Needs `opened`, the engine's sampler, an owner and a loop, or None for a model for one request at a time."""

    opened: OpenModel
    _native: NativeSampler | None
    _owner: Owner
    _loop: BatchLoop | None

    @abstractmethod
    def encode(
        self,
        text: str | None = None,
        messages: Sequence[Message | Mapping[str, Any]] = (),
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning: bool | None = None,
        renderer: Renderer | SharedRenderer | None = None,
    ) -> Prompt: ...

    def batch(
        self,
        prompts: Iterable[str | Sequence[Message | Mapping[str, Any]]],
        options: GenerateOptions | None = None,
        *,
        n: int = 1,
        in_order: bool = False,
        **changes: Any,
    ) -> Iterator[Done[tuple[Reply, ...]]]:
        """Answers many prompts at once: raw texts, or conversations through the chat template. `n` answers to each.

        Gives each prompt's replies as they are finished, or its error, with its index; `in_order`: in their order.
        `options` and `changes` as for `generate`. Needs a model that was loaded with `parallel` above 1.
        """
        loop, merged_options = self._need_loop(), merged(options, changes)
        if n < 1:
            raise UsageError(f"n {n} is out of range", "give at least 1")
        renderer = SharedRenderer()

        def writings(prompt: str | Sequence[Message | Mapping[str, Any]]) -> Sequence[Writing]:
            encoded = self.encode(prompt) if isinstance(prompt, str) else self.encode(None, prompt, renderer=renderer)
            return self.writings(encoded, merged_options, n)

        def done() -> Iterator[Done[tuple[Reply, ...]]]:
            with closing(renderer):
                yield from answers(loop, (partial(writings, prompt) for prompt in prompts))

        return ordered(done()) if in_order else done()

    def writings(self, prompt: Prompt, options: GenerateOptions, n: int = 1) -> Sequence[Writing]:
        """`n` answers to a prompt that are yet to be written: equal but for the stream of their noise, counted on from
        `options.stream`."""
        first = Writing(self.opened, prompt, options, self._native)
        more = (replace(options, stream=options.stream + at, seed=first.seed) for at in range(1, n))
        return [first, *(Writing(self.opened, prompt, other, self._native) for other in more)]

    def answers(
        self, writings: Iterable[Callable[[], Sequence[Writing]]], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[Done[tuple[Reply, ...]]]:
        """Writes many answers at once, each entry's when it is its turn; `batch` for those who make their own. Once
        `stopped` is true nothing more comes."""
        return answers(self._need_loop(), writings, stopped)

    def score(
        self, prefix: str | Sequence[int], materials: Iterable[str | Sequence[int]], labels: Sequence[str]
    ) -> Iterator[Done[Score]]:
        """How likely each of `labels` is after `prefix` and each of `materials`: exact probabilities of their tokens.

        The prefix is read once. Texts are tokenized one by one, as they stand, the prefix with the model's start token;
        tokens may be given instead. Results come as each is done, with the material's index. Needs a model that was
        loaded with `parallel` above 1.
        """

        def tokens(material: str | Sequence[int]) -> Sequence[int]:
            return self.encode_part(material, first=not len(prefix)) if isinstance(material, str) else material

        return self.score_tokens(prefix, (partial(tokens, material) for material in materials), labels)

    def score_tokens(
        self,
        prefix: str | Sequence[int],
        texts: Iterable[Callable[[], Sequence[int]]],
        labels: Sequence[str],
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[Done[Score]]:
        """As `score`, for those who make a text's tokens themselves, in its turn; `stopped`: as for `answers`."""
        loop = self._need_loop()
        head = self.encode_part(prefix, first=True) if isinstance(prefix, str) and prefix else prefix
        ends = [self.encode_part(label) for label in labels]
        return scores(loop, [] if isinstance(head, str) else [*head], texts, ends, stopped)

    def encode_part(self, text: str, *, first: bool = False) -> list[int]:
        """Token ids of a text that stands after others, as it is; `first`: at the start, with the start token."""
        self._owner.check()
        vocabulary = self.opened.vocabulary
        return list(encode_raw(vocabulary, text).tokens) if first else encode_part(vocabulary, text)

    def counts(self) -> Counts:
        """Steps, tokens and cells of a model that answers several requests at once."""
        return self._need_loop().counts()

    def _need_loop(self) -> BatchLoop:
        self._owner.check()
        if self._loop is None:
            raise UsageError("the model was loaded for one request at a time", "load it with parallel=8 or so")
        return self._loop
