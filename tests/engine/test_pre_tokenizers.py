"""A text cannot kill a tokenizer: of any kind, with any pre-tokenizer, it takes time linear in the text or is refused.

The names and expressions are read out of the pinned source, so those of a newer engine are tested too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizer_models
import vocab_source
from long_texts import TEXTS
from seed import FUZZING, SEED

from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.make.convert import converter_folder

SIZE = 60_000  # bytes of a long text; std::regex dies of it, and a quadratic search takes seconds
CPU_S = 5.0  # allowed for one; measured: 0.2 at most
FEW = ("letter", "spaces-letter", "digits", "han")  # for a pre-tokenizer whose expressions another one has
GROUPS = 4
POOLS = (
    "aAbBzZ", "  \t\n\r\v", "0123456789", "'sStTrReEvVmMlLdD", "!?.,-/:;~`^|$+<=>()[]{}_@#%&*\"\\",
    "éÉßǅʰªºñ", "жЖ", "漢字一龥ぁァー가힣ㄅㄱ", "\u0301\u0300\u093f\u0bcd", "😀👍🏽\u200d",
    "\u00a0\u2003\u3000\u0085\u2028", "٣१²Ⅷ", "。，、…“”‘’—：；！", "ﬀＡａ𐐀𞤀", "\x00\x7f\ufffd\u00ad",
    "IMGIMGABZ<sentinel:12>", "עבריתعربيไทยবাংলা",
)  # fmt: skip


def random_text(rng: random.Random) -> bytes:
    """Short: signs of all scripts, of two alone, or in runs. Every seventh is damaged UTF-8."""
    kind = rng.randrange(3)
    pools = POOLS if kind != 1 else rng.sample(POOLS, 2)
    times = (1,) if kind != 2 else (1, 1, 2, 3, 7, 20)
    signs = (rng.choice(rng.choice(pools)) * rng.choice(times) for _ in range(rng.randrange(1, 60)))
    text = bytearray("".join(signs).encode())
    for _ in range(3 if rng.randrange(7) == 0 else 0):
        text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text)


@pytest.fixture
def switch(engine: Library) -> Iterator[Library]:
    """The engine; whatever value the switch got, it is the default afterwards."""
    yield engine
    engine.set_switch("pre-tokenizer", "fast")


def compiled_driver(engine: Library, folder: Path) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++") or "c++"
    source = Path(__file__).with_name("pre_tokenizer_driver.cpp")
    program = folder / "driver"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", f"-I{converter_folder() / 'src'}", str(source)]
    command += [f"-L{engine.folder}", f"-Wl,-rpath,{engine.folder}", "-lllama", "-lggml-base", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def test_words_are_cut_as_std_regex_cuts_them(engine: Library, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    sets = sorted(set(vocab_source.expressions().values()))
    texts = [random_text(rng) for _ in range(3000 if FUZZING else 150)]
    files = {"sets": ["\x01".join(expressions).encode() for expressions in sets], "texts": texts}
    for name, blocks in files.items():
        (tmp_path / name).write_bytes(b"".join(struct.pack("<I", len(block)) + block for block in blocks))
    command = [compiled_driver(engine, tmp_path), tmp_path / "sets", tmp_path / "texts"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {SEED}: {done.stdout}{done.stderr}"
    assert done.stdout.startswith(f"{len(sets) * len(texts)} cuts, "), done.stdout


def cases() -> list[tuple[str, str, list[str]]]:
    """(tokenizer, pre-tokenizer, names of texts): each set of expressions gets all texts once."""
    seen: set[tuple[str, ...]] = set()
    found = []
    for name, kind in vocab_source.names().items():
        expressions = vocab_source.expressions().get(kind, vocab_source.expressions()[""])
        found.append(("gpt2", name, list(FEW if expressions in seen else TEXTS)))
        seen.add(expressions)
    rest = {"whitespace": "whitespace", "hybriddna": "default"}
    others = (model for model in tokenizer_models.MODELS if model != "gpt2")
    return found + [(model, rest.get(model, ""), list(TEXTS)) for model in others]


def child(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, which finds this module and what tests share."""
    here, shared = Path(__file__).parent, Path(vocab_source.__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(here), str(shared)))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.mark.parametrize("group", range(GROUPS))
def test_long_texts_neither_kill_nor_stall(group: int, tmp_path: Path) -> None:
    mine = cases()[group::GROUPS]
    done = child(__file__, str(tmp_path), json.dumps(mine), timeout=280)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"after {rows[-1:]}: {done.stderr[-2000:]}"
    assert len(rows) == sum(len(texts) for *_, texts in mine)
    assert not [row for row in rows if row["cpu_s"] > CPU_S]
    refused = {row["tokenizer"] for row in rows if row["tokens"] is None}
    assert refused <= {"no_vocab"}


def test_special_tokens_are_found_where_the_stock_engine_finds_them(switch: Library, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    parts = [*tokenizer_models.CHAT, *tokenizer_models.RESERVED[:3], "<tool>", "x", "xx", "xxx", "l><t", "<mask>",
             "    ", " ", "\n\t", "<|im_", "hello", "漢", "\u2003"]  # fmt: skip
    texts = ["".join(rng.choices(parts, k=rng.randrange(1, 14))).encode() for _ in range(300)]
    shapes = [("gpt2", "gpt-4o", "tiny"), ("gpt2", "jina-v2-de", "tiny"), ("gpt2", "gpt-2", "phi-3"),
              ("llama", "", "phi-3"), ("t5", "", "tiny"), ("plamo2", "", "tiny")]  # fmt: skip
    for model, pre, name in shapes:
        path = tokenizer_models.write(tmp_path / "m.gguf", model, pre, name=name)
        with tokenizer_models.opened(switch.api, path) as tokenizer:
            for text in texts:
                for special in (True, False):
                    found = {}
                    for value in ("fast", "stock"):
                        switch.set_switch("pre-tokenizer", value)
                        found[value] = tokenizer.ids(text, special)
                    assert found["fast"] == found["stock"], (SEED, model, pre, name, special, text)


def test_a_text_of_special_tokens_takes_linear_time(switch: Library, tmp_path: Path) -> None:
    path = tokenizer_models.write(tmp_path / "m.gguf", "gpt2", "gpt-4o")
    with tokenizer_models.opened(switch.api, path) as tokenizer:
        start = time.process_time()
        ids = tokenizer.ids(b"<|im_start|>" * 200_000)
        assert ids is not None and len(ids) == 200_000 and len(set(ids)) == 1
        assert time.process_time() - start < CPU_S, "the stock engine walks its list for each: 2e10 steps"


def test_rwkv_vocabulary_without_single_bytes(tmp_path: Path) -> None:
    """A text that begins a token and does not end it was read from its start again, for ever."""
    kind = tokenizer_models.gguf.TokenType.NORMAL
    pieces = [(text, kind, 0.0) for text in ("<s>", "AAAA", "B")]
    path = tokenizer_models.write(tmp_path / "m.gguf", "rwkv", pieces=pieces)
    done = child("-c", f"import test_pre_tokenizers as t; print(t.ids_of({str(path)!r}, b'BAAB'))", timeout=60)
    assert done.stdout.strip() == "[2, -1, -1, 2]", done.stderr


def ids_of(path: str, text: bytes) -> list[int] | None:
    from hybridgen_gguf.engine.handles import start

    with tokenizer_models.opened(start().api, Path(path)) as tokenizer:
        return tokenizer.ids(text)


def main(folder: Path, wanted: list[tuple[str, str, list[str]]]) -> None:
    """In the child: one line for each text, written at once, so that a death shows where."""
    from hybridgen_gguf.engine.handles import start

    api = start().api
    for model, pre, names in wanted:
        path = tokenizer_models.write(folder / "m.gguf", model, pre)
        with tokenizer_models.opened(api, path) as tokenizer:
            for name in names:
                text = TEXTS[name](SIZE)
                before = time.process_time()
                ids = tokenizer.ids(text)
                row = {"tokenizer": model, "pre": pre, "text": name, "cpu_s": time.process_time() - before,
                       "tokens": None if ids is None else len(ids)}  # fmt: skip
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
