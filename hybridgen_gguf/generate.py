"""prompt → tokens → logits → token → text: the loop, composing the verbs of the other modules.

Knows no flags, no terminal and no files. One `LanguageModel` serves one request at a time (`owner.py`).
Invariant: joined chunks are the reply's text; after any error or cancellation the model can take the next request.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from .adapt.border import Feedback
from .adapt.threads import Governor
from .answer import AnswerStream, Piece
from .closing import Closing
from .decode import Decoder, Progress
from .errors import UsageError
from .grammar import Guard, checked
from .loader import OpenModel
from .owner import Owner
from .plan import Plan
from .prompt.encode import Message, Prompt, encode_chat, encode_raw
from .prompt.template import Renderer, choose_template
from .reply import Chunk, Reply, Usage, Written
from .request import GenerateOptions, merged, without_thoughts
from .sample.dry import DEFAULT_BREAKERS, breaker_sequences
from .sample.sampler import (
    DeviceCandidates,
    Draw,
    NativeSampler,
    SampleOptions,
    Sampler,
    check_seed,
    device_candidates,
)
from .text import FinishReason
from .turn import Ends, ThoughtBudget, forced, token_at_start

if TYPE_CHECKING:
    from .engine.device_sample import DeviceSample

_PROMPT_CHUNK = 512  # tokens between two looks at cancellation where the engine cannot be interrupted


class LanguageModel(Closing):
    """An open model that answers. Use as a context manager, or call `close`."""

    def __init__(
        self,
        opened: OpenModel,
        native: NativeSampler | None = None,
        governor: Governor | None = None,
        border: Feedback | None = None,
    ) -> None:
        """`native`: the engine's own sampler passes; `governor`: adapts the threads to what other processes leave;
        `border`: adapts where KV in host memory is attended to."""
        self.opened = opened
        self._native = native
        self._governor = governor
        self._border = border
        self._decoder = Decoder(opened.context, min(_PROMPT_CHUNK, opened.plan.context.n_batch))
        self._device: tuple[tuple[int, bool], DeviceSample] | None = None
        self._owner = Owner("model", self._release)

    @property
    def plan(self) -> Plan:
        """What lies and runs where, with reasons."""
        return self.opened.plan

    def encode(
        self,
        text: str | None = None,
        messages: Sequence[Message | Mapping[str, Any]] = (),
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning: bool | None = None,
        renderer: Renderer | None = None,
    ) -> Prompt:
        """Token ids of raw `text`, or of `messages` through the model's chat template (or the one named).

        `tools`: functions as in OpenAI's API; `template_kwargs`: variables of the template (`enable_thinking`,
        `reasoning_effort`); `reasoning`: whether the model is to think, by the template's own switch. Warns about what
        the template does not know.
        """
        with self._owner.reading():
            if text is not None:
                return encode_raw(self.opened.vocabulary, text)
            template = choose_template(
                chat_template, self.opened.shape.chat_template, self.opened.vocabulary.control_tokens()
            )
            for name in template_kwargs or {}:
                if name not in template.source:
                    warnings.warn(f"the chat template does not know '{name}'", stacklevel=2)
            prompt = encode_chat(
                self.opened.vocabulary,
                [Message.of(message) for message in messages],
                template,
                renderer=renderer,
                tools=tools,
                variables=template_kwargs,
                reasoning=reasoning,
            )
        style = prompt.style
        if reasoning is not None and style.marks is None and (style.on if reasoning else style.off) is None:
            warnings.warn("the chat template has no switch for thinking and marks no thoughts", stacklevel=2)
        return prompt

    def generate(self, prompt: str, options: GenerateOptions | None = None, **changes: Any) -> Reply:
        """Continues raw text. `changes` replace fields of GenerateOptions or SampleOptions: `temperature=0`."""
        return self._whole(self.encode(prompt), merged(options, changes))

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        options: GenerateOptions | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning: bool | None = None,
        **changes: Any,
    ) -> Reply:
        """Answers a conversation of `{"role": ..., "content": ...}` and OpenAI's other keys through the chat template.
        `tools`, `template_kwargs`, `reasoning`: as for `encode`."""
        prompt = self.encode(None, messages, tools=tools, template_kwargs=template_kwargs, reasoning=reasoning)
        return self._whole(prompt, without_thoughts(merged(options, changes), reasoning))

    def stream(self, prompt: str, options: GenerateOptions | None = None, **changes: Any) -> Iterator[Chunk]:
        """As `generate`, text as it comes; the last chunk carries the reply."""
        return self.run(self.encode(prompt), merged(options, changes))

    def stream_chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        options: GenerateOptions | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning: bool | None = None,
        **changes: Any,
    ) -> Iterator[Chunk]:
        """As `chat`, text as it comes."""
        prompt = self.encode(None, messages, tools=tools, template_kwargs=template_kwargs, reasoning=reasoning)
        return self.run(prompt, without_thoughts(merged(options, changes), reasoning))

    def run(
        self,
        prompt: Prompt,
        options: GenerateOptions,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
    ) -> Iterator[Chunk]:
        """Reads the prompt and yields text until the model ends, a limit is met, or `cancelled` is true.

        Raises Busy while another stream of this model is open; `generate` and `chat` of other threads are waited for.
        """
        return self._owner.requests(self._answer(prompt, options, cancelled, progress), to_the_end=False)

    def _answer(
        self, prompt: Prompt, options: GenerateOptions, stop: Callable[[], bool], progress: Progress | None
    ) -> Iterator[Chunk]:
        def cancelled() -> bool:
            return self._owner.closing or stop()

        seed = secrets.randbits(32) if options.seed is None else check_seed(options.seed)
        state = Written(time.perf_counter())
        decoder, model = self._decoder, self.opened.model
        sample = self._with_breakers(options.sample)
        sampler = Sampler(sample, n_vocab=model.n_vocab, seed=seed, stream=options.stream, native=self._native)
        text = self._answer_stream(prompt, options)
        ends = Ends(self.opened.vocabulary, prompt)
        budget = ThoughtBudget(self.opened.vocabulary, prompt, options.reasoning_budget)
        guard = self._guard(options, prompt, ends)
        device = self._device_sample(sample) if guard is None else None
        state.reused = decoder.reuse(prompt.tokens)
        if self._governor is not None:
            self._governor.rest()
        if not decoder.read(prompt.tokens[state.reused :], cancelled, self._watched(progress)):
            yield self._end(Piece(""), "cancelled", text, state, prompt=prompt, seed=seed)
            return
        for token in prompt.tokens:
            sampler.accept(token)
        state.prompt_done = time.perf_counter()
        limit = options.max_tokens if options.max_tokens is not None else decoder.context.n_ctx
        reason: FinishReason = "length"
        while len(state.tokens) < limit:
            due = budget.next(text)
            within = guard.now(text) if guard is not None and due is None else None
            if within is not None and within.over():
                reason = "stop"
                break
            draw = self._next(due, sampler, device, options, within)
            if not options.ignore_end and ends.end(draw.token, model.is_end(draw.token), text.thinking):
                reason = "stop"
                break
            sampler.accept(draw.token)
            state.take(draw)
            if within is not None:
                within.take(draw.token)
            budget.count(text)
            piece = text.push(draw.token)
            if text.stopped is not None:
                yield self._end(piece, "stop", text, state, prompt=prompt, seed=seed)
                return
            if piece.text or piece.reasoning:
                yield Chunk(piece.text, None, piece.reasoning)
            if cancelled() or (len(state.tokens) < limit and not decoder.step(draw.token, cancelled)):
                break
            if self._governor is not None:
                self._governor.on_token(decoder.step_s)
            if self._border is not None:
                self._border.on_token(decoder.step_s)
        yield self._end(Piece(""), "cancelled" if cancelled() else reason, text, state, prompt=prompt, seed=seed)

    def _answer_stream(self, prompt: Prompt, options: GenerateOptions) -> AnswerStream:
        return AnswerStream(
            self.opened.model.token_bytes,
            options.stop,
            prompt.style.marks,
            control=self.opened.vocabulary.control_tokens(),
            inside=prompt.thinking,
            form=options.reasoning_format,
        )

    def _next(
        self,
        token: int | None,
        sampler: Sampler,
        device: DeviceSample | None,
        options: GenerateOptions,
        within: Guard | None,
    ) -> Draw:
        """A draw, or `token` in its place where it must come next."""
        sample = options.sample
        if token is not None and not (sample.logprobs or sample.draws):
            return Draw(token, None, (), ())
        drawn = self._draw(sampler, device, within)
        if token is None:
            return drawn
        logits = self._decoder.logits() if device is None else device.fetch()
        return forced(token, drawn, logits, logprob=sample.logprobs > 0, draws=sample.draws > 0)

    def _watched(self, progress: Progress | None) -> Progress | None:
        """`progress`, with a look at the machine between the parts of a prompt."""
        governor = self._governor
        if governor is None:
            return progress

        def watch(done: int, total: int) -> None:
            governor.tick()
            if progress is not None:
                progress(done, total)

        return watch

    def _guard(self, options: GenerateOptions, prompt: Prompt, ends: Ends) -> Guard | None:
        """What holds the answer to its grammar; None without one."""
        if options.grammar is None and options.json_schema is None:
            return None
        model, marks = self.opened, prompt.style.marks
        opening = None if marks is None else token_at_start(model.vocabulary, marks.open)
        rules = checked(model.model.path, options.grammar, options.schema_text)
        for words in rules.without_effect:
            warnings.warn(f"of the JSON schema, {words} has no effect", stacklevel=2)
        return rules.guard(model.model, model.vocabulary, ends.tokens, opening, ignore_end=options.ignore_end)

    def _draw(self, sampler: Sampler, device: DeviceSample | None, within: Guard | None) -> Draw:
        position = self._decoder.position
        if device is None:
            return sampler.draw(self._decoder.logits(), position, within)
        drawn = sampler.draw_candidates(DeviceCandidates(*device.read()), position)
        return drawn or sampler.draw(device.fetch(), position)  # the candidates do not settle it: all logits do

    def _device_sample(self, options: SampleOptions) -> DeviceSample | None:
        """The sampler on the device that holds the output layer, if candidates are enough for these options."""
        count = device_candidates(options, self.opened.model.n_vocab)
        key = (count or 0, options.logprobs > 0)
        if self._device is not None and self._device[0] == key:
            return self._device[1]
        self._close_device()
        device = self.opened.device_sample(*key) if count else None
        self._device = (key, device) if device is not None else None
        return device

    def _close_device(self) -> None:
        if self._device is not None:
            self._device[1].close()
            self._device = None

    def _with_breakers(self, options: SampleOptions) -> SampleOptions:
        """DRY's sequence breakers need the vocabulary; they are looked up only when DRY is on."""
        if "dry" not in options.active_steps() or options.dry_sequence_breakers:
            return options
        model = self.opened.model
        pieces = [model.token_bytes(token, special=True) for token in range(model.n_vocab)]
        found = breaker_sequences(DEFAULT_BREAKERS, pieces, lambda text: model.tokenize(text, False, False))
        return replace(options, dry_sequence_breakers=found)

    def _end(
        self, piece: Piece, reason: FinishReason, text: AnswerStream, state: Written, *, prompt: Prompt, seed: int
    ) -> Chunk:
        rest = text.finish()
        if text.stopped is not None:  # the end of the text may complete a stop string that was still open
            reason = "stop"
        usage = Usage(len(prompt.tokens), len(state.tokens), state.reused)
        timings = state.timings(self.opened.load_s, usage)
        draws = tuple(d.draws for d in state.kept if d.draws)
        logprobs = tuple(d for d in state.kept if d.top or d.logprob is not None)
        tokens = tuple(state.tokens)
        tiers = self.opened.context.tier_counters()
        reply = Reply(
            text.text, tokens, reason, seed, usage, timings, self.plan, tiers, draws, logprobs,
            text.reasoning, Message("assistant", text.answer),
        )  # fmt: skip
        return Chunk(piece.text + rest.text, reply, piece.reasoning + rest.reasoning)

    def _whole(self, prompt: Prompt, options: GenerateOptions) -> Reply:
        answer = self._answer(prompt, options, lambda: False, None)
        replies = [chunk.reply for chunk in self._owner.requests(answer, to_the_end=True)]
        if not replies or replies[-1] is None:
            raise UsageError("the request gave no reply")
        return replies[-1]

    def close(self) -> None:
        """Ends a running request after its step and gives the memory back. In a forked child it does nothing."""
        self._owner.close()

    def _release(self) -> None:
        self._close_device()
        self.opened.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError("a loaded model cannot be copied or pickled", "load it where it is used: hybridgen_gguf.load")
