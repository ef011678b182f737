"""What cannot work is refused before work begins: too little text, too little room, unfit folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import hf_folder
import pytest
import tinygguf
from command_line import call, refused

from hybridgen_gguf.make import convert as convert_module
from hybridgen_gguf.make import enough, imatrix, quantize, report, sensitivity, target
from hybridgen_gguf.make.convert import ConvertOptions, convert

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job in a child fails the test."""

    def run_job(name: str, *_: object) -> None:
        raise AssertionError(f"the job {name} was started")

    for module in (imatrix, quantize, report, sensitivity, convert_module):
        monkeypatch.setattr(module, "run_job", run_job)


@pytest.mark.usefixtures("no_work")
def test_too_little_text(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "t.txt").write_text("only a few words")
    done = call(capsys, "imatrix", tiny, "-f", tmp_path / "t.txt", "-o", tmp_path / "i.gguf")
    refused(done, 2, "the text has 26 tokens; at least 1024 are needed")
    for more in (("Q8_0", "--report"), ("--target-bpw", 5)):
        done = call(capsys, "quantize", tiny, tmp_path / "o.gguf", *more, "--text", tmp_path / "t.txt")
        refused(done, 2, "the text has 26 tokens; at least 512 are needed")


@pytest.mark.usefixtures("no_work")
def test_too_little_room(tiny: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.txt").write_text("The quick brown fox. " * 500)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(enough, "free_bytes", lambda _folder: 1000)
    done = call(capsys, "quantize", tiny, tmp_path / "o.gguf", "Q8_0", "--report", "--text", tmp_path / "t.txt")
    refused(done, 1, "the report keeps some 6.", "MiB of logits in", "1000 B free")
    monkeypatch.setattr(target, "free_bytes", lambda _folder: 1000)
    done = call(capsys, "imatrix", tiny, "-f", tmp_path / "t.txt", "-o", tmp_path / "i.gguf")
    refused(done, 1, "i.gguf needs 2", "1000 B free")
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


def test_room_for_the_manifest_too(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tinygguf.build(tmp_path / "m.gguf")
    assert call(capsys, "quantize", model, tmp_path / "o.gguf", "Q8_0").code == 0
    size = (tmp_path / "o.gguf").stat().st_size
    manifest = (tmp_path / "o.gguf.json").stat().st_size
    monkeypatch.setattr(target, "free_bytes", lambda _folder: size + manifest - 1)
    refused(call(capsys, "quantize", model, tmp_path / "p.gguf", "Q8_0"), 1, "p.gguf needs")
    assert not (tmp_path / "p.gguf").exists()


@pytest.mark.usefixtures("no_work")
def test_the_intermediate_of_a_folder_counts(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_folder.write_folder(tmp_path / "hf")
    monkeypatch.setattr(convert_module, "_check_packages", lambda: None)
    needed: list[int] = []

    def check_room(_target: Path, size: int) -> None:
        needed.append(size)
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "check_room", check_room)
    weights = sum(t.size for t in hf_folder.llama_tensors(hf_folder.TOKENS).values())
    for kind, bits in (("Q8_0", 8.5), ("Q4_K_M", 4.5)):
        assert call(capsys, "quantize", folder, tmp_path / "o.gguf", kind).code == 130
        with pytest.raises(KeyboardInterrupt):
            convert(ConvertOptions(folder, tmp_path / "c.gguf"))
        assert abs(needed[-2] - needed[-1] - weights * bits / 8) < 2
    done = call(capsys, "quantize", folder, tmp_path / "o.gguf", "IQ2_M")
    refused(done, 2, "IQ2_M needs an importance matrix")


def _config(**more: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        hf_folder.write_json(folder / "config.json", config | more)

    return change


def _config_alone(folder: Path) -> None:
    """A folder of which only the small files were fetched so far."""
    _config(quantization_config={"quant_method": "hqq"})(folder)
    (folder / "model.safetensors").unlink()


def _adapter(folder: Path) -> None:
    hf_folder.write_json(folder / "adapter_config.json", {"base_model_name_or_path": "some/model"})
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "config.json").unlink()


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "layers": (_config(num_hidden_layers=5), "lacks 3 of 5 layers; layer 2 is the first"),
    "layers of a text model": (
        _config(num_hidden_layers=None, text_config={"num_hidden_layers": 1 << 60}), f"of {1 << 60} layers; layer 2"
    ),
    "config alone": (_config_alone, "is already quantized with hqq"),
    "quantized inside": (
        _config(text_config={"quantization_config": {"quant_method": "quanto"}}), "is already quantized with quanto"
    ),
    "MLX": (_config(quantization={"group_size": 64, "bits": 4}), "is already quantized with MLX"),
    "adapter": (_adapter, "is an adapter (LoRA) for some/model, not a model"),
}  # fmt: skip


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("verb", ["convert", "quantize"])
def test_folders(tmp_path: Path, capsys: Capture, name: str, verb: str) -> None:
    folder = hf_folder.write_folder(tmp_path / "hf")
    change, words = FOLDERS[name]
    change(folder)
    more = ("Q8_0",) if verb == "quantize" else ()
    refused(call(capsys, verb, folder, tmp_path / "o.gguf", *more), 1, words)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
