"""The FP8 formats by their definition, in exact fractions: what tests of casts compare with.

A code is sign, exponent, mantissa. Nothing here knows how apex computes codes.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch


@dataclass(frozen=True)
class Definition:
    """exponent, mantissa: bits. bias: of the exponent. special: codes below 0x80 that are no finite numbers."""

    exponent: int
    mantissa: int
    bias: int
    special: dict[int, float]
    fnuz: bool

    def value(self, code: int) -> Fraction | float:
        """The value of a code; the float nan or an infinity where it is no number."""
        if self.fnuz and code == 0x80:
            return float("nan")
        sign, low = (-1 if code & 0x80 else 1), code & 0x7F
        if low in self.special:
            return sign * self.special[low]
        e, f = low >> self.mantissa, low & ((1 << self.mantissa) - 1)
        power = Fraction(2) ** (max(e, 1) - self.bias)
        return sign * power * ((1 if e else 0) + Fraction(f, 1 << self.mantissa))

    @functools.cached_property
    def finite(self) -> list[Fraction]:
        """The values that are not negative, by their code."""
        return [self.value(code) for code in range(0x80) if code not in self.special]

    def nearest(self, x: float) -> int:
        """The code of a float: nearest, ties to the even code, saturated."""
        nan = 0x80 if self.fnuz else 0x7F
        if x != x or (self.fnuz and abs(x) == float("inf")):
            return nan
        negative = np.signbit(x)
        if abs(x) == float("inf"):
            code = len(self.finite) - 1
        else:
            exact = abs(Fraction(x))
            above = bisect.bisect_left(self.finite, exact)
            if above == len(self.finite):
                code = above - 1
            elif above == 0:
                code = 0
            else:
                up, down = self.finite[above] - exact, exact - self.finite[above - 1]
                code = above if up < down or (up == down and above % 2 == 0) else above - 1
        if self.fnuz and code == 0:
            return 0
        return code | 0x80 if negative else code


_INFINITY, _NAN = float("inf"), float("nan")
DEFINITIONS = {
    torch.float8_e4m3fn: Definition(4, 3, 7, {0x7F: _NAN}, False),
    torch.float8_e5m2: Definition(5, 2, 15, {0x7C: _INFINITY, 0x7D: _NAN, 0x7E: _NAN, 0x7F: _NAN}, False),
    torch.float8_e4m3fnuz: Definition(4, 3, 8, {}, True),
    torch.float8_e5m2fnuz: Definition(5, 2, 16, {}, True),
}
DTYPES = tuple(DEFINITIONS)


@functools.cache
def _points(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """(the finite magnitudes, the middles between them), exact in float64."""
    finite = DEFINITIONS[dtype].finite
    middles = [(a + b) / 2 for a, b in zip(finite, finite[1:], strict=False)]
    assert all(Fraction(float(v)) == v for v in (*finite, *middles))
    return np.array([float(v) for v in finite]), np.array([float(v) for v in middles])


def nearest_codes(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """`Definition.nearest` of many float32 or float64 numbers: uint8 of x's shape."""
    form, middles = DEFINITIONS[dtype], _points(dtype)[1]
    x = np.asarray(x, np.float64)
    magnitude = np.where(np.isnan(x), 0.0, np.abs(x))
    code = np.searchsorted(middles, magnitude, side="left")  # a tie goes to the lower code
    tie = (code < len(middles)) & (middles[np.minimum(code, len(middles) - 1)] == magnitude)
    code = code + (tie & (code % 2 == 1))
    negative = np.signbit(x) & ((code > 0) | (not form.fnuz))
    code = np.where(negative, code | 0x80, code)
    lost = ~np.isfinite(x) if form.fnuz else np.isnan(x)
    return np.where(lost, 0x80 if form.fnuz else 0x7F, code).astype(np.uint8)


def values(codes: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The values of codes (uint8), float64."""
    form = DEFINITIONS[dtype]
    every = np.array([float(form.value(code)) for code in range(256)])
    if not form.fnuz:
        every[0x80] = -0.0  # a Fraction has no sign of zero
    return every[codes]
