"""D-09 and D-10: more tokens than embedding rows; pickles and code in a folder. Found before a tensor is read."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from hf_folder import TOKENS, write_folder, write_json
from make_cli import hgguf, refused

from hybridgen_gguf.errors import BadFile
from hybridgen_gguf.make.folder import read_folder


def test_d09_more_tokens_than_rows(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", extra=6)
    with pytest.raises(BadFile) as caught:
        read_folder(folder)
    assert "267 tokens but only 261 embedding rows" in caught.value.what
    assert all(f"{TOKENS + i} '<|extra_{i}|>'" in caught.value.what for i in range(6))


def test_d09_through_the_command_line(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", extra=6)
    refused(hgguf("convert", tmp_path / "hf", tmp_path / "o.gguf"), "267 tokens but only 261 embedding rows")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_d09_padded_rows_are_normal(tmp_path: Path) -> None:
    assert read_folder(write_folder(tmp_path / "hf", rows=319)).rows == 319


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


def test_d10_pickles_are_not_opened(tmp_path: Path) -> None:
    folder, marker = write_folder(tmp_path / "evil"), tmp_path / "PWN"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil(marker)))
    done = hgguf("convert", folder, tmp_path / "o.gguf")
    refused(done, "pytorch_model.bin is a pickle, which can run code")
    assert "--allow-pickle" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["evil"]
    assert read_folder(folder, allow_pickle=True).pickled


def test_d10_code_that_the_folder_asks_for_is_seen(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "模型")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | {"auto_map": {"AutoTokenizer": [None, "tok.Tok"]}})
    assert read_folder(folder).wants_code == ("tokenizer_config.json",)
