"""The transducer loss's kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simt.element_types import DTYPES, ROUNDING, decode, encode
from simt.structs import make
from simt.targets import Target

TYPE = {"f32": 0, "f16": 1, "bf16": 2, "f64": 3}
HEADER = "transducer_loss_arguments.h"
BLANK = 1


WARP = -1  # log_lanes: as many lanes as there are


@dataclass(frozen=True)
class Case:
    """One shape and the launch that takes it.

    offset: of x from a 16-byte boundary, in elements. log_lanes, tile: lanes that share a row, and rows that a warp
    takes together. threads, blocks: of the lattice; 1 block takes all items in turn.
    """

    dtype: str
    frames: int
    labels: int
    classes: int
    packed: bool = False
    offset: int = 0
    log_lanes: int = 3
    tile: int = 32
    threads: int = 64
    blocks: int = 4
    wide: bool = False
    losses: str = "f32"

    @property
    def math(self) -> str:
        return "f64" if self.dtype == "f64" else "f32"

    def log_lanes_of(self, device) -> int:
        return device.warp_size.bit_length() - 1 if self.log_lanes == WARP else self.log_lanes

    def __str__(self) -> str:
        return f"{self.dtype}-{self.frames}x{self.labels}x{self.classes}" + "-packed" * self.packed


CASES = [
    Case("bf16", 4, 3, 77, packed=True, losses="bf16", log_lanes=5),
    Case("bf16", 7, 3, 29, log_lanes=0),
    Case("f16", 3, 4, 150, packed=True, log_lanes=4, tile=8),
    Case("f16", 3, 2, 24, offset=3, wide=True, tile=4),
    Case("f32", 5, 2, 600, log_lanes=5, packed=True, wide=True, tile=1),
    Case("f32", 2, 70, 4, log_lanes=1),  # more labels than threads
    Case("f32", 2, 90, 3, log_lanes=0, threads=128),  # steps of several warps, one behind another
    Case("f16", 21, 40, 8, log_lanes=0),
    # Rows of whole vectors, which all lanes share; the last one's gradient goes over a row at a time.
    Case("bf16", 3, 2, 1048, packed=True, log_lanes=WARP),
    Case("f32", 3, 2, 40, log_lanes=WARP, tile=4),
    Case("f16", 2, 2, 2048, log_lanes=WARP),
    Case("f64", 11, 35, 5, losses="f64", offset=1, blocks=1),
    Case("f64", 3, 3, 2, log_lanes=2, packed=True, losses="f64"),
]


class Problem:
    """Three items: the second has fewer frames and labels, the third one frame and no label."""

    def __init__(self, device, case: Case):
        self.device, self.case = device, case
        rng = np.random.default_rng(case.classes)
        self.f_len = np.array([case.frames, max(case.frames - 1, 1), 1])
        self.y_len = np.array([case.labels, case.labels - 1, 0])
        self.label = rng.integers(0, case.classes, (3, case.labels))
        ends = np.cumsum(self.f_len * (self.y_len + 1))
        self.offset = ends
        self.rows = int(ends[-1]) + 2 if case.packed else 3 * case.frames * (case.labels + 1)
        self.x = decode(encode(2 * rng.standard_normal((self.rows, case.classes)), case.dtype), case.dtype)
        self.grad = decode(encode(np.array([1.5, -0.75, 2.0]), case.losses), case.losses)
        self.nodes = (3, case.frames, case.labels + 1)

    def row(self, b, t, u):
        if self.case.packed:
            return (self.offset[b - 1] if b else 0) + t * (self.y_len[b] + 1) + u
        return (b * self.case.frames + t) * (self.case.labels + 1) + u

    def oracle(self):
        """(loss, alpha, beta, normalizers, gradient), node by node in float64."""
        largest = self.x.max(1, keepdims=True)
        normalizers = np.concatenate((largest, np.log(np.exp(self.x - largest).sum(1, keepdims=True))), 1)
        p = self.x - normalizers.sum(1, keepdims=True)
        alpha, beta = np.zeros(self.nodes), np.zeros(self.nodes)
        gradient, losses, used = np.zeros_like(p), np.zeros(3), np.zeros(self.rows, bool)
        for b in range(3):
            frames, labels = self.f_len[b], self.y_len[b]
            blank = {(t, u): p[self.row(b, t, u), BLANK] for t in range(frames) for u in range(labels + 1)}
            emit = {
                (t, u): p[self.row(b, t, u), self.label[b, u]] for t in range(frames) for u in range(labels)
            }
            for t, u in sorted(blank):
                ways = [alpha[b, t - 1, u] + blank[t - 1, u]] if t else []
                ways += [alpha[b, t, u - 1] + emit[t, u - 1]] if u else []
                alpha[b, t, u] = np.logaddexp.reduce(ways) if ways else 0
            for t, u in sorted(blank, reverse=True):
                ways = [beta[b, t + 1, u] + blank[t, u]] if t + 1 < frames else []
                ways += [beta[b, t, u + 1] + emit[t, u]] if u < labels else []
                beta[b, t, u] = np.logaddexp.reduce(ways) if ways else blank[t, u]
            losses[b] = -beta[b, 0, 0]
            for t, u in blank:
                row, before = self.row(b, t, u), alpha[b, t, u] + losses[b]
                used[row] = True
                gradient[row] = np.exp(p[row] + before + beta[b, t, u])
                last = t + 1 == frames
                if not last or u == labels:
                    gradient[row, BLANK] -= np.exp(before + blank[t, u] + (0 if last else beta[b, t + 1, u]))
                if u < labels:
                    gradient[row, self.label[b, u]] -= np.exp(before + emit[t, u] + beta[b, t, u + 1])
                gradient[row] *= self.grad[b]
        return losses, alpha, beta, np.where(used[:, None], normalizers, 0), gradient

    def empty(self, shape, dtype):
        return self.device.put(np.full(shape, encode(np.array(7.0), dtype)[()], DTYPES[dtype]))

    def common(self):
        c = self.case
        kind = np.int64 if c.wide else np.int32
        encoded = encode(self.x, c.dtype)
        return dict(
            x=self.device.put(encoded, c.offset * encoded.itemsize), label=self.device.put(self.label.astype(kind)),
            f_len=self.device.put(self.f_len.astype(kind)), g_len=self.device.put(self.y_len.astype(kind)),
            batch_offset=self.device.put(self.offset.astype(np.int64)) if c.packed else None,
            batch=3, frames=c.frames, labels=c.labels + 1, classes=c.classes, rows=self.rows, blank=BLANK,
            type=TYPE[c.dtype], wide_labels=c.wide, wide_lengths=c.wide, tile_rows=c.tile,
        )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(device, case):
    p = Problem(device, case)
    loss, normalizers = p.empty(3, case.losses), p.empty((p.rows, 2), case.math)
    alpha, beta = p.empty((*p.nodes, 2), case.math), p.empty((*p.nodes, 2), case.math)
    emissions = p.empty((3, case.frames + case.labels, case.labels + 1, 2), case.math)
    arguments = make(
        "TransducerLossForward", HEADER, normalizers=normalizers, emissions=emissions, alpha=alpha, beta=beta,
        loss=loss, loss_type=TYPE[case.losses], log_lanes=case.log_lanes_of(device), **p.common(),
    )  # fmt: skip
    device.launch(f"transducer_loss_emissions_{case.dtype}", 3, 2 * device.warp_size, [arguments])
    device.launch(f"transducer_loss_lattice_{case.math}", case.blocks, case.threads, [arguments])
    losses, of_alpha, of_beta, of_rows, _ = p.oracle()
    near = dict(rtol=0, atol=(case.frames + case.labels) * 500 * ROUNDING[case.math])
    for found, wanted in ((alpha, of_alpha), (beta, of_beta)):
        whole, rest = np.moveaxis(decode(found.numpy(), case.math), -1, 0)
        np.testing.assert_allclose(whole + rest, wanted, **near)
        assert np.array_equal(whole, whole.round())
    np.testing.assert_allclose(normalizers.numpy(), of_rows, **near)
    found = decode(loss.numpy(), case.losses)
    np.testing.assert_allclose(found, losses, rtol=1.01 * ROUNDING[case.losses], atol=near["atol"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(device, case):
    p = Problem(device, case)
    _, alpha, beta, normalizers, wanted = p.oracle()
    put = {
        k: device.put(encode(np.stack((v.round(), v - v.round()), -1), case.math))
        for k, v in (("alpha", alpha), ("beta", beta))
    }
    gradient = p.empty((p.rows, case.classes), case.dtype)
    common = p.common() | put
    arguments = make(
        "TransducerLossBackward", HEADER, grad_loss=device.put(encode(p.grad, case.losses)), grad_stride=1,
        grad_type=TYPE[case.losses], normalizers=device.put(encode(normalizers, case.math)), grad_x=gradient,
        of_logits=1, **common,
    )  # fmt: skip
    device.launch(f"transducer_loss_backward_{case.dtype}", 3, 2 * device.warp_size, [arguments])
    found = decode(gradient.numpy(), case.dtype)
    atol = 2000 * ROUNDING[case.math]
    np.testing.assert_allclose(found, wanted, rtol=1.01 * ROUNDING[case.dtype], atol=atol)
    np.testing.assert_array_equal(found[(wanted == 0).all(1)], 0)


def test_items_that_do_not_fit(device):
    """Their losses and gradients are nan; nothing outside is touched."""
    for packed in (False, True):
        p = Problem(device, Case("f32", 3, 2, 8, packed=packed))
        p.f_len[0], p.label[1, 0] = 4, 8
        loss, gradient = p.empty(3, "f32"), p.empty((p.rows, 8), "f32")
        alpha, beta = p.empty((*p.nodes, 2), "f32"), p.empty((*p.nodes, 2), "f32")
        normalizers = p.empty((p.rows, 2), "f32")
        common = p.common() | dict(alpha=alpha, beta=beta, normalizers=normalizers)
        forward = make(
            "TransducerLossForward", HEADER, loss=loss, emissions=p.empty((3, 5, 3, 2), "f32"),
            log_lanes=3, **common,
        )  # fmt: skip
        device.launch("transducer_loss_emissions_f32", 2, device.warp_size, [forward])
        device.launch("transducer_loss_lattice_f32", 2, device.warp_size, [forward])
        backward = make(
            "TransducerLossBackward", HEADER, grad_loss=device.put(np.ones(3, np.float32)), grad_stride=1,
            grad_x=gradient, of_logits=1, **common,
        )  # fmt: skip
        device.launch("transducer_loss_backward_f32", 2, device.warp_size, [backward])
        np.testing.assert_array_equal(np.isnan(loss.numpy()), [True, True, False])
        rows = np.isnan(gradient.numpy()).all(1)
        assert np.array_equal(rows, np.isnan(gradient.numpy()).any(1))
        bad = np.arange(p.rows) < (p.offset[0] if packed else 9)
        bad[[p.row(1, t, u) for t in range(p.f_len[1]) for u in range(p.y_len[1] + 1)]] = True
        np.testing.assert_array_equal(rows, bad)


# ---- offsets past 32 bits -----------------------------------------------------------------------------------

FRAMES, LABELS, CLASSES = 2003, 1031, 1041  # 2,149,783,113 logits; odd rows, so that no two begin alike


@pytest.mark.parametrize("width", [32, 64])
def test_last_row_past_two_to_the_31(width):
    """Memory that costs nothing until touched; the last row's block alone runs."""
    device = Target(f"plain-{width}", "plain", width, 0).device()
    service, last = device.service, FRAMES * LABELS - 1
    values = encode(3 * np.random.default_rng(4).standard_normal(CLASSES), "bf16")
    x, gradient = (service.allocate(FRAMES * LABELS * CLASSES * 2, 0) for _ in range(2))
    nodes = {k: service.allocate(FRAMES * LABELS * 8, 0) for k in ("alpha", "beta", "normalizers")}
    service.write(x + last * CLASSES * 2, values.tobytes())
    common = dict(
        x=x, label=device.put(np.zeros(LABELS - 1, np.int32)), f_len=device.put(np.array([FRAMES], np.int32)),
        g_len=device.put(np.array([LABELS - 1], np.int32)), batch=1, frames=FRAMES, labels=LABELS, classes=CLASSES,
        rows=FRAMES * LABELS, type=TYPE["bf16"], blank=0, tile_rows=32, **nodes,
    )  # fmt: skip
    emissions = service.allocate((FRAMES + LABELS - 1) * LABELS * 8, 0)
    service.only_block(last // 32 // (128 // width))
    try:
        forward = make("TransducerLossForward", HEADER, emissions=emissions, log_lanes=5, **common)
        device.launch("transducer_loss_emissions_bf16", FRAMES * LABELS, 128, [forward])
        backward = make(
            "TransducerLossBackward", HEADER, grad_loss=device.put(np.ones(1, np.float32)), grad_x=gradient,
            of_logits=1, **common,
        )  # fmt: skip
        device.launch("transducer_loss_backward_bf16", FRAMES * LABELS, 128, [backward])
    finally:
        service.only_block(-1)
    log_p = decode(values, "bf16")
    log_p = log_p - np.log(np.exp(log_p).sum())
    found = np.frombuffer(service.read(nodes["normalizers"] + last * 8, 8), np.float32).sum()
    np.testing.assert_allclose(found, decode(values, "bf16")[0] - log_p[0], rtol=1e-5)
    found = np.frombuffer(service.read(gradient + last * CLASSES * 2, CLASSES * 2), np.uint16)
    wanted = np.exp(log_p)  # alpha and beta are 0 there
    wanted[0] -= np.exp(log_p[0])
    np.testing.assert_allclose(decode(found, "bf16"), wanted, rtol=2**-8 * 1.01, atol=1e-8)
    for address in [x, gradient, emissions, *nodes.values()]:
        service.free(address)
    device.close()
