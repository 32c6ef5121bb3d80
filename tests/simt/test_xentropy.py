"""Cross-entropy kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simt.element_types import DTYPES, ROUNDING, decode, encode
from simt.structs import make
from simt.targets import Target

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}
PADDING = 3


@dataclass(frozen=True)
class Case:
    """One shape and the launch that takes it.

    gap: logits between two rows' ends. offset: of the logits from a 16-byte boundary, in elements. warps: of a
    block. blocks: of the grid, fewer than there is work for, so that it goes around; with rows_a_warp, of the
    kernels for short rows, as many as there is work for.
    """

    dtype: str
    rows: int
    classes: int
    splits: int = 1
    warp_rows: int = 0
    warps: int = 2
    blocks: int = 2
    gap: int = 0
    offset: int = 0
    smoothing: float = 0.1
    losses: str = "f32"
    wide: bool = True
    rows_a_warp: int = 0
    log_threads: int = -1  # of a row, in the kernels for few of them

    @property
    def few(self) -> bool:
        return self.log_threads >= 0

    @property
    def math(self) -> str:
        return "f64" if self.dtype == "f64" else "f32"

    def __str__(self) -> str:
        return (
            f"{self.dtype}-{self.rows}x{self.classes}"
            + "-warp" * self.warp_rows
            + "-short" * bool(self.rows_a_warp)
            + "-few" * self.few
            + f"-{self.splits}" * (self.splits > 1)
        )


CASES = [
    Case("bf16", 5, 77, warp_rows=1),
    Case("f16", 3, 1003, warps=1, wide=False, losses="f16"),
    Case("f32", 4, 1030, splits=3, gap=2, smoothing=0.0),
    Case("bf16", 3, 1500, splits=2, offset=3, gap=5, losses="bf16"),
    Case("f64", 4, 37, losses="f64", offset=1),
    Case("f32", 4, 3, warp_rows=1, blocks=1),
    Case("bf16", 11, 1000, rows_a_warp=3, gap=8),  # the last warp has two rows
    Case("f16", 7, 248, rows_a_warp=7, warps=1, blocks=1, wide=False, losses="f16"),
    Case("f32", 5, 512, rows_a_warp=2, smoothing=0.0),
    Case("bf16", 5, 1000, log_threads=7, gap=8),
    Case("f16", 11, 88, log_threads=4, wide=False, losses="f16", smoothing=0.0),
    Case("f32", 5, 1020, log_threads=8),
    Case("bf16", 200, 8, log_threads=0, losses="bf16"),  # a thread a row
]


class Problem:
    """The tensors of a case: all labels but the second are taken; the last two rows are padding and outside."""

    def __init__(self, device, case: Case):
        self.device, self.case = device, case
        rng = np.random.default_rng(case.classes)
        self.logits = decode(
            encode(3 * rng.standard_normal((case.rows, case.classes + case.gap)), case.dtype), case.dtype
        )
        self.labels = rng.integers(0, case.classes, case.rows)
        self.labels[self.labels == PADDING] = 0
        self.labels[1] = PADDING
        self.labels[2] = case.classes + 4 if case.rows > 3 else self.labels[2]
        if case.rows > 4:
            self.labels[3], self.labels[4] = -100, -1
        self.grad = decode(encode(rng.standard_normal(case.rows), case.losses), case.losses)

    def oracle(self):
        x = self.logits[:, : self.case.classes]
        p = np.exp(x - x.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        lse = np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) + x.max(1)
        ignored = (self.labels == PADDING) | (self.labels == -100)
        outside = ((self.labels < 0) | (self.labels >= self.case.classes)) & ~ignored
        index = np.where(ignored | outside, 0, self.labels)
        s, rows = self.case.smoothing, np.arange(self.case.rows)
        losses = (1 - s) * (lse - x[rows, index]) + s * (lse - x.mean(1))
        target = np.full_like(x, s / self.case.classes)
        target[rows, index] += 1 - s
        gradient = self.grad[:, None] * (p - target)
        losses[ignored], losses[outside] = 0, np.nan
        gradient[ignored], gradient[outside] = 0, np.nan
        return losses, gradient, x.max(1), np.exp(x - x.max(1, keepdims=True)).sum(1), ignored

    def put(self, values, dtype, offset=0):
        encoded = encode(values, dtype)
        return self.device.put(encoded, offset * encoded.itemsize)

    def empty(self, shape, dtype):
        return self.device.put(np.full(shape, encode(np.array(7.0), dtype)[()], DTYPES[dtype]))

    def common(self):
        c = self.case
        # Only what belongs to rows is there: the gap after the last row is not.
        flat = self.logits.reshape(-1)[: self.logits.size - c.gap]
        return dict(
            logits=self.put(flat, c.dtype, c.offset), rows=c.rows, classes=c.classes,
            labels=self.device.put(self.labels.astype(np.int64 if c.wide else np.int32)),
            row_stride=c.classes + c.gap, padding_index=PADDING, has_padding=1, smoothing=c.smoothing,
            logits_type=TYPE[c.dtype], wide_labels=c.wide, warp_rows=c.warp_rows, splits=c.splits,
            rows_a_warp=c.rows_a_warp, log_threads=c.log_threads,
        )  # fmt: skip

    def kernel(self, direction):
        kind = "few_" if self.case.few else "short_" if self.case.rows_a_warp else ""
        return f"xentropy_{direction}_{kind}{self.case.dtype}"

    @property
    def block(self):
        """Threads of a block: of the short kernels 64 at most."""
        threads = self.case.warps * self.device.warp_size
        if self.case.few:
            return 128 if self.case.log_threads <= 5 else 1 << self.case.log_threads
        return min(threads, 64) if self.case.rows_a_warp else threads

    @property
    def blocks(self):
        """With as many warps in all, however many a block has."""
        if self.case.few:
            return -(-(self.case.rows << self.case.log_threads) // self.block)
        return self.case.blocks * self.case.warps * self.device.warp_size // self.block


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(device, case):
    p = Problem(device, case)
    losses, normalizers = p.empty(case.rows, case.losses), p.empty((case.rows, 2), case.math)
    partials = p.empty((case.rows, case.splits, 3), case.math)
    arguments = make(
        "XentropyForward", "xentropy_arguments.h", losses=losses, normalizers=normalizers,
        partials=partials, loss_type=TYPE[case.losses], **p.common(),
    )  # fmt: skip
    device.launch(p.kernel("forward"), p.blocks, p.block, [arguments])
    if case.splits > 1:
        device.launch("xentropy_merge" + "_f64" * (case.math == "f64"), 1, p.block, [arguments])
    expected, _, largest, total, ignored = p.oracle()
    work = ROUNDING[case.math]
    np.testing.assert_allclose(
        decode(losses.numpy(), case.losses),
        expected,
        rtol=1.01 * ROUNDING[case.losses] + 8 * work,
        atol=32 * work,
    )
    found = normalizers.numpy()
    np.testing.assert_array_equal(found[:, 0], np.where(ignored, 0, largest))
    np.testing.assert_allclose(found[:, 1], np.where(ignored, 1, total), rtol=64 * work)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(device, case):
    p = Problem(device, case)
    expected, wanted, largest, total, ignored = p.oracle()
    gradient = p.empty((case.rows, case.classes), case.dtype)
    arguments = make(
        "XentropyBackward", "xentropy_arguments.h", grad_losses=p.put(p.grad, case.losses), grad_stride=1,
        normalizers=p.put(np.stack((largest, total), 1), case.math), grad_logits=gradient,
        grad_type=TYPE[case.losses], **p.common(),
    )  # fmt: skip
    device.launch(p.kernel("backward"), p.blocks, p.block, [arguments])
    work = ROUNDING[case.math]
    np.testing.assert_allclose(
        decode(gradient.numpy(), case.dtype),
        wanted,
        rtol=1.01 * ROUNDING[case.dtype] + 64 * work,
        atol=64 * work,
    )


# ---- offsets past 32 bits -----------------------------------------------------------------------------------

ROWS, CLASSES = 70001, 32771  # 2,294,002,771 logits; odd rows, so that no two begin alike


@pytest.mark.parametrize("width", [32, 64])
def test_last_row_past_two_to_the_31(width):
    """Report: index overflow. Memory that costs nothing until touched; the last row's block alone runs."""
    device = Target(f"plain-{width}", "plain", width, 0).device()
    service, last = device.service, ROWS - 1
    values = encode(3 * np.random.default_rng(4).standard_normal(CLASSES), "bf16")
    addresses = [service.allocate(ROWS * CLASSES * 2, 0) for _ in range(2)]
    small = {name: service.allocate(ROWS * 8, 0) for name in ("labels", "losses", "normalizers")}
    service.write(addresses[0] + last * CLASSES * 2, values.tobytes())
    service.write(small["labels"] + last * 8, np.array([CLASSES - 1], np.int64).tobytes())
    common = dict(
        logits=addresses[0], rows=ROWS, classes=CLASSES, row_stride=CLASSES, logits_type=TYPE["bf16"], wide_labels=1,
        splits=1, labels=small["labels"], normalizers=small["normalizers"],
    )  # fmt: skip
    service.only_block(last)
    try:
        forward = make("XentropyForward", "xentropy_arguments.h", losses=small["losses"], **common)
        device.launch("xentropy_forward_bf16", ROWS, 256, [forward])
        g = device.put(np.ones(1, np.float32))
        backward = make(
            "XentropyBackward", "xentropy_arguments.h", grad_losses=g, grad_logits=addresses[1], **common
        )
        device.launch("xentropy_backward_bf16", ROWS, 256, [backward])
    finally:
        service.only_block(-1)
    x = decode(values, "bf16")
    p = np.exp(x - x.max())
    loss = np.frombuffer(service.read(small["losses"] + last * 4, 4), np.float32)[0]
    np.testing.assert_allclose(loss, np.log(p.sum()) + x.max() - x[-1], rtol=1e-6)
    found = np.frombuffer(service.read(addresses[1] + last * CLASSES * 2, CLASSES * 2), np.uint16)
    wanted = p / p.sum()
    wanted[-1] -= 1
    np.testing.assert_allclose(decode(found, "bf16"), wanted, rtol=2**-8 * 1.01, atol=1e-9)
    for address in [*addresses, *small.values()]:
        service.free(address)
    device.close()
