"""One answer as it is written: where its tokens come from, its text, its end. What `run` and the batch loop share.

Knows the open model's vocabulary and its sampler, but no context: logits come in, chunks go out.
Invariant: joined chunks are the reply's text, and the last one alone carries the reply.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

from .answer import AnswerStream, Piece
from .grammar import Guard, checked
from .loader import OpenModel
from .prompt.encode import Prompt
from .prompt.messages import Message
from .reply import Chunk, Reply, Usage, Written
from .request import GenerateOptions
from .sample.dry import DEFAULT_BREAKERS, breaker_sequences
from .sample.sampler import Draw, NativeSampler, SampleOptions, Sampler, check_seed
from .sample.types import Constraint, Logits, Row
from .text import FinishReason
from .turn import Ends, ThoughtBudget, forced, token_at_start


class Writing:
    """Call `begin` when the prompt has been read, then `draw` and `put` in turns until a chunk has a reply; `end` ends
    it from outside. `reused`: tokens of the prompt that are not read anew."""

    def __init__(
        self, opened: OpenModel, prompt: Prompt, options: GenerateOptions, native: NativeSampler | None = None
    ) -> None:
        """Raises UsageError for options that this vocabulary cannot have."""
        self._opened, self.prompt, self.options = opened, prompt, options
        self.seed = secrets.randbits(32) if options.seed is None else check_seed(options.seed)
        self.sample = _with_breakers(opened, options.sample)
        self.sampler = Sampler(
            self.sample, n_vocab=opened.model.n_vocab, seed=self.seed, stream=options.stream, native=native
        )
        for token in prompt.tokens:
            self.sampler.accept(token)
        self._text = AnswerStream(
            opened.model.token_bytes,
            options.stop,
            prompt.style.marks,
            control=opened.vocabulary.control_tokens(),
            inside=prompt.thinking,
            form=options.reasoning_format,
        )
        self._ends = Ends(opened.vocabulary, prompt)
        self._budget = ThoughtBudget(opened.vocabulary, prompt, options.reasoning_budget)
        self._guard = _guard(opened, prompt, options, self._ends)
        self._limit = opened.context.n_ctx if options.max_tokens is None else options.max_tokens
        self._state = Written(time.perf_counter())
        self.reused = 0
        self._due: int | None = None
        self._within: Guard | None = None

    @property
    def guarded(self) -> bool:
        """Whether a grammar says which tokens may come, so that all logits are needed."""
        return self._guard is not None

    @property
    def most(self) -> int:
        """Tokens that the answer may have."""
        return self._limit

    def begin(self) -> Chunk | None:
        """The prompt has been read. A chunk if no token is wanted."""
        self._state.reused = self.reused
        self._state.prompt_done = time.perf_counter()
        if not self._limit:
            return self.end("length")
        return self.end("stop") if self._over() else None

    def draw(self, drawn: Callable[[Constraint | None], Draw], logits: Callable[[], Logits]) -> Draw:
        """The next token: what `drawn` gives within a constraint, or the one that must come in its place. `logits`: of
        this position, asked for where a forced token's probability is wanted."""
        sample, token = self.options.sample, self._due
        if token is None:
            return drawn(self._within)
        if not (sample.logprobs or sample.draws):
            return Draw(token, None, (), ())
        return forced(token, drawn(None), logits(), logprob=sample.logprobs > 0, draws=sample.draws > 0)

    def row(self, logits: Logits, position: int) -> Row | None:
        """What one native call can draw for this answer together with others, or None: `draw` gives the token then."""
        return None if self.guarded else self.sampler.row(logits, position)

    def put(self, draw: Draw) -> Chunk | None:
        """Adds a token: a chunk where there is text to show, with a reply where the answer ends with it."""
        options, token = self.options, draw.token
        if not options.ignore_end and self._ends.end(token, self._opened.model.is_end(token), self._text.thinking):
            return self.end("stop")
        self.sampler.accept(token)
        self._state.take(draw)
        if self._within is not None:
            self._within.take(token)
        self._budget.count(self._text)
        piece = self._text.push(token)
        if self._text.stopped is not None:
            return self.end("stop", piece)
        if len(self._state.tokens) >= self._limit:
            return self.end("length", piece)
        if self._over():
            return self.end("stop", piece)
        return Chunk(piece.text, None, piece.reasoning) if piece.text or piece.reasoning else None

    def _over(self) -> bool:
        """Whether a grammar lets nothing more come; and what the next token is held to."""
        self._due = self._budget.next(self._text)
        self._within = self._guard.now(self._text) if self._guard is not None and self._due is None else None
        return self._within is not None and self._within.over()

    def end(self, reason: FinishReason, piece: Piece = Piece("")) -> Chunk:  # noqa: B008  a tuple
        """The last chunk: `piece` and what was held back, with the reply."""
        text, state, opened = self._text, self._state, self._opened
        rest = text.finish()
        if text.stopped is not None:  # the end of the text may complete a stop string that was still open
            reason = "stop"
        usage = Usage(len(self.prompt.tokens), len(state.tokens), self.reused)
        draws = tuple(d.draws for d in state.kept if d.draws)
        logprobs = tuple(d for d in state.kept if d.top or d.logprob is not None)
        reply = Reply(
            text.text, tuple(state.tokens), reason, self.seed, usage, state.timings(opened.load_s, usage), opened.plan,
            opened.context.tier_counters(), draws, logprobs, text.reasoning, Message("assistant", text.answer),
        )  # fmt: skip
        return Chunk(piece.text + rest.text, reply, piece.reasoning + rest.reasoning)


def _guard(opened: OpenModel, prompt: Prompt, options: GenerateOptions, ends: Ends) -> Guard | None:
    """What holds the answer to its grammar; None without one."""
    if options.grammar is None and options.json_schema is None:
        return None
    model, vocabulary, marks = opened.model, opened.vocabulary, prompt.style.marks
    opening = None if marks is None else token_at_start(vocabulary, marks.open)
    rules = checked(model.path, options.grammar, options.schema_text)
    for words in rules.without_effect:
        warnings.warn(f"of the JSON schema, {words} has no effect", stacklevel=2)
    return rules.guard(model, vocabulary, ends.tokens, opening, ignore_end=options.ignore_end)


def _with_breakers(opened: OpenModel, options: SampleOptions) -> SampleOptions:
    """DRY's sequence breakers need the vocabulary; they are looked up only when DRY is on."""
    if "dry" not in options.active_steps() or options.dry_sequence_breakers:
        return options
    model = opened.model
    pieces = [model.token_bytes(token, special=True) for token in range(model.n_vocab)]
    found = breaker_sequences(DEFAULT_BREAKERS, pieces, lambda text: model.tokenize(text, False, False))
    return replace(options, dry_sequence_breakers=found)
