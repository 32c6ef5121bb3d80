"""Lists of tensors on a test's device, their values in float64, and one launch over them."""

from __future__ import annotations

import numpy as np

from simt.device import Device
from simt.element_types import ROUNDING, decode, encode
from simt.multi_tensor import THREADS, reduction_scratch, tensor_table
from simt.structs import make

# One element, none, less than a vector, an unaligned view, two chunks, three and a bit.
SIZES = (1, 0, 7, 1000, 2048, 2503)
MISALIGNED = (0, 0, 0, 1, 0, 0)  # elements: the views of one tensor begin between two vectors
CHUNK = 1024
GRID = 3  # fewer blocks than chunks: each takes several


class TensorLists:
    """One list for each element type.

    Attributes:
        types: names of the lists' element types.
        values: [lists][tensors] arrays of float64, as the device holds them at first.
        buffers: [lists][tensors] on the device.
    """

    def __init__(self, device: Device, types, scales=None, positive=(), seed: int = 5):
        """Normal values times `scales`; their magnitudes in the lists named by `positive`."""
        rng = np.random.default_rng(seed)
        self.device, self.types = device, list(types)
        self.values, self.buffers = [], []
        for k, name in enumerate(self.types):
            scale = 1.0 if scales is None else scales[k]
            arrays = [encode(scale * rng.standard_normal(n), name) for n in SIZES]
            if k in positive:
                arrays = [encode(np.abs(decode(a, name)), name) for a in arrays]
            self.replace(k, arrays)

    def replace(self, k: int, arrays: list[np.ndarray]) -> None:
        """Puts other encoded arrays into list k."""
        name = self.types[k]
        buffers = [self.device.put(a, a.itemsize * skip) for a, skip in zip(arrays, MISALIGNED, strict=True)]
        self.values[k:] = [[decode(a, name) for a in arrays], *self.values[k + 1 :]]
        self.buffers[k:] = [buffers, *self.buffers[k + 1 :]]

    def now(self) -> list:
        """[lists][tensors] as the device holds them, in float64."""
        return [
            [decode(b.numpy(), name) for b in buffers]
            for buffers, name in zip(self.buffers, self.types, strict=True)
        ]

    def launch(self, kernel: str, struct: str, unit: str, reductions: int = 0, run: int = 1, **values):
        """Launches <unit>_<kernel>; values of the struct in <unit>.h may be buffers.

        run: chunks that a block of a reduction takes. Returns its ReductionScratch, for the next launch to
            read.
        """
        table, scratch = self.table(), None
        parameters = [table, make(struct, f"{unit}.h", **values)]
        if reductions:
            scratch, _ = reduction_scratch(self.device, table, reductions, run)
            parameters.append(scratch)
        self.device.launch(f"{unit}_{kernel}", GRID, THREADS, parameters)
        return scratch

    def table(self):
        """The TensorTable of a launch over these lists."""
        return tensor_table(self.device, self.buffers, SIZES, CHUNK)

    def check_untouched(self, lists=None) -> None:
        """These lists, or all, hold what they held at first."""
        now = self.now()
        for k in range(len(self.types)) if lists is None else lists:
            for before, after in zip(self.values[k], now[k], strict=True):
                np.testing.assert_array_equal(before, after)

    def check_scaled(self, k: int, factor: float) -> None:
        """List k holds what it held at first times `factor`, a power of two, rounded once."""
        name = self.types[k]
        for before, after in zip(self.values[k], self.now()[k], strict=True):
            np.testing.assert_array_equal(after, decode(encode(before * factor, name), name))

    def check_rounded_copy(self, copy: int, of: int) -> None:
        """List `copy` holds the values of list `of`, rounded once."""
        now, name = self.now(), self.types[copy]
        for master, model in zip(now[of], now[copy], strict=True):
            np.testing.assert_array_equal(model, decode(encode(master, name), name))

    def check(self, k: int, expected: list, math: str, arithmetic: float = 8, absolute: float = 2) -> None:
        """List k is near `expected`: one rounding to its type, some of the arithmetic's (of terms near 1)."""
        own, working = ROUNDING[self.types[k]], ROUNDING[math]
        atol = absolute * working + (2.0**-25 if self.types[k] == "f16" else 0)
        for found, value in zip(self.now()[k], expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1.01 * own + arithmetic * working, atol=atol)


def check_unscaled(device: Device, unit: str, arguments: str, name: str, factor: float, **scales) -> None:
    """The launch that leaves gradients unscaled: the first list alone, times `factor`; nothing where the step was
    skipped. scales: what makes the factor, beside an inv_scale of 1/8."""
    for skipped in ({}, dict(found_inf=device.full(1, 1)), dict(noop_flag=device.full(1, 1, np.int32))):
        lists = TensorLists(device, [name, "f32"])
        options = dict(inv_scale=device.full(1, 0.125), **scales, **skipped)
        lists.launch(f"unscale_{name}", arguments, unit, **options)
        lists.check_scaled(0, 1.0 if skipped else factor)
        lists.check_untouched([1])
