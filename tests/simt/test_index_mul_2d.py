"""index_mul_2d's kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simt.element_types import ROUNDING, decode, encode
from simt.structs import make

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}


@dataclass(frozen=True)
class Case:
    dtype: str
    entries: int
    rows: int
    features: int
    in_vectors: int = 0
    wide: bool = True


CASES = [
    Case("bf16", 5, 9, 24, in_vectors=1),
    Case("f16", 3, 7, 5, wide=False),
    Case("f32", 4, 20, 8, in_vectors=1),
    Case("f64", 6, 5, 4, in_vectors=1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.dtype}-{c.entries}-{c.rows}x{c.features}")
def test_values(device, case):
    """Rows whose index is outside are nan and read nothing; they are in no sum."""
    rng = np.random.default_rng(case.rows)
    picked, factor, other = (
        encode(rng.standard_normal((n, case.features)), case.dtype)
        for n in (case.entries, case.rows, case.rows)
    )
    index = rng.integers(0, case.entries, case.rows)
    index[0], index[1] = case.entries, -3
    outside = (index < 0) | (index >= case.entries)
    order = np.argsort(index, kind="stable")
    begins = np.searchsorted(index[order], np.arange(case.entries + 1))
    seven = encode(np.array(7.0), case.dtype)[()]
    out, sums = (device.put(np.full(t.shape, seven, t.dtype)) for t in (factor, picked))
    b = device.put(factor)
    common = dict(
        rows=case.rows, entries=case.entries, features=case.features, type=TYPE[case.dtype],
        wide_index=case.wide, in_vectors=case.in_vectors,
    )  # fmt: skip
    kind = np.int64 if case.wide else np.int32
    gather = make(
        "IndexMul2d", "index_mul_2d_arguments.h", a=device.put(picked), b=b, out=out,
        index=device.put(index.astype(kind)), **common,
    )  # fmt: skip
    device.launch(f"index_mul_2d_gather_{case.dtype}", 2, device.warp_size, [gather])
    scatter = make(
        "IndexMul2d", "index_mul_2d_arguments.h", a=device.put(other), b=b, out=sums,
        order=device.put(order.astype(np.int64)), begins=device.put(begins.astype(np.int64)), **common,
    )  # fmt: skip
    device.launch(f"index_mul_2d_scatter_{case.dtype}", 2, device.warp_size, [scatter])

    p, f, o = (decode(t, case.dtype) for t in (picked, factor, other))
    expected = np.where(outside[:, None], np.nan, p[np.where(outside, 0, index)] * f)
    rounding = 1.01 * ROUNDING[case.dtype]
    np.testing.assert_allclose(decode(out.numpy(), case.dtype), expected, rtol=rounding)
    wanted = np.zeros_like(p)
    np.add.at(wanted, index[~outside], (f * o)[~outside])
    work = 64 * ROUNDING["f64" if case.dtype == "f64" else "f32"]
    np.testing.assert_allclose(decode(sums.numpy(), case.dtype), wanted, rtol=rounding + work, atol=work)
