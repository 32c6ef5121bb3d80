"""welford_parallel against the statistics of all elements together, in float64, on everything that can serve it."""

from __future__ import annotations

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64

from apex._loader import bindings

bindings.load()
COUNTS = [(5,), (4, 4), (1, 1, 1, 1), (300, 1, 0, 17), (0, 9)]


def statistics(counts, channels, dtype, device, mean=0.5):
    """(means [ranks, channels], variances, counts, all elements in float64)"""
    elements = [
        lists.random(F64, "cpu", ((count, channels),), seed=seed)[0] * 2 + mean
        for seed, count in enumerate(counts, 1)
    ]
    nothing = torch.zeros(channels, dtype=F64, device="cpu")
    means = torch.stack([x.mean(0) if len(x) else nothing for x in elements])
    variances = torch.stack([x.var(0, unbiased=False) if len(x) else nothing for x in elements])
    numel = torch.tensor(counts, dtype=torch.int32, device="cpu")
    return *(t.to(device) for t in (means.to(dtype), variances.to(dtype), numel)), torch.cat(elements)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_values(variant, counts, dtype):
    for channels in (1, 7, 300):
        mean, var, numel, everything = statistics(counts, channels, dtype, variant.device)
        found = torch.ops.apex.welford_parallel(mean, var, numel, 1e-3)
        close = {"rtol": 64 * lists.ROUNDING[dtype], "atol": 16 * lists.ROUNDING[dtype]}
        expected = [
            everything.mean(0),
            everything.var(0),
            (everything.var(0, unbiased=False) + 1e-3).rsqrt(),
            torch.tensor([float(len(everything))], dtype=F32, device="cpu").double(),
        ]
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.cpu().double(), b, **close)


def test_one_tensor_that_was_gathered(variant):
    """As SyncBatchNorm calls it: columns of one tensor, counts among them."""
    mean, var, numel, _ = statistics((3, 8, 0), 20, F32, variant.device)
    together = torch.cat([mean, var, numel.float().unsqueeze(1)], 1)
    found = torch.ops.apex.welford_parallel(together[:, :20], together[:, 20:40], together[:, 40], 1e-3)
    lists.assert_same_bits(found, torch.ops.apex.welford_parallel(mean, var, numel, 1e-3))


def test_large_mean(variant):
    mean, var, numel, everything = statistics((50, 7, 300), 5, F32, variant.device, mean=1e4)
    found = torch.ops.apex.welford_parallel(mean, var, numel, 1e-3)
    torch.testing.assert_close(found[0].cpu().double(), everything.mean(0), rtol=2.0**-22, atol=0)
    torch.testing.assert_close(
        found[1].cpu().double(), everything.var(0), rtol=1e-2, atol=0
    )  # of rounded means


@pytest.mark.parametrize("dtype, running", [(F32, F32), (F32, F16), (F32, BF16), (F64, F64)], ids=str)
def test_running_statistics(variant, dtype, running):
    mean, var, numel, everything = statistics((9, 4), 6, dtype, variant.device)
    for batches, momentum in ((None, 0.3), (4, 0.25)):
        kept = [t.to(running).to(variant.device) for t in lists.random(F64, "cpu", ((6,), (6,)))]
        before, versions = lists.exact(kept), [t._version for t in kept]
        tracked = None if batches is None else torch.tensor(batches, dtype=torch.int64, device=variant.device)
        torch.ops.apex.welford_parallel(mean, var, numel, 1e-3, *kept, momentum, tracked)
        expected = [
            (1 - momentum) * old + momentum * new
            for old, new in zip(before, (everything.mean(0), everything.var(0)), strict=True)
        ]
        lists.assert_near(kept, expected, arithmetic=32, dtypes=(dtype,), smallest=1e-6)
        assert all(t._version > v for t, v in zip(kept, versions, strict=True))


def test_no_and_one_element(variant):
    """Of no element running statistics stay; one has the variance 0, not 0 / 0."""
    device = variant.device
    kept = [torch.full((3,), 2.0, device=device, dtype=F32) for _ in range(2)]
    zeros = torch.zeros(2, 3, device=device, dtype=F32)
    op = torch.ops.apex.welford_parallel
    found = op(zeros, zeros, torch.zeros(2, dtype=torch.int32, device=device), 1e-2, *kept, 0.5)
    assert all(t.eq(2).all() for t in kept)
    assert (
        found[0].eq(0).all()
        and found[3].item() == 0
        and torch.allclose(found[2], torch.tensor(10.0, dtype=F32, device="cpu").to(device))
    )
    means = torch.stack(
        [torch.full((3,), 4.0, dtype=F32, device="cpu"), torch.zeros(3, dtype=F32, device="cpu")]
    ).to(device)
    op(means, zeros, torch.tensor([1, 0], dtype=torch.int32, device=device), 1e-2, *kept, 0.5)
    assert kept[0].eq(3).all() and kept[1].eq(1).all()


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(var_biased=torch.ones(2, 4, dtype=F32, device="cpu")), ValueError, "var_biased has shape"),
        (
            dict(numel=torch.ones(3, dtype=torch.int32, device="cpu")),
            ValueError,
            r"one for each rank, \[2\]",
        ),
        (dict(numel=torch.ones(2, dtype=torch.int64, device="cpu")), TypeError, "numel must be int32"),
        (
            dict(mean=torch.ones(2, 3, dtype=F32, device="cpu").half()),
            TypeError,
            "must be float32 or float64",
        ),
        (dict(running_mean=torch.ones(3, dtype=F32, device="cpu")), ValueError, "come together"),
        (
            dict(
                running_mean=torch.ones(4, dtype=F32, device="cpu"),
                running_var=torch.ones(4, dtype=F32, device="cpu"),
            ),
            ValueError,
            r"running_mean has shape \[4\], not \[3\]",
        ),
        (
            dict(
                running_mean=torch.ones(3, dtype=F32, device="cpu").double(),
                running_var=torch.ones(3, dtype=F32, device="cpu").double(),
            ),
            TypeError,
            "float64",
        ),
    ],
    ids=lambda p: "-".join(p) if isinstance(p, dict) else "",
)
def test_refused(variant, change, error, words):
    given = dict(
        mean=torch.ones(2, 3, dtype=F32, device="cpu"),
        var_biased=torch.ones(2, 3, dtype=F32, device="cpu"),
        numel=torch.ones(2, dtype=torch.int32, device="cpu"),
        eps=1e-3,
    )
    given = {
        k: v.to(variant.device) if isinstance(v, torch.Tensor) else v for k, v in (given | change).items()
    }
    with pytest.raises(error, match=words):
        torch.ops.apex.welford_parallel(**given)


def test_traced():
    mean, var, numel, _ = statistics((3, 4), 5, F32, "cpu")
    kept = (torch.zeros(5, dtype=F32, device="cpu"), torch.ones(5, dtype=F32, device="cpu"))
    torch.library.opcheck(torch.ops.apex.welford_parallel.default, (mean, var, numel, 1e-3))
    torch.library.opcheck(torch.ops.apex.welford_parallel.default, (mean, var, numel, 1e-3, *kept, 0.1))
