"""What a file that is not GGUF most likely is, from its first bytes. Pure; reads no file.

Knows the things people really hand to a GGUF program: error pages, Git LFS pointers, checkpoints of other formats,
archives, preallocated downloads. Invariant: `name_foreign` always gives one sentence part and maybe one hint.
"""

from __future__ import annotations

from ..printable import printable

_CONVERT = "convert the model's folder with: hgguf convert FOLDER OUT.gguf"
_AGAIN = "fetch the file again"
_MAGICS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the model itself", "fetch the real file with: git lfs pull"),
    (b"PK\x03\x04", "a zip archive or PyTorch checkpoint", _CONVERT),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"\xfd7zXZ\x00", "an xz archive", "unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it first"),
    (b"lmgg", "a GGML file from before GGUF", "convert the original model again; this format is no longer read"),
    (b"fmgg", "a GGMF file from before GGUF", "convert the original model again; this format is no longer read"),
    (b"tjgg", "a GGJT file from before GGUF", "convert the original model again; this format is no longer read"),
    (b"algg", "a GGLA adapter from before GGUF", "convert the adapter again"),
    (b"\x89HDF", "an HDF5 file", _CONVERT),
    (b"\x08\x00\x00\x00TFL3", "a TensorFlow Lite model", ""),
    (b"\x7fELF", "a program or library", ""),
)


def name_foreign(head: bytes) -> tuple[str, str]:
    """(what the file is, hint) for the first bytes `head` of a file that does not start with GGUF; at least 1 byte."""
    for magic, what, hint in _MAGICS:
        if head.startswith(magic):
            return what, hint
    if not head.strip(b"\0"):
        return "zeros at its start: a download or write that never finished", _AGAIN
    lowered = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if lowered.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "a web page, most likely an error or login page saved by a download", _AGAIN
    if len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file", _CONVERT
    if head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a Python pickle, most likely an old PyTorch checkpoint", "it is not opened: a pickle can run code"
    return _text_or_bytes(head)


def _text_or_bytes(head: bytes) -> tuple[str, str]:
    text = head[:64].decode("utf-8", errors="replace")
    readable = sum((char.isprintable() and char != "�") or char in "\r\n\t" for char in text)
    if readable >= 0.9 * len(text):
        line = text.strip().splitlines()[0] if text.strip() else text
        return f"a text file that starts with '{printable(line, limit=24)}'", ""
    return f"an unknown format that starts with the bytes {head[:4].hex(' ')}", ""
