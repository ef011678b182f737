"""Text from files and strangers, made safe to show on a terminal. Pure; knows nothing of files.

Invariant: `printable(text)` holds no character that moves the cursor, changes colours, reverses the reading direction
or cannot be encoded: each becomes a visible escape such as `\\x1b`. `printable(printable(text)) == printable(text)`.
"""

from __future__ import annotations

_KEPT = {"\n", "\t"}
# Right-to-left overrides and isolates: they can make a shown name read as another one.
_DIRECTION = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C}


def printable(text: str, one_line: bool = True, limit: int = 0) -> str:
    """`text` with control characters, direction marks and lone surrogates written as escapes.

    `one_line`: newlines and tabs are escaped too. `limit`: characters kept (0: all); what is left out ends in `…`.
    """
    cut = bool(limit) and len(text) > limit
    shown = text[:limit] if cut else text
    if not (shown.isprintable() and shown.isascii()):
        shown = "".join(_escape(char, one_line) for char in shown)
    return shown + "…" if cut else shown


def _escape(char: str, one_line: bool) -> str:
    code = ord(char)
    if char in _KEPT and not one_line:
        return char
    if code < 0x20 or 0x7F <= code < 0xA0:
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char, f"\\x{code:02x}")
    if code in _DIRECTION or 0xD800 <= code < 0xE000 or code in (0x2028, 0x2029):
        return f"\\u{code:04x}"
    return char
