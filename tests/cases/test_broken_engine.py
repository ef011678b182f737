"""An engine that cannot be used is named once, in the same words by every verb; no verb dies of it without a word."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import spawn

from hybridgen_gguf.engine.library import Library


def _cut(name: str, share: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        os.truncate(folder / name, int(share * (folder / name).stat().st_size))

    return change


def _gone(pattern: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return change


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "base cut": (_cut("libggml-base.so", 0.5), "libggml-base.so is cut short"),
    "base almost whole": (_cut("libggml-base.so", 0.9999), "libggml-base.so is cut short"),
    "llama cut": (_cut("libllama.so", 0.1), "libllama.so is cut short"),
    "llama empty": (_cut("libllama.so", 0), "libllama.so is not a library"),
    "no CPU": (_gone("libggml-cpu*"), "cannot be loaded: libggml-cpu.so.0: cannot open shared object file"),
    "no llama": (_gone("libllama*"), "holds no engine"),
    "text": (lambda folder: (folder / "libllama.so").write_text("hello " * 99) and None, "is not a library"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_verb_says_the_same_once(engine: Library, tiny: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    for path in engine.folder.glob("lib*"):
        shutil.copy(path.resolve(), folder / path.name)
    change, words = BROKEN[name]
    change(folder)
    settings = {"HGGUF_ENGINE": str(folder), "HGGUF_PROFILE": str(tmp_path / "profile.json")}
    said = set()
    for verb in (("engine",), ("run", tiny, "-p", "hi"), ("plan", tiny), ("profile",), ("bench", tiny)):
        done = spawn(*verb, **settings)
        assert done.code == 1 and done.out == "", done
        lines = done.err.splitlines()
        assert len(lines) == 2 and lines[1].startswith("hint: "), done
        said.add(lines[0])
    assert len(said) == 1
    sentence = said.pop().removeprefix("error: ")
    assert words in sentence
    done = spawn("doctor", **settings)
    assert done.code == 0 and done.err == ""
    assert done.out.count(sentence) == 1
    # Nothing else of doctor's findings comes from it.
    others = done.out.replace(sentence, "").replace("unset HGGUF_ENGINE", "").replace("the engine's loader", "")
    assert "HGGUF_ENGINE" not in others and "hgguf profile" not in others and str(folder) not in others


def test_validate_does_not_blame_the_file(tiny: Path, tmp_path: Path) -> None:
    done = spawn("validate", tiny, HGGUF_ENGINE=str(tmp_path))
    assert done.code == 1 and "holds no engine" in done.err and "damaged" not in done.err
