"""How the norms' kernels share rows among threads: asking for other layouts than the library's own, and trying many.

For these benchmarks alone: nothing in apex reads a layout from outside.
"""

from __future__ import annotations

import ctypes
import itertools

import torch
from _measure import attempt, graph_seconds

from apex._loader import library

FIELDS = ("vectors", "row_teams", "threads", "blocks", "stages")


class Layout(ctypes.Structure):
    """apex_norm_layout of csrc/host/norm.h; 0: as the library chooses.

    vectors: a thread. row_teams: 1, a row is one warp's, or 2, one block's. threads: of a block whose warps have rows
    of their own. blocks: at most, on a multiprocessor. stages: rows in shared memory at once.
    """

    _fields_ = [(name, ctypes.c_int32) for name in FIELDS]

    def __str__(self):
        return " ".join(f"{n}={getattr(self, n)}" for n in FIELDS if getattr(self, n)) or "the library's own"


def ask(direction, layout=None):
    """From now on `direction` (forward or backward) runs in this layout; None: in the library's own."""
    function = library.load().c.apex_set_norm_layout
    function.argtypes, function.restype = [ctypes.c_int32, ctypes.POINTER(Layout)], None
    function(direction == "backward", None if layout is None else ctypes.byref(layout))


def parse(text):
    """'backward:vectors=2,blocks=2' -> ("backward", its Layout). Raises ValueError."""
    direction, _, fields = text.partition(":")
    pairs = dict(field.split("=", 1) for field in fields.split(",") if field)
    if direction not in ("forward", "backward") or set(pairs) - set(FIELDS):
        raise ValueError(f"{text!r}: want forward: or backward: and some of {', '.join(FIELDS)}")
    return direction, Layout(**{name: int(value) for name, value in pairs.items()})


def candidates():
    """The library's own first."""
    yield None
    for vectors, blocks, stages in itertools.product((2, 3, 4), (1, 2, 3, 4, 6, 8), (2, 3)):
        yield Layout(vectors=vectors, blocks=blocks, stages=stages)


def kernels(norm, rows, hidden, dtype):
    """Functions that run the forward; the backward without weight gradients; with them, and so with their reduction."""
    name = {"layer": "layer_norm", "rms": "rms_norm", "add rms": "add_rms_norm"}[norm]
    centered, residual = norm == "layer", norm.startswith("add")
    torch.manual_seed(0)
    x, r, g, gs = (torch.randn(rows, hidden, device="cuda", dtype=dtype) for _ in range(4))
    weights = [torch.rand(hidden, device="cuda", dtype=dtype) + 0.5 for _ in range(2 if centered else 1)]
    first = [x, r] if residual else [x]
    ops = torch.ops.apex
    forward = getattr(ops, f"{name}_forward").default
    backward = getattr(ops, f"{name}_backward").default
    arguments = (*first, [hidden], *weights, 1e-5)
    output, *rest = forward(*arguments)
    saved = rest.pop(0) if residual else x
    given = (g, *([gs] if residual else []), saved, *rest, [hidden], *weights, 1e-5, False, dtype)
    return (
        lambda: forward(*arguments),
        lambda: backward(*given, False),
        lambda: backward(*given, True),
    )


def sweep(norm, rows, hidden, bandwidth, dtype=torch.bfloat16, show=8):
    """Times every candidate and prints, for both directions, the library's own and the best.

    Microseconds of: the forward kernel; the backward kernel alone; all of the backward; their difference is what
    partial sums of weight gradients and their reduction cost.
    """
    forward, alone, whole = kernels(norm, rows, hidden, dtype)
    element = rows * hidden * torch.finfo(dtype).bits // 8
    add = norm.startswith("add")
    for direction, steps, passes in (
        ("forward", [forward], 4 if add else 2),
        ("backward", [alone, whole], 4 if add else 3),
    ):
        found = []
        for layout in candidates():
            ask(direction, layout)
            times = [attempt(graph_seconds, step)[0] for step in steps]
            if all(times):
                found.append((times[-1], times, layout))
        ask(direction)
        floor = passes * element / bandwidth
        print(f"{norm} norm {rows}x{hidden} {direction}, floor {floor * 1e6:.1f} us")
        for total, times, layout in [found[0], *sorted(found[1:], key=lambda f: f[0])[:show]]:
            text = f"  {100 * floor / total:5.1f} %  {total * 1e6:7.1f} us"
            if len(times) > 1:
                text += f"  kernel {times[0] * 1e6:7.1f}  sums {(total - times[0]) * 1e6:6.1f}"
            print(f"{text}  {layout or 'the library' + chr(39) + 's own'}")
