"""split.py: any part opens the whole set, a missing part is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import rawgguf as raw
import tinygguf

from hybridgen_gguf.errors import BadFile, NotFound
from hybridgen_gguf.model_file.header import read_header
from hybridgen_gguf.model_file.split import open_model_file


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    tinygguf.build(tmp_path / "m.gguf", split=7)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_one_file_is_a_set_of_one(tmp_path: Path) -> None:
    path = tinygguf.build(tmp_path / "one.gguf")
    model = open_model_file(path)
    assert model.paths == (path,)
    assert model.bytes == path.stat().st_size
    assert model.tensors == read_header(path).tensors


def test_any_part_opens_the_set(parts: list[Path]) -> None:
    whole = open_model_file(parts[0])
    assert len(parts) == 3 and whole.paths == tuple(parts)
    assert len(whole.tensors) == 20 and whole.bytes == sum(part.stat().st_size for part in parts)
    assert whole.metadata["general.architecture"] == "llama"
    for part in parts[1:]:
        assert open_model_file(part) == whole
        assert open_model_file(part).path == parts[0]


def test_links_with_other_names(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for index, part in enumerate(parts):
        link = tmp_path / "elsewhere" / f"link{index}.gguf"
        link.symlink_to(part)
        assert [p.resolve() for p in open_model_file(link).paths] == [p.resolve() for p in parts]


def test_links_with_the_right_names_to_blobs(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    links = []
    for index, part in enumerate(parts):
        blob = part.rename(tmp_path / "blobs" / f"{index:064x}")
        links.append(tmp_path / "snapshot" / part.name)
        links[-1].symlink_to(blob)
    assert open_model_file(links[1]).paths == tuple(links)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_parts_are_named(parts: list[Path], missing: int) -> None:
    parts[missing].unlink()
    for part in parts:
        with pytest.raises(NotFound) as caught:
            open_model_file(part)
        assert f"part {missing + 1} of 3 is missing" in caught.value.what
        assert parts[missing].name in caught.value.what


def test_a_cut_part_is_named(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-1])
    with pytest.raises(BadFile, match="00002-of-00003"):
        open_model_file(parts[0])


def test_copy_under_another_name(parts: list[Path], tmp_path: Path) -> None:
    parts[1].rename(tmp_path / "copy.gguf")
    with pytest.raises(BadFile, match="part 2 of 3"):
        open_model_file(tmp_path / "copy.gguf")


def test_swapped_and_foreign_parts(parts: list[Path], tmp_path: Path) -> None:
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(BadFile, match="not part 2 of 3"):
        open_model_file(parts[0])
    with pytest.raises(BadFile, match="named part 2 but holds part 3"):
        open_model_file(parts[1])


def test_parts_that_repeat_or_lack_tensors(tmp_path: Path) -> None:
    def part(number: int, names: list[str], total: int) -> None:
        entries, data = raw.tensors({name: [8] for name in names})
        keys = [raw.key("split.no", "u16", number), raw.key("split.count", "u16", 2)]
        keys.append(raw.key("split.tensors.count", "i32", total))
        raw.write(tmp_path, raw.gguf_bytes(keys, entries, data), f"p-0000{number + 1}-of-00002.gguf")

    part(0, ["a"], 3)
    part(1, ["b"], 3)
    with pytest.raises(BadFile, match="hold 2 tensors, the first says 3"):
        open_model_file(tmp_path / "p-00001-of-00002.gguf")
    part(1, ["a", "c"], 3)
    with pytest.raises(BadFile, match="'a' is in two parts"):
        open_model_file(tmp_path / "p-00001-of-00002.gguf")


def test_absurd_split_numbers(tmp_path: Path) -> None:
    keys = [raw.key("split.no", "u64", 5), raw.key("split.count", "u64", 1 << 50)]
    with pytest.raises(BadFile):
        open_model_file(raw.write(tmp_path, raw.gguf_bytes(keys)))
    keys = [raw.key("split.no", "u16", 9), raw.key("split.count", "u16", 3)]
    with pytest.raises(BadFile, match=r"split\.no"):
        open_model_file(raw.write(tmp_path, raw.gguf_bytes(keys), "m-00001-of-00003.gguf"))


def test_a_lone_missing_file_is_just_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        open_model_file(tmp_path / "x-00001-of-00002.gguf")
