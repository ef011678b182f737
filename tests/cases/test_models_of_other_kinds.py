"""Files that are no language model are known from the header, by every verb and in Python; none is blamed (A-01)."""

from __future__ import annotations

import json
from pathlib import Path

import architectures
import pytest
import tinygguf
from command_line import call, refused

import hybridgen_gguf
from hybridgen_gguf import BadFile
from hybridgen_gguf.model_file.kinds import kind_of
from hybridgen_gguf.model_file.split import open_model_file

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architectures.build(tmp_path_factory.mktemp("kinds") / "t5.gguf", "t5")


@pytest.mark.parametrize(
    "verb",
    [
        ("run", "--raw", "-c", 256, "-n", 2, "-p", "hi"),
        ("bench", "-p", 8, "-n", 2),
        ("tune", "--seconds", 5),
        ("plan",),
    ],
    ids=lambda verb: verb[0],
)
def test_verbs_refuse_an_encoder_decoder(t5: Path, capsys: Capture, verb: tuple[object, ...]) -> None:
    done = call(capsys, verb[0], t5, *verb[1:])
    refused(done, 1, "is an encoder-decoder model (T5)")
    assert "damaged" not in done.err and "hostile" not in done.err


def test_imatrix_refuses_it_before_the_text_is_read(t5: Path, tmp_path: Path, capsys: Capture) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words " * 500)
    refused(call(capsys, "imatrix", t5, "-f", text, "-o", tmp_path / "i.gguf"), 1, "is an encoder-decoder model (T5)")
    assert not (tmp_path / "i.gguf").exists()


def test_inspect_and_validate_say_it(t5: Path, capsys: Capture) -> None:
    assert call(capsys, "inspect", t5, "--json").json["model"]["kind"] == "encoder-decoder"
    assert "encoder-decoder model (T5)" in call(capsys, "inspect", t5).out
    done = call(capsys, "validate", t5)
    assert done.code == 0 and "ok (an encoder-decoder model" in done.out
    found = json.loads(call(capsys, "validate", t5, "--json").out)["files"][0]
    assert found["ok"] and "encoder-decoder" in found["kind"]


def test_python_raises_and_goes_on(t5: Path, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="encoder-decoder"):
        hybridgen_gguf.load(str(t5), n_ctx=256)
    path = tinygguf.build(tmp_path / "m.gguf", ctx=256)
    with hybridgen_gguf.load(str(path), n_ctx=256) as model:
        assert model.generate("hi", max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("sets", "name"),
    [
        (["general.type=str:adapter"], "adapter"),
        (["general.type=str:mmproj"], "projector"),
        (["llama.pooling_type=u32:4"], "reranker"),
        (["llama.pooling_type=u32:3"], "embedding"),
        (["general.architecture=str:bert"], "embedding"),
        (["general.architecture=str:eagle3"], "draft"),
        (["general.architecture=str:dream"], "diffusion"),
        (["general.architecture=str:clip"], "projector"),
        ([], None),
        (["llama.pooling_type=u32:0"], None),
    ],
)
def test_kinds_by_header(tmp_path: Path, sets: list[str], name: str | None) -> None:
    kind = kind_of(open_model_file(tinygguf.build(tmp_path / "m.gguf", sets=sets)))
    assert (kind and kind.name) == name
