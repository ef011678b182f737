"""Replies and errors as the objects of OpenAI's API. Knows no files and no engine.

Invariant: a line has a response or an error, never both, and the id and custom_id of the line that it answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import HgError
from ..reply import Reply
from ..sample import Draw
from .body import Asked
from .source import Line

_LEAST = -9999.0  # OpenAI's number for "impossible": JSON has no infinity


def answered(line: Line, body: Mapping[str, Any]) -> dict[str, Any]:
    """An output line with a response."""
    response = {"status_code": 200, "request_id": line.id.replace("batch_", ""), "body": dict(body)}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


def failed(line: Line, problem: HgError | str) -> dict[str, Any]:
    """An output line with an error: what is wrong and, where something can be done, a hint."""
    what, hint = (problem, "") if isinstance(problem, str) else (problem.what, problem.hint)
    code = "invalid_line" if isinstance(problem, str) else type(problem).__name__
    error = {"code": code, "message": what, "line": line.number} | ({"hint": hint} if hint else {})
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}


def completion(
    line: Line, asked: Asked, replies: Sequence[Reply], *, model: str, created: int, text_of: Callable[[int], bytes]
) -> dict[str, Any]:
    """A completion object. `created`: seconds since 1970; `text_of`: the bytes of a token."""
    chat = asked.prompt is None
    usage = replies[0].usage
    written = sum(reply.usage.completion_tokens for reply in replies)
    choices = [
        _chat_choice(index, reply, asked, text_of) if chat else _text_choice(index, reply, asked, text_of)
        for index, reply in enumerate(replies)
    ]
    return {
        "id": line.id.replace("batch_req_", "chatcmpl-" if chat else "cmpl-"),
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": usage.prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
        },
    }


def _chat_choice(index: int, reply: Reply, asked: Asked, text_of: Callable[[int], bytes]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    shown = None
    if asked.top_logprobs is not None:
        shown = {"content": [_chat_logprob(draw, asked.top_logprobs, text_of) for draw in reply.logprobs]}
    return {
        "index": index,
        "message": message,
        "finish_reason": reply.finish_reason,
        "logprobs": shown,
        "seed": reply.seed,
    }


def _text_choice(index: int, reply: Reply, asked: Asked, text_of: Callable[[int], bytes]) -> dict[str, Any]:
    shown = None
    if asked.top_logprobs is not None:
        top = [
            {_text(text_of(s.token)): _number(s.logprob) for s in draw.top[: asked.top_logprobs]}
            for draw in reply.logprobs
        ]
        shown = {
            "tokens": [_text(text_of(draw.token)) for draw in reply.logprobs],
            "token_logprobs": [_number(draw.logprob) for draw in reply.logprobs],
            "top_logprobs": top,
        }
    return {
        "index": index,
        "text": reply.text,
        "finish_reason": reply.finish_reason,
        "logprobs": shown,
        "seed": reply.seed,
    }


def _chat_logprob(draw: Draw, top: int, text_of: Callable[[int], bytes]) -> dict[str, Any]:
    best = [_token(scored.token, scored.logprob, text_of) for scored in draw.top[:top]]
    return _token(draw.token, draw.logprob, text_of) | {"top_logprobs": best}


def _token(token: int, logprob: float | None, text_of: Callable[[int], bytes]) -> dict[str, Any]:
    data = text_of(token)
    return {"token": _text(data), "logprob": _number(logprob), "bytes": list(data)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _number(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else _LEAST
