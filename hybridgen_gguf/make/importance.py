"""Whether an importance matrix fits a model and has what the types of a quantization need, said before work begins.

Knows names and sizes, no values. Invariant: an error names the matrix, how many tensors are at fault, and some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..engine.jobs.imatrix_file import read_summary
from ..errors import Failed, UsageError
from ..model_file.split import ModelFile
from ..printable import printable
from .forecast import Forecast
from .target import shown

_MAKE = "make one from this model: hgguf imatrix MODEL -f TEXT -o FILE"
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")  # upstream's own matrices do not fit these


def check_fits(path: Path, model: ModelFile) -> None:
    """Raises Failed for the matrix of another model, as far as names and sizes tell."""
    sizes = read_summary(path).sizes
    wanted = {tensor.name: _values(tensor.shape) for tensor in model.tensors}
    known = [name for name in sizes if name in wanted]
    if not known:
        example = printable(next(iter(sizes), "none"), limit=60)
        raise Failed(f"{shown(path)} has nothing for any tensor of this model; it is for such as {example}", _MAKE)
    others = [name for name in known if sizes[name] != wanted[name] and name not in _EMBEDDINGS]
    if others:
        first = others[0]
        raise Failed(
            f"{shown(path)} is of another model: {len(others)} of {len(known)} tensors have another size, such as "
            f"{printable(first)} with {sizes[first]:,} values for {wanted[first]:,} columns",
            _MAKE,
        )


def check_covers(path: Path | None, plan: Forecast) -> None:
    """Raises UsageError when types of `plan` need a matrix and there is none, or one without some of the tensors."""
    needing = plan.needing_imatrix
    if not needing:
        return
    count = sum(map(len, needing.values()))
    kinds = " and ".join(needing)
    if path is None:
        names = _some([name for names in needing.values() for name in names])
        of = "" if plan.type in needing else f" (asked for {count} tensors: {names})"
        raise UsageError(
            f"{kinds} needs an importance matrix{of}", "make one with hgguf imatrix and pass it with --imatrix"
        )
    sizes = read_summary(path).sizes
    lacking = [name for names in needing.values() for name in names if name not in sizes]
    if lacking:
        raise UsageError(
            f"{shown(path)} lacks {len(lacking)} of the {count} tensors that {kinds} needs it for: {_some(lacking)}",
            "make one with more text, or give these tensors another type: --tensor-type REGEX=TYPE",
        )


def about_origin(path: Path, source_sha256: str) -> tuple[str, ...]:
    """A warning for a matrix that says that it was made from another file."""
    made_of = read_summary(path).model_sha256
    if not made_of or made_of == source_sha256:
        return ()
    told = f"{shown(path)} was made from another file (sha256 {made_of[:16]}...)"
    return (f"{told}: that is right for the same model in another type alone",)


def _values(shape: Sequence[int]) -> int:
    """Columns, for each matrix of a tensor of experts."""
    return shape[0] * (shape[2] if len(shape) > 2 else 1) if shape else 0


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(printable(name) for name in names[:4]) + more
