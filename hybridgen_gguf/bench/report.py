"""Benchmark records as Markdown, JSON, JSON lines or CSV. Pure.

Invariant: all four formats carry the same records; a JSON record also holds the settings it was measured with.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .measure import Record

FORMATS = ("md", "json", "jsonl", "csv")


def formatted(records: Sequence[Record], settings: dict[str, Any], form: str) -> str:
    """The records in one of FORMATS."""
    rows = [asdict(record) | {"samples": list(record.samples)} | settings for record in records]
    if form == "json":
        return json.dumps(rows, indent=2, ensure_ascii=False)
    if form == "jsonl":
        return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    if form == "csv":
        return _csv(rows)
    return _markdown(records, settings)


def _csv(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    flat = [
        {key: json.dumps(value) if isinstance(value, (list, dict)) else value for key, value in row.items()}
        for row in rows
    ]
    writer = csv.DictWriter(out, fieldnames=list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue().rstrip("\n")


def _markdown(records: Sequence[Record], settings: dict[str, Any]) -> str:
    kv = f"{settings.get('type_k', '?')}/{settings.get('type_v', '?')}"
    head = f"{settings.get('model', '')}, {settings.get('threads', '?')} threads, KV {kv}"
    width = max((len(record.test) for record in records), default=4)
    lines = [
        head,
        "",
        f"| {'test':<{width}} | tokens/s (mean) |   ± | median |",
        f"| {'-' * width} | --------------: | --: | -----: |",
    ]
    lines += [f"| {r.test:<{width}} | {r.mean:15.2f} | {r.stdev:.2f} | {r.median:.2f} |" for r in records]
    return "\n".join(lines)
