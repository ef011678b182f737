"""The mixes that `quantize` can make, by the names users know. Pure table; knows no file.

Source: QUANT_OPTIONS in tools/quantize/quantize.cpp and `enum llama_ftype` in llama.h of the pinned engine.
Invariant: every name maps to one code; `COPY` changes nothing but the container.
"""

from __future__ import annotations

from ..errors import UsageError
from ..model_file.types import GGML_TYPES, ggml_type

FILE_TYPES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7,
    "Q2_K": 10, "Q2_K_S": 21, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15,
    "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
    "IQ1_S": 24, "IQ1_M": 31, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_S": 28, "IQ2_M": 29, "IQ3_XXS": 23, "IQ3_XS": 22,
    "IQ3_S": 26, "IQ3_M": 27, "IQ4_NL": 25, "IQ4_XS": 30,
    "TQ1_0": 36, "TQ2_0": 37, "MXFP4_MOE": 38, "Q1_0": 40, "Q2_0": 41, "COPY": 0,
}  # fmt: skip
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_KNOWN = frozenset(kind.name for kind in GGML_TYPES.values())
UNQUANTIZED = frozenset({"F32", "F16", "BF16", "COPY"})


def least_bits(name: str) -> float:
    """Bits a weight that a file of the mix `name` has at least: those of its smallest type; 0 for a copy."""
    mix = file_type(name)
    if mix == "COPY":
        return 0.0
    # Q4_K_M is Q4_K and larger types; IQ2_M and such, which have a name of their own alone, IQ1_S at least.
    kind = next((name for name in (mix, mix.rpartition("_")[0], "IQ1_S") if name in _KNOWN), "IQ1_S")
    return ggml_type(kind).bits


def file_type(name: str) -> str:
    """The canonical name of the mix `name`, in any case. Raises UsageError that lists the known ones."""
    upper = name.upper()
    upper = _ALIASES.get(upper, upper)
    if upper not in FILE_TYPES:
        raise UsageError(f"'{name}' is not a type to quantize to", "known: " + ", ".join(sorted(FILE_TYPES)))
    return upper
