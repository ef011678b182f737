"""Inspecting and validating never render a template, whatever it holds (D-27)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tinygguf

from hybridgen_gguf.model_file.inspection import inspect_file
from hybridgen_gguf.model_file.validation import validate_file

MARKER = "touch {marker}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.popen('MARK').read() }}",
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{{ 'x'*30000000000 }}",
        "{% for m in messages %}{{ m.content ",
        "\x1b[2J{{ x }}",
    ],
)
def test_d27_inspect_shows_the_source_only(tmp_path: Path, template: str) -> None:
    marker = tmp_path / "marker"
    template = template.replace("MARK", MARKER.format(marker=marker))
    path = tinygguf.build(tmp_path / "t.gguf", template=template)
    seen = inspect_file(path)
    assert json.loads(json.dumps(seen.as_json()))["metadata"]["tokenizer.chat_template"] == template
    assert not any("\x1b" in line for line in seen.lines())
    assert validate_file(path).ok
    assert not marker.exists()
