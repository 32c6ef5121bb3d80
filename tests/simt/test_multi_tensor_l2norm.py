"""multi_tensor_l2norm kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.device import Device
from simt.element_types import decode, encode
from simt.multi_tensor import THREADS, reduction_scratch, tensor_table
from simt.structs import make

TYPES = ["f32", "f16", "bf16", "f64"]
# Empty tensors first, inside and last; less than a vector; one and several chunks.
SIZES = (0, 1, 7, 1031, 0, 2048, 5003, 0)
MISALIGNED = (0, 1, 0, 1, 0, 0, 0, 0)
CHUNK = 1024
KINDS = {"l2": "", "maximum": "maximum_"}


def _norm(x: np.ndarray, kind: str) -> float:
    return float(np.sqrt((x * x).sum()) if kind == "l2" else np.abs(x).max(initial=0))


def _inputs(name: str, sizes=SIZES) -> list[np.ndarray]:
    rng = np.random.default_rng(11)
    return [decode(encode(rng.standard_normal(n), name), name) for n in sizes]


class Launch:
    """A list of tensors on a device and what one launch over them needs."""

    def __init__(self, device: Device, inputs, name: str, grid=3, run=1, chunk=CHUNK, threads=THREADS):
        self.device, self.name, self.grid, self.threads = device, name, grid, threads
        arrays = [encode(x, name) for x in inputs]
        skips = MISALIGNED + (0,) * (len(arrays) - len(MISALIGNED))
        self.buffers = [device.put(a, a.itemsize * s) for a, s in zip(arrays, skips, strict=False)]
        self.table = tensor_table(device, [self.buffers], [a.size for a in arrays], chunk)
        self.scratch, self.done = reduction_scratch(device, self.table, run=run)
        self.total = device.full(1, 7)
        self.per_tensor = device.full(max(len(arrays), 1), 7)

    def run(self, kind: str = "l2", **changes) -> None:
        values = dict(scale=1.0, first=1, last=1, total=self.total, per_tensor=self.per_tensor, blend_new=1.0)
        arguments = make("NormArguments", "multi_tensor_l2norm.h", **(values | changes))
        kernel = f"multi_tensor_l2norm_{KINDS[kind]}{self.name}"
        self.device.launch(kernel, self.grid, self.threads, [self.table, arguments, self.scratch])
        assert not self.done.numpy().any(), "a launch leaves its counters zeroed"


@pytest.mark.parametrize(("name", "run"), [*((name, 1) for name in TYPES), ("f32", 2), ("f32", 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_norms(device, name, kind, run):
    inputs = _inputs(name)
    launch = Launch(device, inputs, name, run=run)
    for _ in range(2):  # the second finds the scratch as the first left it
        launch.run(kind)
        np.testing.assert_allclose(launch.total.numpy()[0], _norm(np.concatenate(inputs), kind), rtol=1e-6)
        np.testing.assert_allclose(launch.per_tensor.numpy(), [_norm(x, kind) for x in inputs], rtol=1e-6)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (1,), (CHUNK,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_few_tensors(device, sizes, kind):
    inputs = _inputs("f32", sizes)
    launch = Launch(device, inputs, "f32", grid=1)
    launch.run(kind)
    everything = np.concatenate(inputs) if inputs else np.zeros(0)
    np.testing.assert_allclose(launch.total.numpy()[0], _norm(everything, kind), rtol=1e-6)
    np.testing.assert_allclose(
        launch.per_tensor.numpy()[: len(sizes)], [_norm(x, kind) for x in inputs], rtol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_more_segments_than_threads(device, kind):
    inputs = _inputs("f32", (5, 16 * 150, 3))
    launch = Launch(device, inputs, "f32", chunk=16, threads=64)
    launch.run(kind)
    np.testing.assert_allclose(launch.total.numpy()[0], _norm(np.concatenate(inputs), kind), rtol=1e-6)
    np.testing.assert_allclose(launch.per_tensor.numpy(), [_norm(x, kind) for x in inputs], rtol=1e-6)


@pytest.mark.parametrize(("of_norm", "wanted"), [(0.3, 0.3), (1.5, 1.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_coefficient_that_clips(device, kind, of_norm, wanted):
    inputs = _inputs("f32", (7, 1031))
    launch, coefficient = Launch(device, inputs, "f32"), device.full(1, 7)
    max_norm = of_norm * _norm(np.concatenate(inputs), kind)
    launch.run(kind, max_norm=max_norm, clip_coefficient=coefficient)
    np.testing.assert_allclose(coefficient.numpy()[0], wanted, rtol=2e-6)


def test_several_launches_measure_together(device):
    first, second = _inputs("f32"), _inputs("f32", (3000,))
    launch = Launch(device, first, "f32")
    launch.run(last=0)
    again = Launch(device, second, "f32")
    again.run(first=0, total=launch.total)
    expected = _norm(np.concatenate([*first, *second]), "l2")
    np.testing.assert_allclose(launch.total.numpy()[0], expected, rtol=1e-6)


def test_scales(device):
    inputs = _inputs("f16")
    launch = Launch(device, inputs, "f16")
    launch.run(scale=0.5, inv_scale=device.full(1, 0.25), per_tensor=None)
    np.testing.assert_allclose(launch.total.numpy()[0], _norm(np.concatenate(inputs), "l2") / 8, rtol=1e-6)
    np.testing.assert_array_equal(launch.per_tensor.numpy(), np.full(len(SIZES), 7))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_flags_what_is_not_finite(device, kind, bad):
    inputs = _inputs("f32")
    inputs[6][4999] = bad
    launch = Launch(device, inputs, "f32")
    flag = device.full(1, 0, np.int32)
    launch.run(kind, check_noop=1, noop_flag=flag)
    assert flag.numpy()[0] == 1
    np.testing.assert_array_equal(launch.total.numpy()[0], np.float32(bad))
    assert np.isfinite(np.delete(launch.per_tensor.numpy(), 6)).all()


def test_a_raised_flag_ends_the_launch(device):
    launch = Launch(device, _inputs("f32"), "f32")
    launch.run(check_noop=1, noop_flag=device.full(1, 1, np.int32))
    assert launch.total.numpy()[0] == 7


@pytest.mark.parametrize("kind", KINDS)
def test_blends_with_what_is_there(device, kind):
    """As NovoGrad's second moment: squares are blended for L2, magnitudes for the largest."""
    inputs = _inputs("f32")
    launch = Launch(device, inputs, "f32")
    launch.run(kind, blend_new=0.25, blend_old=0.75)
    norms = np.array([_norm(x, kind) for x in inputs])
    blended = np.sqrt(0.25 * norms**2 + 0.75 * 49) if kind == "l2" else 0.25 * norms + 0.75 * 7
    np.testing.assert_allclose(launch.per_tensor.numpy(), blended, rtol=1e-6)
