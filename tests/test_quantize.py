"""The forecast is the file; the same recipe gives the same bytes; what makes no sense is refused before work starts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from tinygguf import build

from hybridgen_gguf.engine.jobs.imatrix_file import Matrix, write_imatrix
from hybridgen_gguf.errors import BadFile, EngineError, Failed, HgError, NotFound, UsageError
from hybridgen_gguf.make.file_types import FILE_TYPES, file_type
from hybridgen_gguf.make.forecast import as_json, describe
from hybridgen_gguf.make.quantize import QuantizeOptions, forecast, quantize
from hybridgen_gguf.make.recipe import recipe_of
from hybridgen_gguf.model_file.header import read_header
from hybridgen_gguf.model_file.split import open_model_file


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 256: every block type fits."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    build(str(path), embd=256, ff=256, heads=4, kv=4, layers=2)
    return path


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in three parts; the path of the first."""
    folder = tmp_path_factory.mktemp("parts")
    build(str(folder / "one.gguf"))
    reader = gguf.GGUFReader(folder / "one.gguf")
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=7)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(
                key, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m-00001-of-00003.gguf"


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q8_0", "IQ4_NL", "F16", "Q6_K", "COPY", "q5_k"])
def test_forecast_is_the_file(tiny: Path, tmp_path: Path, kind: str) -> None:
    options = QuantizeOptions(tiny, tmp_path / "o.gguf", kind)
    plan = forecast(options)
    assert not (tmp_path / "o.gguf").exists()
    done = quantize(options)
    assert (tmp_path / "o.gguf").stat().st_size == plan.bytes == done.forecast.bytes
    header = read_header(tmp_path / "o.gguf")
    assert {t.name: t.type for t in header.tensors} == {t.name: t.type for t in plan.tensors}
    weights = sum(t.parameters for t in header.tensors)
    assert plan.bpw == pytest.approx(sum(t.bytes for t in header.tensors) * 8 / weights)


@pytest.mark.parametrize("kind", sorted(set(FILE_TYPES) - {"COPY", "MXFP4_MOE"}))
def test_every_type_forecasts(wide: Path, tmp_path: Path, kind: str) -> None:
    plan = forecast(QuantizeOptions(wide, tmp_path / "o.gguf", kind))
    assert plan.type == kind
    assert plan.bytes > 0
    assert plan.fallbacks == ()


def test_fallbacks_are_told_with_their_share(tiny: Path, tmp_path: Path) -> None:
    plan = forecast(QuantizeOptions(tiny, tmp_path / "o.gguf", "Q4_K_M"))
    assert len(plan.fallbacks) == 14
    assert len(plan.tensors) == 20
    assert {(f.wanted, f.used) for f in plan.fallbacks} == {("Q4_K", "Q5_0"), ("Q6_K", "Q8_0")}
    assert plan.fallback_share == pytest.approx(0.81, abs=0.01)
    assert "14 of 20 tensors, 81% of the weights" in "\n".join(describe(plan))
    assert len(as_json(plan)["fallbacks"]) == 14


def test_strict_refuses_a_fallback_and_keeps_the_old_file(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "o.gguf"
    target.write_text("old")
    with pytest.raises(Failed, match="14 of 20 tensors cannot be"):
        quantize(QuantizeOptions(tiny, target, "Q4_K_M", strict=True))
    assert target.read_text() == "old"
    assert quantize(QuantizeOptions(tiny, target, "Q8_0", strict=True)).forecast.fallbacks == ()


def test_same_recipe_same_bytes_whatever_the_threads(wide: Path, tmp_path: Path) -> None:
    digests = set()
    for threads in (1, 2):
        path = tmp_path / f"o{threads}.gguf"
        digests.add(quantize(QuantizeOptions(wide, path, "Q4_K_M", threads=threads)).sha256)
    assert len(digests) == 1


def test_recipe_and_manifest(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "输出.gguf"
    done = quantize(QuantizeOptions(tiny, target, "Q8_0", tensor_types=(("attn_v", "F16"),)))
    found = recipe_of(read_header(target).metadata)
    assert found == dict(done.recipe)
    assert found["source_sha256"] == hashlib.sha256(tiny.read_bytes()).hexdigest()
    assert json.loads(found["options"]) == {"tensor_types": [["attn_v", "F16"]], "type": "Q8_0"}
    manifest = json.loads(done.manifest.read_text(encoding="utf-8"))
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    assert manifest["files"] == [{"bytes": target.stat().st_size, "name": target.name, "sha256": digest}]
    assert done.sha256 == (digest,)


def test_long_recipe_is_kept_whole(tiny: Path, tmp_path: Path) -> None:
    types = tuple((f"blk\\.{i % 2}\\.(attn_q|{'x' * 60}{i})", "Q4_0") for i in range(9))
    options = QuantizeOptions(tiny, tmp_path / "o.gguf", "Q8_0", tensor_types=types)
    plan = forecast(options)
    quantize(options)
    found = recipe_of(read_header(tmp_path / "o.gguf").metadata)
    assert [tuple(pair) for pair in json.loads(found["options"])["tensor_types"]] == list(types)
    assert (tmp_path / "o.gguf").stat().st_size == plan.bytes


def test_tensor_types_apply_in_order(tiny: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(
        tiny, tmp_path / "o.gguf", "Q8_0", tensor_types=(("blk.0.attn_v", "Q4_0"), ("attn_v", "F16")),
        token_embedding_type="Q5_0",
    )  # fmt: skip
    quantize(options)
    types = {t.name: t.type for t in read_header(tmp_path / "o.gguf").tensors}
    assert types["blk.0.attn_v.weight"] == "Q4_0"
    assert types["blk.1.attn_v.weight"] == "F16"
    assert types["token_embd.weight"] == "Q5_0"


def test_split_in_one_file_out(parts: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(parts.with_name("m-00002-of-00003.gguf"), tmp_path / "o.gguf", "Q8_0")
    plan = forecast(options)
    done = quantize(options)
    assert done.paths == (tmp_path / "o.gguf",)
    assert plan.bytes == (tmp_path / "o.gguf").stat().st_size
    assert len(open_model_file(tmp_path / "o.gguf").tensors) == 20


def test_split_kept(parts: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(parts, tmp_path / "o.gguf", "Q8_0", keep_split=True)
    plan = forecast(options)
    done = quantize(options)
    names = [f"o-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert [p.name for p in done.paths] == names
    assert tuple(p.stat().st_size for p in done.paths) == plan.file_bytes
    assert len(open_model_file(done.paths[0]).tensors) == 20
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names, "o.gguf.json"])


def test_split_kept_may_not_write_over_its_parts(parts: Path) -> None:
    before = parts.read_bytes()
    with pytest.raises(UsageError, match="is the input"):
        quantize(QuantizeOptions(parts, parts.with_name("m.gguf"), "Q8_0", keep_split=True))
    assert parts.read_bytes() == before


def test_other_alignment_gives_a_sound_file(tmp_path: Path) -> None:
    # The engine copies the source's alignment key but pads to 32: without care no reader could open the result.
    build(str(tmp_path / "one.gguf"))
    reader = gguf.GGUFReader(tmp_path / "one.gguf")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(128)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(
                key, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plan = forecast(QuantizeOptions(tmp_path / "a.gguf", tmp_path / "o.gguf", "Q4_K_M"))
    quantize(QuantizeOptions(tmp_path / "a.gguf", tmp_path / "o.gguf", "Q4_K_M"))
    header = read_header(tmp_path / "o.gguf")
    assert (header.file_bytes, header.alignment) == (plan.bytes, 32)


def test_already_quantized_needs_permission(tiny: Path, tmp_path: Path) -> None:
    once, target = tmp_path / "q8.gguf", tmp_path / "o.gguf"
    quantize(QuantizeOptions(tiny, once, "Q8_0"))
    with pytest.raises(Failed, match=r"already quantized \(Q8_0\)") as caught:
        quantize(QuantizeOptions(once, target, "Q4_0"))
    assert "--allow-requantize" in caught.value.hint
    assert not target.exists()
    done = quantize(QuantizeOptions(once, target, "Q4_0", allow_requantize=True))
    assert "quality drops" in done.warnings[0]
    assert quantize(QuantizeOptions(once, tmp_path / "c.gguf", "COPY")).forecast.types == {"Q8_0": 15, "F32": 5}


def _matrix(model: Path, columns: int | None = None) -> Matrix:
    rng = np.random.default_rng(7)
    names = [t for t in read_header(model).tensors if t.name.startswith("blk.") and len(t.shape) == 2]
    sums = {t.name: rng.uniform(0.1, 3.0, (1, columns or t.shape[0])) for t in names}
    return Matrix(sums, {name: np.full(1, 4.0) for name in sums}, 2, 32, "random")


def test_imatrix_is_used_and_recorded(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="IQ2_XXS needs an importance matrix"):
        quantize(QuantizeOptions(wide, tmp_path / "o.gguf", "IQ2_XXS"))
    write_imatrix(tmp_path / "i.gguf", _matrix(wide))
    options = QuantizeOptions(wide, tmp_path / "o.gguf", "IQ2_XXS", imatrix=tmp_path / "i.gguf")
    plan = forecast(options)
    done = quantize(options)
    assert (tmp_path / "o.gguf").stat().st_size == plan.bytes
    assert done.recipe["imatrix_sha256"] == hashlib.sha256((tmp_path / "i.gguf").read_bytes()).hexdigest()
    plain = quantize(QuantizeOptions(wide, tmp_path / "p.gguf", "Q4_K_M"))
    weighted = quantize(QuantizeOptions(wide, tmp_path / "w.gguf", "Q4_K_M", imatrix=tmp_path / "i.gguf"))
    assert plain.sha256 != weighted.sha256


def test_imatrix_of_another_model(wide: Path, tmp_path: Path) -> None:
    write_imatrix(tmp_path / "i.gguf", _matrix(wide, columns=128))
    with pytest.raises(Failed, match=r"is of another model: 14 of 14 tensors .* 128 values for 256 columns"):
        quantize(QuantizeOptions(wide, tmp_path / "o.gguf", "Q4_K_M", imatrix=tmp_path / "i.gguf"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i.gguf"]


def test_missing_imatrix_entries_are_told(wide: Path, tmp_path: Path) -> None:
    matrix = _matrix(wide)
    kept = {name: matrix.sums[name] for name in list(matrix.sums)[:3]}
    write_imatrix(tmp_path / "i.gguf", replace(matrix, sums=kept))
    done = quantize(QuantizeOptions(wide, tmp_path / "o.gguf", "Q4_K_M", imatrix=tmp_path / "i.gguf"))
    assert "has nothing for 11 tensors" in done.warnings[-1]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"type": "Q9_K"}, UsageError, "'Q9_K' is not a type"),
        ({"tensor_types": (("attn", "Q9"),)}, UsageError, "'Q9' is not a number format"),
        ({"tensor_types": (("nothing_like_it", "Q8_0"),)}, UsageError, "matches no tensor"),
        ({"tensor_types": (("(", "Q8_0"),)}, UsageError, "is not a regular expression"),
        ({"type": "F16", "tensor_types": (("attn", "Q8_0"),)}, UsageError, "has no effect with F16"),
        ({"threads": -1}, UsageError, "-1 threads"),
        ({"imatrix": Path("nowhere.gguf")}, NotFound, "nowhere.gguf does not exist"),
        ({"source": Path("nowhere.gguf")}, NotFound, "nowhere.gguf does not exist"),
        ({"target": Path("/nowhere/o.gguf")}, NotFound, "folder /nowhere does not exist"),
        ({"target": Path("/sys/o.gguf")}, HgError, "/sys/o.gguf cannot be written"),
    ],
)
def test_refused_before_work_starts(
    tiny: Path, tmp_path: Path, changes: dict[str, object], error: type[HgError], words: str
) -> None:
    options = QuantizeOptions(tiny, tmp_path / "o.gguf", "Q8_0")
    with pytest.raises(error) as caught:
        quantize(replace(options, **changes))  # type: ignore[arg-type]
    assert words in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_imatrix_must_be_one(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises((BadFile, EngineError), match="is not an importance matrix"):
        quantize(QuantizeOptions(tiny, tmp_path / "o.gguf", "Q8_0", imatrix=tiny))


def test_file_type_names() -> None:
    assert (file_type("q4_k"), file_type("iq4_xs"), file_type("Copy")) == ("Q4_K_M", "IQ4_XS", "COPY")
