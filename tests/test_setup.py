"""What scripts/setup leaves behind."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import hybridgen_gguf


def test_the_clone_is_named_without_its_folder() -> None:
    """Python reads these files in the locale's encoding, which may lack a folder's name: it would not start."""
    packages = Path(sysconfig.get_paths()["purelib"])
    notes = list(packages.glob("_editable_impl_hybridgen_gguf.pth"))
    for note in notes:
        line = note.read_text(encoding="ascii")
        assert not Path(line).is_absolute()
        assert (packages / line).resolve() == Path(hybridgen_gguf.__file__).resolve().parents[1]
    assert notes or packages in Path(hybridgen_gguf.__file__).parents, "neither installed nor in place"
