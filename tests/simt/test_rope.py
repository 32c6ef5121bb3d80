"""The kernels of rotary embeddings against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simt.element_types import DTYPES, ROUNDING, decode, encode
from simt.structs import make

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}
THREADS = 128


@dataclass(frozen=True)
class Case:
    """One launch. `kernel` is the name's end, `width` its vectors; sizes are those of rope.h."""

    kernel: str
    width: int
    type: str
    places: tuple[int, int]  # height, width
    rows: tuple[int, int]  # batch, heads
    dim: int
    rotary: int
    groups: int = 1
    angle_type: str = "f32"
    cached: bool = False
    halves: bool = False  # of the angles are the same
    ends: tuple[int, ...] | None = None
    positions: int = 1
    chunks: int = 1
    table: int = 1
    grid: int = 2
    step: int = 1  # elements from one to the next of a head

    @property
    def even(self):
        """Whether the heads of a position are one row of a constant stride to the kernel."""
        return self.kernel.startswith(("even", "single"))

    def __str__(self):
        ends = "" if self.ends is None else "-" + "_".join(map(str, self.ends[:9]))
        return f"{self.kernel}-{self.type}-{self.places[0]}x{self.places[1]}-{self.dim}-{self.rotary}{ends}"


CASES = [
    Case("bf16x8", 8, "bf16", (1, 5), (2, 3), 64, 64, positions=2),
    Case("bf16x8", 8, "bf16", (1, 2), (3, 43), 16, 16, chunks=2, angle_type="bf16"),
    Case("f16x8", 8, "f16", (1, 4), (1, 3), 72, 32, cached=True, positions=4, grid=1),
    Case("f16x8", 8, "f16", (2, 3), (2, 2), 64, 32, groups=2, cached=True, angle_type="f16", positions=3),
    Case("f32x4", 4, "f32", (1, 7), (1, 2), 24, 16, ends=(0, 2, 2, 5), positions=3),
    Case("any4", 4, "bf16", (1, 3), (2, 2), 20, 8, angle_type="f64", positions=2),
    Case("any1", 1, "f16", (1, 3), (2, 1), 7, 2, angle_type="f16", step=3, positions=3),
    Case("any1", 1, "f32", (1, 2), (1, 2), 300, 262, table=0),  # more lanes than threads
    Case("f64", 1, "f64", (1, 3), (2, 2), 6, 6, angle_type="f64", positions=2),
    Case(
        "f64", 1, "f64", (2, 2), (1, 1), 8, 4, groups=2, angle_type="f64", cached=True, positions=4, table=0
    ),
    Case("even_bf16x8", 8, "bf16", (1, 5), (2, 3), 64, 64, positions=2),
    Case("even_bf16x8", 8, "bf16", (1, 2), (3, 43), 16, 16, chunks=2, angle_type="bf16"),
    Case("even_bf16x8", 8, "bf16", (1, 3), (1, 40), 96, 64, ends=(0, 2, 3), positions=2),  # some are copied
    Case("even_f16x8", 8, "f16", (1, 4), (1, 3), 64, 32, cached=True, positions=4),
    Case("even_f32x4", 4, "f32", (1, 9), (1, 2), 16, 16, halves=True, positions=3),
    Case("even_f32x4", 4, "f32", (1, 150), (1, 1), 8, 8, ends=(0, *range(1, 150)), positions=32),
    Case("even_f32x4", 4, "f32", (1, 2), (1, 3), 16, 0),  # nothing turns
    Case("single_bf16x8", 8, "bf16", (1, 5), (2, 3), 64, 64, positions=4),
    Case("single_f16x8", 8, "f16", (1, 4), (1, 3), 64, 32, cached=True, positions=4),
    Case("single_f32x4", 4, "f32", (1, 3), (1, 40), 96, 64, ends=(0, 2, 3), chunks=8),
    *(
        Case(kernel, 4, "f32", (1, 6), (1, 2), dim, 8, ends=ends, positions=4, grid=1)
        for kernel, dim, ends in (
            ("f32x4", 12, (0, 5, 3, 6)),
            ("f32x4", 12, (0, 6, 2**31 - 1)),
            ("f32x4", 12, (0,)),
            ("even_f32x4", 16, (0, 5, 3, 6)),
            ("even_f32x4", 16, (1, 6)),
            ("even_f32x4", 16, (0, 7)),
            ("even_f32x4", 16, (-3, 6)),
            ("even_f32x4", 16, (0, -9, 6)),
            ("even_f32x4", 16, (0, 6, 2**31 - 1)),
            ("even_f32x4", 16, (-(2**31), 2**31 - 1)),
            ("even_f32x4", 16, (0,)),
        )
    ),
]


def oracle(x, cos, sin, back):
    """All of x's last dimension turned; cos and sin broadcast."""
    half = x.shape[-1] // 2
    (u, v), (cu, cv), (su, sv) = (
        (t[..., :half], t[..., half:]) for t in (x, *np.broadcast_arrays(x, cos)[1:], sin + 0 * x)
    )
    if back:
        return np.concatenate((u * cu + v * sv, v * cv - u * su), -1)
    return np.concatenate((u * cu - v * su, v * cv + u * sv), -1)


def rows_of(case, angle_rows):
    """Each place's row of angles; -1 padding, -2 nan."""
    places = case.places[1]
    if case.ends is None:
        return list(range(places))
    ends = case.ends
    if ends[0] != 0 or ends[-1] > places or any(a > b for a, b in zip(ends, ends[1:], strict=False)):
        return [-2] * places
    found = [-1] * places
    for a, b in zip(ends, ends[1:], strict=False):
        for place in range(a, b):
            found[place] = place - a if place - a < angle_rows else -2
    return found


def expected(case, x, tables, back):
    """x is [height, width, batch, heads, dim], float64."""
    r, result = case.rotary, x.copy()
    if case.groups == 2:
        (cos_y, sin_y), (cos_x, sin_x) = tables
        h, w = case.places
        result[..., :r] = oracle(x[..., :r], cos_y[:h, None, None, None], sin_y[:h, None, None, None], back)
        result[..., r:] = oracle(x[..., r:], cos_x[None, :w, None, None], sin_x[None, :w, None, None], back)
        return result
    ((cos, sin),) = tables
    for place, row in enumerate(rows_of(case, len(cos))):
        if row == -2:
            result[0, place, ..., :r] = np.nan
        elif row >= 0:
            result[0, place, ..., :r] = oracle(x[0, place, ..., :r], cos[row], sin[row], back)
    return result


@pytest.mark.parametrize("back", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_turn(device, case, back):
    """Whatever cu_seqlens hold, nothing out of bounds is read: every buffer ends at a guard."""
    rng = np.random.default_rng(case.dim)
    (h, w), (b, heads) = case.places, case.rows
    x = encode(rng.standard_normal((h, w, b, heads, case.dim * case.step)), case.type)
    input = device.put(x)
    output = device.put(
        np.full((h, w, b, heads, case.dim), encode(np.array(7.0), case.type)[()], DTYPES[case.type])
    )
    angle_rows = (h, w) if case.groups == 2 else (3 if case.ends and len(case.ends) == 4 else w,)
    buffers, tables = [], []
    for rows in angle_rows:
        angles = rng.uniform(-50, 50, (rows, case.rotary))
        if case.halves:
            angles[:, case.rotary // 2 :] = angles[:, : case.rotary // 2]
        angles = encode(angles, case.angle_type)
        exact = decode(angles, case.angle_type)
        if case.cached:
            pair = [encode(f(exact), case.angle_type) for f in (np.cos, np.sin)]
            buffers += [device.put(t) for t in pair]
            tables.append([decode(t, case.angle_type) for t in pair])
        else:
            buffers += [device.put(angles), None]
            tables.append([np.cos(exact), np.sin(exact)])
    buffers += [None] * (4 - len(buffers))
    ends = None if case.ends is None else device.put(np.array(case.ends, np.int32))
    lanes = (
        case.groups * (case.rotary // 2 // case.width)
        + ((case.dim - case.groups * case.rotary) // case.width + 1) // 2
    )
    lane_threads = min(lanes, THREADS)
    rows, at_once = b * heads, THREADS // lane_threads
    e, d = case.dim * case.step, case.dim
    blocks = -(-h * w // case.positions) * case.chunks
    steps = (
        {"batch": 1, "heads": rows, "step_heads": at_once // case.positions}
        if case.even
        else {
            "batch": b, "heads": heads, "step_positions": at_once // rows,
            "step_batches": at_once % rows // heads, "step_heads": at_once % rows % heads,
        }
    )  # fmt: skip
    arguments = make(
        "Rope", "rope.h", input=input, output=output, cos=buffers[0], sin=buffers[1], cos_x=buffers[2],
        sin_x=buffers[3], cu_seqlens=ends, height=h, width=w, in_y=w * rows * e,
        in_x=rows * e, in_batch=heads * e, in_head=e, in_element=case.step, out_y=w * rows * d, out_x=rows * d,
        out_batch=heads * d, out_head=d, angle_stride=case.rotary, angle_step=1, angle_stride_x=case.rotary,
        angle_step_x=1, angle_rows=angle_rows[0], dim=d, rotary=case.rotary, groups=case.groups,
        sequences=0 if ends is None else len(case.ends) - 1, type=TYPE[case.type], angle_type=TYPE[case.angle_type],
        transposed=back, lane_threads=lane_threads, positions=case.positions, table=case.table,
        chunk_rows=-(-rows // case.chunks), chunks=case.chunks, blocks=blocks, **steps,
    )  # fmt: skip
    shared = case.table * case.positions * case.groups * case.rotary * 2 * (8 if case.type == "f64" else 4)
    device.launch(
        f"rope_{case.kernel}", blocks if case.even else case.grid, THREADS, [arguments], shared=shared
    )
    wanted = expected(case, decode(x[..., :: case.step], case.type), tables, back)
    work = ROUNDING["f64" if case.type == "f64" else "f32"]
    np.testing.assert_allclose(
        decode(output.numpy(), case.type),
        wanted,
        rtol=1.01 * ROUNDING[case.type],
        atol=16 * work * np.nanmax(np.abs(wanted), initial=1.0),
    )


def share(n):
    """2^32 / n, rounded up; 0 for 1."""
    return 0 if n == 1 else -(-(2**32) // n)


@pytest.mark.parametrize("back", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "type, places, heads, dim, rotary, halves, apart",
    [
        ("bf16", 5, 6, 64, 64, True, 0),
        ("f16", 7, 1, 28, 12, False, 3),  # some are copied; one head
        ("f32", 70, 3, 2, 2, False, 0),  # one pair a head
        ("bf16", 3, 5, 18, 6, True, 5),
        ("f32", 2, 2, 6, 0, False, 1),  # nothing turns
    ],
)
def test_alone(device, type, places, heads, dim, rotary, halves, apart, back):
    """A thread a pair. Heads are `apart` elements further than they need be, and angles lie two apart."""
    rng = np.random.default_rng(dim)
    x = encode(rng.standard_normal((places, heads, dim + apart)), type)
    angles = rng.uniform(-50, 50, (places, rotary, 2)).astype(np.float32)
    if halves:
        angles[:, rotary // 2 :] = angles[:, : rotary // 2]
    input, output = device.put(x), device.put(np.zeros((places, heads, dim), DTYPES[type]))
    exact = decode(x, type)[..., :dim]
    wanted, turned = exact.copy(), angles[:, None, :, 0].astype(np.float64)
    wanted[..., :rotary] = oracle(exact[..., :rotary], np.cos(turned), np.sin(turned), back)
    lanes, step = dim // 2, dim + apart
    arguments = make(
        "RopeAlone", "rope.h", input=input, output=output, angles=device.put(angles), items=places * heads * lanes,
        lanes=lanes, lane_share=share(lanes), heads=heads, head_share=share(heads), in_place=heads * step, in_head=step,
        out_place=heads * dim, out_head=dim, angle_place=2 * rotary, angle_step=2, half=rotary // 2,
        copied_half=(dim - rotary) // 2, transposed=back,
    )  # fmt: skip
    device.launch(f"rope_alone_{type}", -(-places * heads * lanes // THREADS), THREADS, [arguments])
    np.testing.assert_allclose(
        decode(output.numpy(), type),
        wanted,
        rtol=1.01 * ROUNDING[type],
        atol=16 * ROUNDING["f32"] * np.abs(wanted).max(),
    )
