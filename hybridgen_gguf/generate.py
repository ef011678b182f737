"""prompt → tokens → logits → token → text: the loop, composing the verbs of the other modules.

Knows no flags, no terminal and no files. One `LanguageModel` serves one request at a time (`owner.py`), or hands all of
them to the loop of `batching/`.
Invariant: joined chunks are the reply's text; after any error or cancellation the model can take the next request.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from .adapt.border import Feedback
from .adapt.threads import Governor
from .batching import Batching, BatchLoop, ManyRequests
from .closing import Closing
from .decode import Decoder, Progress
from .errors import UsageError
from .loader import OpenModel
from .owner import Owner
from .plan import Plan
from .prompt.encode import Message, Prompt, encode_chat, encode_raw
from .prompt.shared_renderer import SharedRenderer
from .prompt.template import Renderer, choose_template
from .reply import Chunk, Reply
from .request import GenerateOptions, merged, without_thoughts
from .sample.sampler import (
    DeviceCandidates,
    Draw,
    NativeSampler,
    SampleOptions,
    Sampler,
    device_candidates,
)
from .sample.types import Constraint
from .writing import Writing

if TYPE_CHECKING:
    from .engine.device_sample import DeviceSample

_PROMPT_CHUNK = 512  # tokens between two looks at cancellation where the engine cannot be interrupted


class LanguageModel(ManyRequests, Closing):
    """An open model that answers. Use as a context manager, or call `close`."""

    def __init__(
        self,
        opened: OpenModel,
        native: NativeSampler | None = None,
        governor: Governor | None = None,
        border: Feedback | None = None,
        batching: Batching | None = None,
    ) -> None:
        """`native`: the engine's own sampler passes; `governor`: adapts the threads to what other processes leave;
        `border`: adapts where KV in host memory is attended to. `batching`: how many requests share a context that was
        opened for several; None: one request at a time."""
        self.opened = opened
        self._native = native
        self._governor = governor
        self._border = border
        self._decoder = Decoder(opened.context, min(_PROMPT_CHUNK, opened.plan.context.n_batch))
        self._device: tuple[tuple[int, bool], DeviceSample] | None = None
        self._loop: BatchLoop | None = None
        self._owner = Owner("model", self._release, self._stop)
        if batching is not None:
            self._loop = BatchLoop(opened, self._owner, batching)

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
        renderer: Renderer | SharedRenderer | None = None,
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
        if self._loop is not None:
            return self._loop.stream(Writing(self.opened, prompt, options, self._native))
        return self._owner.requests(self._answer(prompt, options, cancelled, progress), to_the_end=False)

    def _answer(
        self, prompt: Prompt, options: GenerateOptions, stop: Callable[[], bool], progress: Progress | None
    ) -> Iterator[Chunk]:
        def cancelled() -> bool:
            return self._owner.closing or stop()

        decoder = self._decoder
        writing = Writing(self.opened, prompt, options, self._native)
        device = None if writing.guarded else self._device_sample(writing.sample)
        writing.reused = decoder.reuse(prompt.tokens)
        if self._governor is not None:
            self._governor.rest()
        if not decoder.read(prompt.tokens[writing.reused :], cancelled, self._watched(progress)):
            yield writing.end("cancelled")
            return
        chunk = writing.begin()
        while chunk is None or chunk.reply is None:
            draw = writing.draw(
                lambda within: self._draw(writing.sampler, device, within),
                lambda: decoder.logits() if device is None else device.fetch(),
            )
            chunk = writing.put(draw)
            if chunk is not None:
                yield chunk
                if chunk.reply is not None:
                    return
            if cancelled() or not decoder.step(draw.token, cancelled):
                chunk = writing.end("cancelled" if cancelled() else "length")
                break
            if self._governor is not None:
                self._governor.on_token(decoder.step_s)
            if self._border is not None:
                self._border.on_token(decoder.step_s)
        yield chunk

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

    def _draw(self, sampler: Sampler, device: DeviceSample | None, within: Constraint | None) -> Draw:
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

    def _whole(self, prompt: Prompt, options: GenerateOptions) -> Reply:
        if self._loop is not None:
            return _last_reply(self._loop.stream(Writing(self.opened, prompt, options, self._native)))
        answer = self._answer(prompt, options, lambda: False, None)
        return _last_reply(self._owner.requests(answer, to_the_end=True))

    def close(self) -> None:
        """Ends a running request after its step and gives the memory back. In a forked child it does nothing."""
        self._owner.close()

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.stop()

    def _release(self) -> None:
        self._close_device()
        self.opened.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError("a loaded model cannot be copied or pickled", "load it where it is used: hybridgen_gguf.load")


def _last_reply(chunks: Iterator[Chunk]) -> Reply:
    replies = [chunk.reply for chunk in chunks]
    if not replies or replies[-1] is None:
        raise UsageError("the request gave no reply")
    return replies[-1]
