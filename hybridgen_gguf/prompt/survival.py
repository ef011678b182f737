"""Whether a text is whole in what a template made of it. Pure.

A template may trim, quote (JSON, HTML) and re-wrap, and take away words that it knows itself, such as `/no_think`.
Invariant: every other word of a text of `_SHORT` characters and more is found, in its order. Of shorter texts only the
marker tells (forms.py): `{{ content | length }}` is a template's own business.
"""

from __future__ import annotations

import html
import json

_SHORT = 32


def survives(text: str, rendered: str, source: str) -> bool:
    """Whether `rendered`, made by the template `source`, holds `text` but for white space."""
    if len(text.strip()) < _SHORT or text.strip() in rendered:
        return True
    spellings = (
        text,
        json.dumps(text, ensure_ascii=False)[1:-1],
        json.dumps(text)[1:-1],
        html.escape(text),
        html.escape(text, quote=False),
        text.replace("'", "\\'"),
    )
    return any(_in_order(spelled.split(), rendered, source) for spelled in dict.fromkeys(spellings))


def _in_order(words: list[str], rendered: str, source: str) -> bool:
    at = 0
    for word in words:
        found = rendered.find(word, at)
        if found < 0:
            if word in source:
                continue
            return False
        at = found + len(word)
    return True
