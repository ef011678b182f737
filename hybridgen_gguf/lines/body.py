"""The body of a request in OpenAI's API → what is to be written. Knows names and types of keys; no model.

Invariant: every key is used, or known to change nothing here, or refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from ..request import GenerateOptions, merged

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_SAME = ("top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "presence_penalty",
         "frequency_penalty", "top_n_sigma", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base",
         "dry_allowed_length", "dry_penalty_last_n", "dynatemp_range", "dynatemp_exponent", "temperature", "priority",
         "reasoning_budget", "reasoning_format")  # fmt: skip
_WHOLE = ("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "priority", "reasoning_budget")
_NO_EFFECT = ("model", "user", "metadata", "store", "service_tier", "cache_prompt", "parallel_tool_calls")
_MOST_ANSWERS = 128


@dataclass(frozen=True)
class Asked:
    """One request: `prompt`, or `messages` where it is None; how its answers are written; how many."""

    prompt: str | None
    messages: Sequence[Mapping[str, Any]] = ()
    options: GenerateOptions = field(default_factory=GenerateOptions)
    n: int = 1
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    top_logprobs: int | None = None


def asked_of(line: Mapping[str, Any], defaults: GenerateOptions) -> Asked:
    """What a line of a batch file asks for. `defaults`: what its body leaves open. Raises UsageError naming the key."""
    unknown = [key for key in line if key not in ("custom_id", "method", "url", "body")]
    if unknown:
        raise UsageError(f"'{unknown[0]:.60}' is not a key of a batch line", "custom_id, method, url, body")
    body = line.get("body")
    if not isinstance(body, dict):
        raise UsageError("the line has no body", 'for example {"custom_id": "1", "body": {"prompt": "..."}}')
    if line.get("method", "POST") != "POST":
        raise UsageError(f"method {line['method']!r:.40} is not POST")
    url = line.get("url", CHAT if "messages" in body else TEXT)
    if url not in (CHAT, TEXT):
        raise UsageError(f"url {url!r:.80} is not known", f"one of: {CHAT}, {TEXT}")
    return body_of(body, defaults, chat=url == CHAT)


def body_of(body: Mapping[str, Any], defaults: GenerateOptions, *, chat: bool) -> Asked:
    """What a body asks for; `chat`: of the chat endpoint. Raises UsageError naming the key."""
    left = {key: value for key, value in body.items() if value is not None and key not in _NO_EFFECT}
    take = _Taker(left)
    if take.flag("stream"):
        raise UsageError("body.stream is for single requests", "leave it out: answers are written when they are whole")
    changes: dict[str, Any] = {}
    for name in _SAME:
        if name in left:
            changes[name] = take.text(name) if name == "reasoning_format" else take.number(name, whole=name in _WHOLE)
    limits = [take.number(name, whole=True) for name in ("max_completion_tokens", "max_tokens") if name in left]
    if limits:
        changes["max_tokens"] = None if limits[0] < 0 else limits[0]
    if "seed" in left:
        changes["seed"] = None if (seed := take.number("seed", whole=True)) == -1 else seed
    if "stop" in left:
        changes["stop"] = take.texts("stop")
    if "logit_bias" in left:
        changes["logit_bias"] = take.biases("logit_bias")
    top = _top_logprobs(take, left, chat=chat)
    if top is not None:
        changes["logprobs"] = max(top, 1)
    if "ignore_eos" in left:
        changes["ignore_end"] = take.flag("ignore_eos")
    n = int(take.number("n", whole=True)) if "n" in left else 1
    if not 1 <= n <= _MOST_ANSWERS:
        raise UsageError(f"body.n {n} is out of range", f"give 1 to {_MOST_ANSWERS}")
    prompt = None if chat else take.text("prompt")
    messages = take.objects("messages") if chat else ()
    tools = take.objects("tools") if chat and "tools" in left else ()
    kwargs = take.mapping("chat_template_kwargs") if chat and "chat_template_kwargs" in left else {}
    take.nothing_left()
    return Asked(prompt, messages, merged(defaults, changes), n, tools, kwargs, top)


def _top_logprobs(take: _Taker, left: Mapping[str, Any], *, chat: bool) -> int | None:
    """How many log-probabilities a token gets, or None for none: `logprobs` is a flag in chats, a number elsewhere."""
    if not chat:
        return int(take.number("logprobs", whole=True)) if "logprobs" in left else None
    wanted = take.flag("logprobs")
    top = int(take.number("top_logprobs", whole=True)) if "top_logprobs" in left else 0
    if top and not wanted:
        raise UsageError("body.top_logprobs needs body.logprobs", "set logprobs to true")
    return top if wanted else None


class _Taker:
    """Takes keys of a body, each checked; what is left at the end is not known."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = dict(body)

    def _take(self, name: str, kind: str, good: Callable[[Any], bool]) -> Any:
        if name not in self._left:
            raise UsageError(f"body.{name} is missing")
        value = self._left.pop(name)
        if not good(value):
            raise UsageError(f"body.{name} is not {kind}")
        return value

    def number(self, name: str, *, whole: bool = False) -> Any:
        value = self._take(name, "a number", lambda v: isinstance(v, (int, float)) and not isinstance(v, bool))
        if whole and (not math.isfinite(value) or value != int(value)):
            raise UsageError(f"body.{name} is not a whole number")
        return int(value) if whole else value

    def flag(self, name: str) -> bool:
        return bool(self._take(name, "true or false", lambda v: isinstance(v, bool))) if name in self._left else False

    def text(self, name: str) -> str:
        return str(self._take(name, "a text", lambda v: isinstance(v, str)))

    def texts(self, name: str) -> tuple[str, ...]:
        def good(value: Any) -> bool:
            return isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))

        value = self._take(name, "a text or a list of texts", good)
        return (value,) if isinstance(value, str) else tuple(value)

    def objects(self, name: str) -> Sequence[Mapping[str, Any]]:
        value: Sequence[Mapping[str, Any]] = self._take(
            name, "a list of objects", lambda v: isinstance(v, list) and all(isinstance(item, dict) for item in v)
        )
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self._take(name, "an object", lambda v: isinstance(v, dict))
        return value

    def biases(self, name: str) -> tuple[tuple[int, float], ...]:
        def good(value: Any) -> bool:
            return isinstance(value, dict) and all(
                key.isdigit() and isinstance(bias, (int, float)) for key, bias in value.items()
            )

        return tuple((int(key), float(bias)) for key, bias in self._take(name, "token ids with biases", good).items())

    def nothing_left(self) -> None:
        if self._left:
            raise UsageError(f"body.{next(iter(self._left)):.60} is not known", "see docs/batch.md for the keys")
