"""welford_parallel kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt import channels
from simt.structs import make


@pytest.mark.parametrize("running", ["f32", "f16", "f64"])
@pytest.mark.parametrize("batches", [None, 4])
def test_values(device, running, batches):
    """Ranks of unequal counts, one of them empty; running statistics of another dtype."""
    name = "f64" if running == "f64" else "f32"
    math = channels.DTYPES[name]
    rng, width = np.random.default_rng(1), 70
    ranks = [rng.standard_normal((count, width)) + 2 for count in (9, 0, 1, 30)]
    everything = np.concatenate(ranks)
    means, variances = (
        np.array([f(r) if len(r) else np.zeros(width) for r in ranks], math)
        for f in (lambda r: r.mean(0), lambda r: r.var(0))
    )
    outputs = [device.full(width, 7, math) for _ in range(3)]
    count = device.full(1, 7, math)
    kept = [device.put(channels.encode(np.full(width, 2.0), running)) for _ in range(2)]
    tracked = device.put(np.array([batches], np.int64)) if batches else None
    arguments = make(
        "WelfordParallel", "batchnorm_arguments.h", mean=device.put(means), var=device.put(variances),
        count=device.put(np.array([len(r) for r in ranks], np.int32)), out_mean=outputs[0], out_var=outputs[1],
        out_inv_std=outputs[2], out_count=count, running_mean=kept[0], running_var=kept[1], batches=tracked,
        ranks=4, channels=width, mean_stride=width, var_stride=width, count_stride=1, eps=1e-3, momentum=0.1,
        input_type=channels.TYPE[name], running_type=channels.TYPE[running], count_is_int=1,
    )  # fmt: skip
    device.launch(f"welford_parallel_{name}", 2, 64, [arguments])
    new = [everything.mean(0), everything.var(0, ddof=1)]
    for buffer, expected in zip(outputs, [*new, 1 / np.sqrt(everything.var(0) + 1e-3)], strict=True):
        channels.near(buffer.numpy(), name, expected)
    assert count.numpy() == 40
    momentum = 1 / batches if batches else 0.1
    for buffer, value in zip(kept, new, strict=True):
        channels.near(buffer.numpy(), running, 2 * (1 - momentum) + momentum * value)


@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize("counts", [(9,), (2**24, 1)], ids=str)
def test_statistics_of_little_variance(device, name, counts):
    """One rank, and more elements than a float can count; eps is as large as the variance."""
    math, width, eps, ranks = channels.DTYPES[name], 5, 1e-3, len(counts)
    rng = np.random.default_rng(3)
    means = rng.standard_normal((ranks, width)).astype(math)
    variances = rng.uniform(1e-3, 2e-3, (ranks, width)).astype(math)
    outputs = [device.full(width, 7, math) for _ in range(3)]
    count = device.full(1, 7, math)
    arguments = make(
        "WelfordParallel", "batchnorm_arguments.h", mean=device.put(means), var=device.put(variances),
        count=device.put(np.array(counts, np.int32)), out_mean=outputs[0], out_var=outputs[1],
        out_inv_std=outputs[2], out_count=count, ranks=ranks, channels=width, mean_stride=width,
        var_stride=width, count_stride=1, eps=eps, momentum=0.1, input_type=channels.TYPE[name], count_is_int=1,
    )  # fmt: skip
    device.launch(f"welford_parallel_{name}", 1, 64, [arguments])
    n, of_rank = sum(counts), np.array(counts)[:, None]
    mean = (of_rank * means.astype(float)).sum(0) / n
    m2 = (of_rank * (variances + (means.astype(float) - mean) ** 2)).sum(0)
    for buffer, expected in zip(outputs, [mean, m2 / (n - 1), 1 / np.sqrt(m2 / n + eps)], strict=True):
        channels.near(buffer.numpy(), name, expected)
    assert count.numpy() == np.array(n, math)
