"""The verbs that open a model: run, plan, bench. Flags → plan → answer; knows no terminal beyond show.py.

Invariant: an interrupt keeps the text so far and ends within a second, also while a long prompt is read.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadFile, HgError, NotNumbers, SampleError, UsageError
from ..plan import Plan
from ..plan.make import DEFAULT_CONTEXT
from ..printable import printable
from . import show
from .arguments import Question, endpoints_of, limits_of, question_of, sample_changes
from .endings import INTERRUPTED
from .options import BenchFlags, PlaceFlags, PlanOutput, PromptFlags, RunOutput, SampleFlags, ThinkFlags
from .thinking import Thinking, thinking_of

if TYPE_CHECKING:
    from ..generate import LanguageModel
    from ..loader import Prepared
    from ..prompt.encode import Prompt
    from ..prompt.renderer import Renderer
    from ..reply import Reply
    from ..request import GenerateOptions
    from ..schedule import Rules

#: fields of a context that a measurement depends on
_CONTEXT_NAMES = ("threads", "threads_batch", "n_ctx", "n_batch", "n_ubatch", "type_k", "type_v", "flash_attention")
_TEMPLATE_ROOM = 512  # tokens that a chat template may add around a message


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """While inside, Ctrl-C only makes the yielded function true; what takes too long then is ended by `endings`."""
    asked = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal asked
        asked = True

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # whoever started this in the background wants it left alone
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interruptible_load() -> Iterator[Callable[[], bool]]:
    """As `interruptible`, for calls into the engine: an exception inside one of its callbacks would be swallowed.

    Raises KeyboardInterrupt at the end when Ctrl-C came.
    """
    with interruptible() as asked:
        try:
            yield asked
        finally:
            if asked():
                raise KeyboardInterrupt


def find_shown(text: str) -> tuple[Path, Mapping[str, float]]:
    """`open.find_model` with a progress bar."""
    from ..open import find_model

    with show.progress(f"fetching {text}", sizes=True) as progress:
        return find_model(text, progress)


def prepare_shown(
    path: Path,
    place: PlaceFlags,
    tokens_needed: int = 0,
    *,
    prompt: str = "",
    use_tuned: bool = True,
    stock_only: bool = False,
    parallel: int = 1,
) -> Prepared:
    """The plan for these flags, its warnings shown."""
    from ..loader import prepare

    use_tuned = use_tuned and not place.no_tuned
    limits = replace(limits_of(place, tokens_needed), stock_only=stock_only, parallel=parallel)
    prepared = prepare(path, limits, rpc=endpoints_of(place.rpc), use_tuned=use_tuned, prompt=prompt)
    for text in prepared.plan.warnings:
        show.warning(text)
    return prepared


def open_shown(prepared: Prepared, place: PlaceFlags, rules: Rules | None = None) -> LanguageModel:
    """Opens it, with a bar. `rules`: for several requests at once."""
    from ..engine.handles import set_numa, start
    from ..open import open_prepared

    with show.progress("loading") as progress, interruptible_load() as asked:
        start(echo_log=bool(os.environ.get("HGGUF_DEBUG")))
        if place.numa is not None:
            set_numa(place.numa)

        def report(share: float) -> bool:
            progress(round(share * 100), 100)
            return not asked()

        return open_prepared(prepared, report, adapt_threads=place.adapt_threads, adapt_kv=place.adapt_kv, rules=rules)


def _sized(question: Question, predict: int, fixed: bool) -> tuple[int, str]:
    """(most tokens of prompt and answer, text whose tokens come on top: counted only when that may matter)."""
    text = question.text + (question.system or "")
    room = _TEMPLATE_ROOM + max(predict, 0 if fixed else 256)
    bound = len(text.encode("utf-8")) + room
    return (bound, "") if fixed or bound <= DEFAULT_CONTEXT else (room, text)


@dataclass(frozen=True)
class Asked:
    """What a request's flags say: the prompt, thinking, sampling."""

    ask: PromptFlags
    think: ThinkFlags
    sampling: SampleFlags


def run_verb(model: str, asked: Asked, place: PlaceFlags, output: RunOutput) -> int:
    """`hgguf run`. The exit code."""
    from ..prompt.template import Renderer
    from ..request import GenerateOptions, merged, without_thoughts
    from ..sample.sampler import check_seed

    ask, sampling = asked.ask, asked.sampling
    question, thinking = question_of(ask), thinking_of(asked.think)
    seed = None if sampling.seed is None or sampling.seed == -1 else check_seed(sampling.seed)
    limits_of(place)  # what is wrong with the flags is said before a model is fetched
    path, suggested = find_shown(model)
    options = GenerateOptions(
        max_tokens=None if ask.predict < 0 else ask.predict,
        stop=question.stops,
        grammar=question.grammar,
        json_schema=question.json_schema,
        seed=seed,
        ignore_end=ask.ignore_eos,
        reasoning_budget=thinking.budget,
        reasoning_format=thinking.form,
    )
    options = without_thoughts(merged(options, sample_changes(sampling, suggested)), thinking.wanted)
    renderer = None if question.raw or output.dry_run else Renderer()
    try:
        needed, text = _sized(question, ask.predict, place.ctx_size is not None)
        prepared = prepare_shown(path, place, needed, prompt=text)
        options = _with_rules(prepared, options, strict=place.strict)
        if output.dry_run:
            _print_plan(prepared.plan, output.json, explain=output.verbose or output.explain)
            return 0
        with open_shown(prepared, place) as opened:
            prompt = _encode(opened, question, ask.chat_template, thinking, renderer)
            try:
                return _answer(opened, prompt, options, output)
            except NotNumbers as error:
                raise _explained(error, prepared) from None
    finally:
        if renderer is not None:
            renderer.close()


def _with_rules(prepared: Prepared, options: GenerateOptions, *, strict: bool) -> GenerateOptions:
    """The options with a grammar that was compiled before any weight is read, if a grammar or a schema was given."""
    if options.grammar is None and options.schema_text is None:
        return options
    from ..grammar import checked

    rules = checked(prepared.shape.file.path, options.grammar, options.schema_text)
    told = [f"of the JSON schema, {words} has no effect" for words in rules.without_effect]
    if strict and told:
        raise UsageError(told[0], "leave it out, or leave out --strict")
    for text in told:
        show.warning(text)
    return replace(options, grammar=rules.text, json_schema=None)


def _explained(error: NotNumbers, prepared: Prepared) -> HgError:
    """Whose fault it is that a model computes NaN: the file's, which is read through to tell, or the computation's."""
    from ..model_file.validation import bad_numbers

    if found := bad_numbers(prepared.shape.file):
        more = f", and {len(found) - 1} other tensors do as well" if len(found) > 1 else ""
        return BadFile(f"{printable(str(prepared.path))}: {found[0]}{more}", "fetch the file, or make it, again")
    return SampleError(
        f"{error.what}, though all weights are numbers: a step of the computation overflowed",
        "try other KV types (-ctk f16 -ctv f16), -fa off, or fewer GPU layers",
    )


def _encode(
    opened: LanguageModel, question: Question, template: str | None, thinking: Thinking, renderer: Renderer | None
) -> Prompt:
    from ..prompt.encode import Message

    if question.raw:
        if thinking != Thinking(None, None, "auto", {}):
            show.warning("--raw leaves out the chat template, and with it all that is said about thinking")
        return opened.encode(question.text)
    messages = [Message("system", question.system)] if question.system else []
    messages.append(Message("user", question.text))
    prompt = opened.encode(
        None,
        messages,
        chat_template=template,
        template_kwargs=thinking.kwargs,
        reasoning=thinking.wanted,
        renderer=renderer,
    )
    if thinking.budget is not None and prompt.style.marks is None:
        show.warning("--reasoning-budget has no effect: the chat template marks no thoughts")
    return prompt


def _answer(opened: LanguageModel, prompt: Prompt, options: GenerateOptions, output: RunOutput) -> int:
    """Streams the answer to stdout (or prints it whole as JSON) and the statistics to stderr."""
    reply: Reply | None = None
    thoughts = show.Thoughts(to_stderr=options.reasoning_format == "deepseek" and not output.quiet)
    with interruptible() as cancelled, ExitStack() as bar:
        progress = bar.enter_context(show.progress("reading the prompt"))
        for chunk in opened.run(prompt, options, cancelled=cancelled, progress=progress):
            bar.close()
            if not output.json:
                thoughts.show(chunk.reasoning)
                thoughts.end(chunk.text)
                show.answer(chunk.text)
            reply = chunk.reply
    if reply is None:
        return 1
    if output.json:
        show.data(reply.as_json())
    elif not reply.text.endswith("\n"):
        show.answer("\n")
    if output.verbose or output.explain:
        show.plan_notes(reply.plan)
        show.tier_notes(reply)
    if not output.quiet and not output.json:
        show.statistics(reply)
    return INTERRUPTED if reply.finish_reason == "cancelled" else 0


def plan_verb(model: str, place: PlaceFlags, output: PlanOutput) -> None:
    """`hgguf plan`."""
    form = output.form
    if form not in ("table", "args"):
        raise UsageError(f"--format {form} is not known", "one of: table, args")
    limits_of(place)
    path, _ = find_shown(model)
    made = prepare_shown(path, place).plan
    if form == "args" and made.placement.tiers is not None:
        show.warning("this plan keeps KV in two memories, which stock llama.cpp cannot: its flags here are the nearest")
        plain = replace(place, plan=None, ctx_size=made.context.n_ctx, kv_vram=None, kv_ram_type=None)
        made = prepare_shown(path, plain, stock_only=True).plan
    if form == "args":
        show.answer(" ".join(shlex.quote(part) for part in ("-m", str(path), *made.as_arguments())) + "\n")
    else:
        _print_plan(made, output.json, explain=output.explain)


def _print_plan(made: Plan, as_json: bool, *, explain: bool) -> None:
    if as_json:
        show.data({"plan": made.as_json()})
    else:
        show.plan(made, explain=explain)


def _numbers(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} {text} is not a list of numbers", f"for example {flag} 0,4096") from None


def bench_verb(model: str, place: PlaceFlags, flags: BenchFlags) -> int:
    """`hgguf bench`. The exit code."""
    from ..bench.measure import run_tests, tests_of
    from ..bench.report import FORMATS, formatted

    form, repeats = "json" if flags.json else flags.output, flags.repetitions
    lists = flags.n_prompt, flags.n_gen, flags.n_depth
    if form not in FORMATS:
        raise UsageError(f"-o {form} is not known", f"one of: {', '.join(FORMATS)}")
    n_prompt, n_gen, depths = (_numbers(flag, text) for flag, text in zip(("-p", "-n", "-d"), lists, strict=True))
    tests = tests_of(n_prompt, n_gen, depths)
    needed = max(test.n_depth + max(test.n_prompt, test.n_gen) for test in tests)
    limits_of(place)
    path, _ = find_shown(model)
    if place.ctx_size is None:
        place = replace(place, ctx_size=needed)
    prepared = prepare_shown(path, place, use_tuned=False)  # what is measured is what the flags say
    records = []
    with open_shown(prepared, place) as opened, interruptible() as cancelled, show.progress("measuring") as progress:
        context, plan = opened.opened.context, prepared.plan
        for record in run_tests(
            context, tests, repeats, cancelled, n_vocab=opened.opened.model.n_vocab, chunk=plan.context.n_batch
        ):
            records.append(record)
            progress(len(records), len(tests))
        stopped = cancelled()
    if records:
        show.answer(formatted(records, bench_settings(path, plan), form) + "\n")
    return INTERRUPTED if stopped else 0


def bench_settings(path: Path, plan: Plan) -> dict[str, object]:
    """What a record was measured with."""
    from ..engine.library import load

    library = load()
    return {
        "model": path.name,
        "engine": library.commit,
        "patches": list(library.patches),
        "switches": {switch.name: switch.value for switch in library.switches()},
        "n_gpu_layers": plan.model.n_gpu_layers,
        **{name: getattr(plan.context, name) for name in _CONTEXT_NAMES},
    }
