"""Writes a benchmark's record: what was measured, on which machine, at which commit, when. For the scripts here."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def machine() -> str:
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} logical CPUs"


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        found = ""
    return found or "unknown"


def write(out: Path, command: str, summary: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One JSON file: where and when, the summary, and every row."""
    about = {"machine": machine(), "commit": commit(), "date": date.today().isoformat(), "command": command,
             "load_before": round(os.getloadavg()[0], 2)}  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(about | {"summary": summary, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))
    print(f"written to {out}")


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and largest."""
    values = list(values)
    return {"median": round(statistics.median(values), 4), "worst": round(max(values), 4)} if values else {}
