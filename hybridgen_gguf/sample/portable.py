"""Logarithm and exponential that give the same bits on every machine: +, -, *, / alone, in a fixed order.

Each is rounded as IEEE 754 says. numpy's own differ by a unit in the last place between builds and processors, and a
token must not depend on that.
The engine's C++ (src/hg-sample.cpp) does the same steps without fused multiply-add. Knows nothing of sampling.
Invariant: at most 2 units in the last place off, for positive normal numbers (log) and below 700 in size (exp).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 33 bits: its product with an exponent is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_INVERSE_LN2 = float.fromhex("0x1.71547652b82fep+0")
_ARTANH = tuple(2.0 / n for n in range(21, 1, -2))
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))


def log(x: Floats) -> Floats:
    """Natural logarithm of positive normal numbers."""
    fraction, exponent = np.frexp(x)
    small = fraction < _SQRT_HALF
    fraction = np.where(small, fraction + fraction, fraction)
    exponent = (exponent - small).astype(np.float64)
    s = (fraction - 1.0) / (fraction + 1.0)
    return np.asarray(exponent * _LN2_HIGH + (exponent * _LN2_LOW + double_artanh(s)))


def double_artanh(s: Floats) -> Floats:
    """2 artanh(s) = log((1 + s) / (1 - s)) for |s| <= 0.18."""
    z = s * s
    total = np.full_like(z, _ARTANH[0])
    for coefficient in _ARTANH[1:]:
        total = total * z + coefficient
    return np.asarray(s * z * total + 2.0 * s)


def exp(x: Floats) -> Floats:
    """e**x for x <= 700; below -700, and for -inf, 0."""
    bounded = np.maximum(x, -700.0)
    k = np.floor(bounded * _INVERSE_LN2 + 0.5)
    r = (bounded - k * _LN2_HIGH) - k * _LN2_LOW
    total = np.full_like(r, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        total = total * r + coefficient
    return np.where(x < -700.0, 0.0, np.ldexp(total, k.astype(np.int32)))
