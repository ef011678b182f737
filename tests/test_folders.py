"""The user's folders: today's places on Linux, one HGGUF_HOME above all, one rule that everybody asks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridgen_gguf.cli.config import config_path
from hybridgen_gguf.engine.pin import SOURCE_SHA256
from hybridgen_gguf.folders import cache_folder, config_folder, data_folder
from hybridgen_gguf.machine.profile import profile_path
from hybridgen_gguf.make.convert import converter_folder
from hybridgen_gguf.models.registry import own_file
from hybridgen_gguf.models.store import models_folder
from hybridgen_gguf.tuned import tuned_path

ROOT = Path(__file__).resolve().parent.parent
VARIABLES = (
    "HGGUF_HOME", "HGGUF_CACHE", "HGGUF_DATA", "HGGUF_CONFIG", "HGGUF_MODELS", "HGGUF_MODELS_FILE", "HGGUF_PROFILE",
    "HGGUF_CONVERTER", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME",
)  # fmt: skip


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def everything() -> list[Path]:
    return [config_path(), own_file(), models_folder(), profile_path(), tuned_path()]


@pytest.mark.skipif(sys.platform != "linux", reason="the places of Linux")
def test_on_linux_the_folders_stay_where_they_were(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache, data = bare / ".config" / "hgguf", bare / ".cache" / "hgguf", bare / ".local" / "share" / "hgguf"
    files = [config / "config.toml", config / "models.toml", cache / "models", cache / "profile.json"]
    assert everything() == [*files, data / "tuned.json"]
    for kind in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(bare / kind))
    assert everything() == [
        *(bare / "CONFIG" / "hgguf" / name for name in ("config.toml", "models.toml")),
        *(bare / "CACHE" / "hgguf" / name for name in ("models", "profile.json")),
        bare / "DATA" / "hgguf" / "tuned.json",
    ]


def test_one_home_holds_all_of_it(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = bare / "all 全部"
    monkeypatch.setenv("HGGUF_HOME", str(home))
    assert [config_folder(), cache_folder(), data_folder()] == [home / kind for kind in ("config", "cache", "data")]
    assert all(path.is_relative_to(home) for path in everything())
    assert not home.exists(), "asking creates nothing"
    source = home / "cache" / "source" / SOURCE_SHA256[:16]
    source.mkdir(parents=True)
    (source / "convert_hf_to_gguf.py").touch()
    assert converter_folder() == source


def test_a_variable_for_one_place_comes_before_home_and_an_empty_one_is_none(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HGGUF_HOME", str(bare / "home"))
    monkeypatch.setenv("HGGUF_CACHE", str(bare / "cache"))
    monkeypatch.setenv("HGGUF_DATA", str(bare / "data"))
    assert profile_path() == bare / "cache" / "profile.json" and models_folder() == bare / "cache" / "models"
    assert tuned_path() == bare / "data" / "tuned.json"
    own = bare / "mine.toml"
    own.touch()
    for variable, path in (
        ("HGGUF_CONFIG", bare / "c.toml"), ("HGGUF_MODELS_FILE", own), ("HGGUF_MODELS", bare / "m"),
        ("HGGUF_PROFILE", bare / "p.json"),
    ):  # fmt: skip
        monkeypatch.setenv(variable, str(path))
    assert everything()[:4] == [bare / "c.toml", own, bare / "m", bare / "p.json"]
    for name in VARIABLES[1:]:
        monkeypatch.setenv(name, "")
    assert all(path.is_relative_to(bare / "home") for path in everything())


def test_the_engine_is_built_into_the_same_cache(bare: Path) -> None:
    """scripts/build_engine asks the package; it runs before anything but the locked packages is installed."""
    code = (
        "import runpy, sys; names = runpy.run_path(sys.argv[1], run_name='asked');"
        "import hybridgen_gguf.folders as f; assert names['cache_folder'] is f.cache_folder; print(f.cache_folder())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "scripts" / "build_engine")],
        env={"HGGUF_HOME": "/somewhere", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(Path("/somewhere/cache"))


def test_no_other_module_looks_for_the_users_folders() -> None:
    places = [ROOT / "hybridgen_gguf", ROOT / "scripts"]
    files = [path for place in places for path in place.rglob("*") if path.is_file() and path.suffix in ("", ".py")]
    asking = [
        path.name for path in files if "user_cache" in (text := path.read_text(encoding="utf-8")) or "XDG_" in text
    ]
    assert asking == ["folders.py"]
