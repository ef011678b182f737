"""The verbs that work through files of requests: batch, score. Lines in, lines out, in any order.

Invariant: one bad line is an error line in the output; what is written is never lost, and `--resume` does the rest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import show
from .arguments import read_text, sample_changes, typed_text
from .options import LineFlags, ModelFlags, PlaceFlags, ScoreFlags, ThinkFlags
from .run import find_shown, interruptible, open_shown, prepare_shown
from .thinking import Thinking, thinking_of

if TYPE_CHECKING:
    from ..batching import Done
    from ..generate import LanguageModel
    from ..lines.body import Asked
    from ..lines.sink import Sink
    from ..lines.source import Line, Source
    from ..request import GenerateOptions
    from ..schedule import Rules

_SWITCH_S = 0.0005
_BYTES_A_TOKEN = 3  # of a line's JSON, at least: to guess a context that holds the longest one


@dataclass(frozen=True)
class BatchAsked:
    """What a batch's flags say beside its files: how answers end, thinking, sampling. Groups of flags."""

    answer: Any
    think: ThinkFlags
    sampling: Any


@dataclass
class _Tally:
    """What has been done."""

    total: int
    lines: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    written_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    def as_json(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self.started
        tokens = {"prompt": self.prompt_tokens, "reused": self.reused_tokens, "written": self.written_tokens}
        return {"lines": self.lines, "failed": self.failed, "earlier": self.skipped, "tokens": tokens,
                "seconds": round(seconds, 3)}  # fmt: skip


def names_of(model: ModelFlags, flags: LineFlags) -> tuple[str, Path, Path]:
    """(model, input, output). With the model in a flag, the first word is the input."""
    if flags.input is None and model.model and (model.model_flag or model.hf_repo or model.model_url):
        model, flags = replace(model, model=None), replace(flags, input=model.model)
    name = model.name()
    if flags.input is None:
        raise UsageError("no input was given", "hgguf batch MODEL IN.jsonl -o OUT.jsonl")
    if flags.output is None:
        raise UsageError("no output was given", "give one with -o OUT.jsonl")
    return name, Path(flags.input), Path(flags.output)


def batch_verb(model: ModelFlags, flags: LineFlags, asked: BatchAsked, place: PlaceFlags) -> int:
    """`hgguf batch`. The exit code."""
    from ..lines.sink import Sink
    from ..lines.source import Source
    from ..request import GenerateOptions, merged, without_thoughts
    from ..sample.sampler import check_seed

    name, source_path, target = names_of(model, flags)
    _rules_of(flags, place)
    thinking, answer = thinking_of(asked.think), asked.answer
    seed = asked.sampling.seed
    path, suggested = find_shown(name)
    changes = sample_changes(asked.sampling, suggested)
    options = GenerateOptions(
        max_tokens=None if answer.predict < 0 else answer.predict,
        stop=tuple(typed_text(stop, errors="surrogateescape") for stop in answer.stop or ()),
        seed=None if seed is None or seed == -1 else check_seed(seed),
        ignore_end=answer.ignore_eos,
        reasoning_budget=thinking.budget,
        reasoning_format=thinking.form,
    )
    options = without_thoughts(merged(options, changes), thinking.wanted)
    source = Source(source_path)
    with Sink(target, (line.id for line in source), resume=flags.resume, source=source_path) as sink:
        if len(sink.done) == len(source):
            return _finish(sink, _Tally(len(source), skipped=len(sink.done)), flags, cancelled=False)
        needed = source.longest // _BYTES_A_TOKEN + max(answer.predict, 256)
        with _opened(path, place, flags, needed) as opened:
            writer = _Answers(opened, options, thinking, answer.chat_template, name)
            return _work(source, sink, flags, writer.answered)


def _rules_of(flags: LineFlags, place: PlaceFlags) -> Rules:
    from ..schedule import Rules

    if place.adapt_threads or place.adapt_kv:
        raise UsageError("--adapt-threads and --adapt-kv follow one request", "leave them out for many")
    return Rules(parallel=flags.parallel, step_s=flags.step_ms / 1000)


def _opened(path: Path, place: PlaceFlags, flags: LineFlags, needed: int) -> LanguageModel:
    rules = _rules_of(flags, place)
    prepared = prepare_shown(path, place, needed, parallel=flags.parallel)
    return open_shown(prepared, place, rules)


_Results = Iterator[tuple[Mapping[str, Any], Mapping[str, int]]]
_Answering = Callable[[Iterable["Line"], Callable[[], bool]], _Results]


def _work(source: Source, sink: Sink, flags: LineFlags, answered: _Answering) -> int:
    """Writes a line for each of `source` that has none yet."""
    tally = _Tally(len(source), skipped=len(sink.done))
    # The engine's thread waits for Python's lock after each step, 5 ms by default where this thread is busy with lines.
    sys.setswitchinterval(_SWITCH_S)
    with ExitStack() as undo:
        cancelled = undo.enter_context(interruptible())
        report = undo.enter_context(show.lines_progress("answering"))

        todo = (line for line in source if line.id not in sink.done)
        for output, usage in answered(todo, cancelled):
            sink.write(output)
            tally.lines += 1
            tally.failed += output["error"] is not None
            tally.prompt_tokens += usage.get("prompt", 0)
            tally.reused_tokens += usage.get("reused", 0)
            tally.written_tokens += usage.get("written", 0)
            report(tally.skipped + tally.lines, tally.total, tally.prompt_tokens + tally.written_tokens)
        stopped = cancelled() and tally.lines + tally.skipped < tally.total
    return _finish(sink, tally, flags, cancelled=stopped)


def _finish(sink: Sink, tally: _Tally, flags: LineFlags, *, cancelled: bool) -> int:
    if not cancelled:
        sink.publish()
    if flags.json:
        show.data(tally.as_json())
    done = tally.lines + tally.skipped
    if cancelled:
        show.note(f"stopped after {done} of {tally.total} lines; the same command with --resume goes on")
    elif not flags.quiet and not flags.json:
        facts = tally.as_json()
        rate = (tally.prompt_tokens + tally.written_tokens) / max(facts["seconds"], 1e-9)
        show.note(
            f"[{tally.lines} lines, {tally.failed} failed, {tally.skipped} from before · prompts {tally.prompt_tokens} "
            f"tokens ({tally.reused_tokens} reused), answers {tally.written_tokens} · {facts['seconds']:.1f} s, "
            f"{rate:.1f} tokens/s]"
        )
    return 130 if cancelled else 0


class _Answers:
    """Lines of a batch → output lines."""

    def __init__(
        self, opened: LanguageModel, options: GenerateOptions, thinking: Thinking, template: str | None, name: str
    ) -> None:
        from ..prompt.shared_renderer import SharedRenderer

        self._opened, self._options, self._thinking = opened, options, thinking
        self._template, self._name = template, name
        self._renderer = SharedRenderer()

    def answered(self, lines: Iterable[Line], stopped: Callable[[], bool]) -> _Results:
        """Each line's output and its tokens, as they are finished."""
        from ..lines.wire import answered, completion, failed

        taken: dict[int, tuple[Line, Asked | None]] = {}

        def writings() -> Iterator[Callable[[], Any]]:
            for index, line in enumerate(lines):
                taken[index] = (line, None)
                yield partial(self._writings, taken, index)

        token_bytes = partial(self._opened.opened.model.token_bytes, special=True)
        with closing(self._renderer):
            for done in self._opened.answers(writings(), stopped):
                line, asked = taken.pop(done.index)
                if done.result is None or asked is None:
                    yield failed(line, line.error or done.error or "it was not answered"), {}
                    continue
                now = int(time.time())
                body = completion(line, asked, done.result, model=self._name, created=now, text_of=token_bytes)
                usage = done.result[0].usage
                written = body["usage"]["completion_tokens"]
                counts = {"prompt": usage.prompt_tokens, "reused": usage.reused_tokens, "written": written}
                yield answered(line, body), counts

    def _writings(self, taken: dict[int, tuple[Line, Asked | None]], index: int) -> Sequence[Any]:
        from ..lines.body import asked_of

        line = taken[index][0]
        if line.error:
            raise UsageError(line.error)
        asked = asked_of(line.value, self._options)
        taken[index] = line, asked
        prompt = (
            self._opened.encode(asked.prompt)
            if asked.prompt is not None
            else self._opened.encode(
                None,
                asked.messages,
                chat_template=self._template,
                tools=asked.tools,
                template_kwargs={**self._thinking.kwargs, **asked.template_kwargs},
                reasoning=self._thinking.wanted,
                renderer=self._renderer,
            )
        )
        return self._opened.writings(prompt, asked.options, asked.n)


def score_verb(model: ModelFlags, flags: LineFlags, judged: ScoreFlags, place: PlaceFlags, template: str | None) -> int:
    """`hgguf score`. The exit code."""
    from ..lines.sink import Sink
    from ..lines.source import Source

    name, source_path, target = names_of(model, flags)
    _rules_of(flags, place)
    labels = [typed_text(label) for label in judged.labels.split(",")]
    if not all(labels) or len(set(labels)) < len(labels):
        raise UsageError(f"--labels {judged.labels} names an empty label, or one twice", "for example --labels yes,no")
    prefix = _prefix_of(judged)
    path, _ = find_shown(name)
    source = Source(source_path)
    with Sink(target, (line.id for line in source), resume=flags.resume, source=source_path) as sink:
        if len(sink.done) == len(source):
            return _finish(sink, _Tally(len(source), skipped=len(sink.done)), flags, cancelled=False)
        needed = (source.longest + len(prefix.encode())) // _BYTES_A_TOKEN + 256
        with _opened(path, place, flags, needed) as opened:
            judge = _Judge(opened, prefix, typed_text(judged.suffix), labels, template)
            return _work(source, sink, flags, judge.scored)


def _prefix_of(judged: ScoreFlags) -> str:
    if judged.prefix is not None and judged.prefix_file is not None:
        raise UsageError("--prefix and --prefix-file were both given", "give one of them")
    if judged.prefix_file is not None:
        return read_text(judged.prefix_file, "the prefix file")
    return typed_text(judged.prefix or "")


class _Judge:
    """Lines of texts to judge → output lines."""

    def __init__(
        self, opened: LanguageModel, prefix: str, suffix: str, labels: Sequence[str], template: str | None
    ) -> None:
        from ..prompt.shared_renderer import SharedRenderer

        self._opened, self._prefix, self._suffix = opened, prefix, suffix
        self._labels, self._template = labels, template
        self._renderer = SharedRenderer()

    def scored(self, lines: Iterable[Line], stopped: Callable[[], bool]) -> _Results:
        """Each line's output and its tokens, as they are finished."""
        from ..lines.wire import answered, failed

        taken: dict[int, Line] = {}

        def texts() -> Iterator[Callable[[], Sequence[int]]]:
            for index, line in enumerate(lines):
                taken[index] = line
                yield partial(self._tokens, line)

        with closing(self._renderer):
            done: Done[Any]
            for done in self._opened.score_tokens(self._prefix, texts(), self._labels, stopped):
                line = taken.pop(done.index)
                if done.result is None:
                    yield failed(line, line.error or done.error or "it was not judged"), {}
                    continue
                score = done.result
                best = max(range(len(self._labels)), key=lambda at: score.logprobs[at])
                body = {
                    "object": "score",
                    "label": self._labels[best],
                    "probabilities": dict(zip(self._labels, score.probabilities, strict=True)),
                    "logprobs": dict(zip(self._labels, score.logprobs, strict=True)),
                    "usage": {"computed_tokens": score.computed},
                }
                yield answered(line, body), {"prompt": score.computed}

    def _tokens(self, line: Line) -> Sequence[int]:
        if line.error:
            raise UsageError(line.error)
        value = line.value
        unknown = [key for key in value if key not in ("custom_id", "material", "messages")]
        if unknown:
            raise UsageError(f"'{unknown[0]:.60}' is not a key of a line to judge", "custom_id, material, messages")
        if ("material" in value) == ("messages" in value):
            raise UsageError("a line needs a material, or messages", '{"custom_id": "1", "material": "..."}')
        if "messages" in value:
            return self._conversation(value["messages"])
        if not isinstance(value["material"], str):
            raise UsageError("material is not a text")
        return self._opened.encode_part(value["material"] + self._suffix, first=not self._prefix)

    def _conversation(self, messages: Any) -> Sequence[int]:
        if self._prefix or self._suffix:
            raise UsageError("messages go through the chat template, and a prefix or suffix would stand outside it")
        if not isinstance(messages, list):
            raise UsageError("messages is not a list")
        return self._opened.encode(None, messages, chat_template=self._template, renderer=self._renderer).tokens
