"""Digests taken while a file is still written: equal to those of the finished file, whatever the writer does."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tinygguf import build

from hybridgen_gguf.engine.jobs.digest import Digests, place_of
from hybridgen_gguf.errors import BadFile, EngineError
from hybridgen_gguf.make.quantize import QuantizeOptions, job_options, quantize
from hybridgen_gguf.model_file.split import open_model_file

KEY, UNKNOWN = "k", "0" * 64
# Prints, for each file of a job, whether its header is the one that the forecast had made.
COMPARE = """
import json, sys
from pathlib import Path
from hybridgen_gguf.engine.jobs.quantize import _forecast
job, paths = json.loads(sys.argv[1])
headers = _forecast(job)[1]
print(json.dumps([Path(p).read_bytes()[: len(h)] == h for p, h in zip(paths, headers, strict=True)]))
"""


def _header(filler: bytes) -> bytes:
    name = KEY.encode()
    entry = len(name).to_bytes(8, "little") + name + (8).to_bytes(4, "little") + (64).to_bytes(8, "little")
    return b"GGUF" + filler + entry + UNKNOWN.encode() + b"rest"


def _written(path: Path, header: bytes, body: bytes, real: bytes | None = None) -> None:
    """Writes as the engine does: room for the header, the body bit by bit, the header at the end."""
    with path.open("wb") as file:
        file.write(bytes(len(header)))
        for start in range(0, len(body), 1 << 16):
            file.write(body[start : start + (1 << 16)])
            file.flush()
            time.sleep(0.003)
        file.seek(0)
        file.write(real or header)


@pytest.mark.parametrize("real", [None, b"other"])
def test_digests_of_growing_files(tmp_path: Path, real: bytes | None) -> None:
    source, paths = tmp_path / "s", [tmp_path / "a", tmp_path / "b"]
    source.write_bytes(b"source" * 1000)
    headers = [_header(b"one"), _header(b"two")]
    digests = Digests([str(source)], [str(path) for path in paths], headers, KEY, UNKNOWN)
    _written(paths[0], headers[0], bytes(range(256)) * 2000, _header(b"oth") if real else None)
    _written(paths[1], headers[1], b"second" * 50_000)
    found = digests.finish()
    assert found["source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert found["sha256"] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert found["source_sha256"].encode() in paths[0].read_bytes() and UNKNOWN.encode() in paths[1].read_bytes()


def test_what_goes_wrong_in_the_thread_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")
    with pytest.raises(BadFile, match="cannot be read: No such file"):
        Digests([str(tmp_path / "absent")], [str(path)], [_header(b"")], KEY, UNKNOWN).finish()
    with pytest.raises(EngineError, match="did not write k"):
        Digests([str(path)], [str(path)], [b"no such key"], KEY, UNKNOWN).finish()
    assert place_of(_header(b"abc"), KEY, UNKNOWN) == _header(b"abc").index(UNKNOWN.encode())


@pytest.mark.parametrize("split", [0, 4])
def test_the_header_is_the_one_made_beforehand(tmp_path: Path, split: int) -> None:
    # Were it another, all digests would be taken a second time: right, but slow.
    source = build(tmp_path / "m.gguf", embd=256, ff=512, split=split)
    done = quantize(QuantizeOptions(source, tmp_path / "q.gguf", "Q4_K_M", keep_split=bool(split)))
    assert len(done.paths) == (5 if split else 1)
    options = QuantizeOptions(source, tmp_path / "q.gguf", "Q4_K_M", keep_split=bool(split))
    job = job_options(options, open_model_file(source), done.recipe)
    command = [sys.executable, "-c", COMPARE, json.dumps([job, [str(path) for path in done.paths]])]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == [True] * len(done.paths)
    assert list(done.sha256) == [hashlib.sha256(path.read_bytes()).hexdigest() for path in done.paths]
