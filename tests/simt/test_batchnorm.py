"""batchnorm kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt import channels
from simt.element_types import DTYPES, decode, encode
from simt.structs import make
from simt.targets import Target


@pytest.mark.parametrize("case", channels.PASSES, ids=str)
def test_forward(device, case):
    t = channels.Tensors(device, case)
    expected = channels.normalized(t)
    found = channels.apply(t, "batchnorm_forward")
    channels.near(found, case.dtype, np.maximum(expected, 0) if case.relu else expected)


@pytest.mark.parametrize("case", channels.PASSES[::3], ids=str)
def test_without_statistics(device, case):
    """Scale and shift alone, as behind a convolution."""
    t = channels.Tensors(device, case)
    found = channels.apply(t, "batchnorm_forward", mean=None, inv_std=None)
    expected = t.x * t.spread(t.weight) + t.spread(t.shift) + (t.z if case.z else 0)
    channels.near(found, case.dtype, np.maximum(expected, 0) if case.relu else expected)


@pytest.mark.parametrize("case", channels.PASSES, ids=str)
def test_backward(device, case):
    t = channels.Tensors(device, case)
    math = DTYPES[case.math]
    sums = [t.dy.sum((0, 2)).astype(math), (t.dy * (t.x - t.spread(t.mean))).sum((0, 2)).astype(math)]
    counts = np.array([case.batch * case.spatial, 5], np.int32)
    found = channels.apply(
        t, "batchnorm_backward", grad_output=t.put("dy", case.dtype, case.offset), sum_dy=device.put(sums[0]),
        sum_dy_xmu=device.put(sums[1]), count=device.put(counts), counts=2, count_is_int=1,
    )  # fmt: skip
    n = counts.sum()
    along = t.spread(sums[1] / n * t.inv_std**2)
    g = t.dy - t.spread(sums[0] / n) - (t.x - t.spread(t.mean)) * along
    channels.near(found, case.dtype, g * t.spread(t.inv_std * t.weight))


# ---- offsets past 32 bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 64])
def test_last_elements_past_two_to_the_32(width):
    """Memory that costs nothing until touched; the last block alone runs, in the second channel."""
    device = Target(f"plain-{width}", "plain", width, 0).device()
    service, threads, of_block = device.service, 64, 1024
    spatial = 2**31 + of_block
    blocks, begin = 2 * spatial // of_block, 2 * spatial - of_block
    x = encode(np.random.default_rng(5).standard_normal(of_block), "f16")
    input, output = (service.allocate(2 * spatial * 2, 0) for _ in range(2))
    service.write(input + begin * 2, x.tobytes())
    mean, inv_std = np.array([3, 0.25], np.float32), np.array([7, 2], np.float32)
    arguments = make(
        "ChannelApply", "batchnorm_arguments.h", input=input, output=output, mean=device.put(mean),
        inv_std=device.put(inv_std), batch=1, channels=2, spatial=spatial, input_type=channels.TYPE["f16"],
        vectors=1, part_vectors=of_block // 8, step_spatial=threads * 8,
    )  # fmt: skip
    service.only_block(blocks - 1)
    try:
        device.launch("batchnorm_forward_any_f16", blocks, threads, [arguments])
    finally:
        service.only_block(-1)
    found = np.frombuffer(service.read(output + begin * 2, of_block * 2), np.float16)
    channels.near(found, "f16", (decode(x, "f16") - 0.25) * 2)
    for address in (input, output):
        service.free(address)
    device.close()
