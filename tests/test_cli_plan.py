"""The verbs that measure, through the command line: their JSON, what they remember, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridgen_gguf import tuned
from hybridgen_gguf.cli.app import app
from hybridgen_gguf.engine.library import Library
from hybridgen_gguf.errors import HgError, NotFound, UsageError


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HGGUF_PROFILE", raising=False)
    monkeypatch.setenv("HGGUF_CACHE", str(tmp_path / "cache 文件"))
    monkeypatch.setenv("HGGUF_DATA", str(tmp_path / "data"))
    return tmp_path


def run(*arguments: object) -> Any:
    """The JSON on stdout. Raises the HgError that the command ended with."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if isinstance(done.exception, HgError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_doctor(engine: Library) -> None:
    findings = run("doctor")["findings"]
    assert all({"name", "what", "cost", "source", "mend"} == set(finding) for finding in findings)
    assert "no profile" in {finding["name"] for finding in findings}


def test_profile_measures_once_and_shows(engine: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound):
        run("profile", "--show")
    monkeypatch.setattr("hybridgen_gguf.machine.measure.WEIGHT_TYPES", ("Q4_K",))
    monkeypatch.setattr("hybridgen_gguf.machine.measure.CACHE_TYPES", ("F16",))
    measured = run("profile")
    assert {"cpu", "memory", "devices", "links", "disk"} <= set(measured)
    assert measured["memory"]["read_gbps"]["1"] > 0
    shown = run("profile", "--show")
    assert shown["cpu"] == measured["cpu"] and shown["measured"] == measured["measured"]


def test_tune_remembers(engine: Library, tiny: Path) -> None:
    found = run("tune", tiny, "--seconds", 5)
    assert {"plan", "trials", "best", "baseline", "seconds"} <= set(found)
    assert found["best"]["decode_tps"] > 0 and found["baseline"]["prompt_tps"] > 0
    assert found["trials"][0]["threads"] == found["plan"]["threads"]["decode"] or len(found["trials"]) > 1
    assert Path(found["file"]) == tuned.tuned_path()
    entries = json.loads(tuned.tuned_path().read_text(encoding="utf-8"))
    assert len(entries) == 1


@pytest.mark.parametrize("arguments", [("--seconds", 0), ("--seconds", "nan"), ("--quality", -1), ("--goal", "x")])
def test_bad_input(engine: Library, tiny: Path, arguments: tuple[object, ...]) -> None:
    with pytest.raises(UsageError):
        run("tune", tiny, *arguments)


def test_no_model() -> None:
    with pytest.raises(UsageError, match="no model"):
        run("tune")
