"""Whatever the bytes: a header that holds its invariant, or one of our errors, soon and in little memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import rawgguf as raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridgen_gguf.errors import HgError
from hybridgen_gguf.model_file.header import ArrayView, Header, read_header
from hybridgen_gguf.model_file.inspection import inspect_file
from hybridgen_gguf.model_file.validation import validate_file
from hybridgen_gguf.printable import printable

FAST = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = {
    "u8": st.integers(0, 255),
    "i8": st.integers(-128, 127),
    "u16": st.integers(0, 2**16 - 1),
    "i32": st.integers(-(2**31), 2**31 - 1),
    "u32": st.integers(0, 2**32 - 1),
    "u64": st.integers(0, 2**64 - 1),
    "i64": st.integers(-(2**63), 2**63 - 1),
    "f32": st.floats(width=32, allow_nan=False),
    "f64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "str": st.text(max_size=30),
}
NAMES = st.text(min_size=1, max_size=20).filter(lambda name: name != "general.alignment")
ANY = st.sampled_from(sorted(SCALARS)).flatmap(lambda kind: st.tuples(st.just(kind), SCALARS[kind]))
LISTS = st.sampled_from(sorted(SCALARS)).flatmap(
    lambda kind: st.tuples(st.just(kind), st.lists(SCALARS[kind], max_size=12))
)


def sound_model() -> bytes:
    entries, data = raw.tensors(
        {"token_embd.weight": [64, 3], "blk.0.attn_q.weight": [64, 2], "output_norm.weight": [64]}
    )
    keys = raw.model_keys("gemma3", block_count=1, attention__sliding_window=4)
    keys += [raw.array("tokenizer.ggml.tokens", "str", "abc"), raw.key("tokenizer.chat_template", "str", "{{ x }}")]
    return raw.gguf_bytes(keys, entries, data)


SOUND = sound_model()


def check(header: Header) -> None:
    end = 0
    for tensor in header.tensors:
        assert tensor.offset == end and tensor.offset % header.alignment == 0
        assert header.data_offset + tensor.offset + tensor.bytes <= header.file_bytes
        end = -(-(tensor.offset + tensor.bytes) // header.alignment) * header.alignment
    for value in header.metadata.values():
        if isinstance(value, ArrayView):
            assert value.offset + value.size <= header.file_bytes
            assert len(value.load()) == value.count


@FAST
@given(st.dictionaries(NAMES, ANY, max_size=8), st.dictionaries(NAMES.map("a.".__add__), LISTS, max_size=5))
def test_what_is_written_is_read(
    tmp_path: Path, scalars: dict[str, tuple[str, object]], lists: dict[str, tuple[str, list[object]]]
) -> None:
    keys = [raw.key(name, *value) for name, value in scalars.items()]
    keys += [raw.array(name, *value) for name, value in lists.items() if name not in scalars]
    header = read_header(raw.write(tmp_path, raw.gguf_bytes(keys)))
    for name, (_, value) in scalars.items():
        assert header.metadata[name] == value
    for name, (_, values) in lists.items():
        view = header.metadata[name]
        if isinstance(view, ArrayView):
            assert list(view.load()) == values and list(view.load(3)) == values[:3]


@FAST
@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), min_size=1, max_size=6), st.data())
def test_flipped_bytes(tmp_path: Path, flips: list[tuple[int, int]], data: st.DataObject) -> None:
    changed = bytearray(SOUND)
    for at, value in flips:
        changed[at] = value
    size = data.draw(st.sampled_from([len(SOUND), len(SOUND), len(SOUND) - 1, len(SOUND) // 2]))
    survive(raw.write(tmp_path, bytes(changed[:size])))


@FAST
@given(st.integers(0, len(SOUND) - 8), st.sampled_from([0, 1, 7, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
def test_lying_numbers(tmp_path: Path, at: int, number: int) -> None:
    survive(raw.write(tmp_path, SOUND[:at] + struct.pack("<Q", number) + SOUND[at + 8 :]))


@FAST
@given(st.binary(max_size=300))
def test_noise(tmp_path: Path, noise: bytes) -> None:
    survive(raw.write(tmp_path, noise))
    survive(raw.write(tmp_path, b"GGUF" + struct.pack("<I", 3) + noise))


def survive(path: Path) -> None:
    report = validate_file(path)
    assert report.ok == (not report.problems)
    assert not any("\n" in problem or "\x1b" in problem for problem in report.problems)
    try:
        check(read_header(path))
        seen = inspect_file(path)
    except HgError:
        assert not report.ok
        return
    json.dumps(seen.as_json(), allow_nan=False).encode()
    assert all(printable(line) == line for line in seen.lines())


@FAST
@given(st.text())
def test_printable_is_harmless_and_stable(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 or 0xD800 <= ord(char) < 0xE000 for char in shown)
    shown.encode()


def test_sound_model_is_sound(tmp_path: Path) -> None:
    assert validate_file(raw.write(tmp_path, SOUND)).ok
    with pytest.raises(HgError):
        read_header(raw.write(tmp_path, SOUND[:-1]))
