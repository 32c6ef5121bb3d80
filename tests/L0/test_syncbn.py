"""The extension syncbn of public apex: its names and argument orders, and what each function does."""

from __future__ import annotations

import inspect

import pytest
import torch
from channels import Case, near
from lists import BF16, F16, F32

from apex._legacy import syncbn

# Facts of csrc/syncbn.cpp, the same in both public trees.
SIGNATURES = {
    "welford_mean_var": "input",
    "welford_parallel": "mean_feature_nodes var_biased numel eps",
    "batchnorm_forward": "input mean inv_std weight shift",
    "reduce_bn": "grad_output input mean inv_std weight",
    "batchnorm_backward": "grad_output input mean inv_std weight sum_dy sum_dy_xmu count",
    "welford_mean_var_c_last": "input",
    "batchnorm_forward_c_last": "input z mean inv_std weight shift fuse_relu",
    "reduce_bn_c_last": "grad_output input mean inv_std weight",
    "batchnorm_backward_c_last": "grad_output input mean inv_std weight sum_dy sum_dy_xmu count",
    "relu_bw_c_last": "grad_output input z mean inv_std weight shift",
}


def test_names_and_argument_orders():
    found = {name: " ".join(inspect.signature(getattr(syncbn, name)).parameters) for name in syncbn.__all__}
    assert found == SIGNATURES


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype, weight", [(F32, F32), (F16, F32), (F16, F16), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["", "c_last"])
def test_one_step(variant, last, dtype, weight, ranks):
    """As public apex's own SyncBatchNorm strings the functions together, over ranks that hold the same."""
    c = Case("last" if last else "first", (5, 4, 8), dtype, variant.device, weight_dtype=weight)
    end = "_c_last" if last else ""
    mean, var = getattr(syncbn, f"welford_mean_var{end}")(c.x)
    counts = torch.full((ranks,), c.count, dtype=torch.int32, device=c.x.device)
    mean, var, inv_std = syncbn.welford_parallel(mean.repeat(ranks, 1), var.repeat(ranks, 1), counts, 1e-3)
    mean64, n = c.x64.mean(c.over), c.count * ranks
    near(mean, mean64)
    near(var, c.var64 * n / (n - 1))
    near(inv_std, (c.var64 + 1e-3).rsqrt(), loose=4)

    normal = (c.x64 - c.spread(mean64)) * c.spread((c.var64 + 1e-3).rsqrt())
    before = normal * c.spread(c.weight64) + c.spread(c.shift64)
    if last:
        y = syncbn.batchnorm_forward_c_last(c.x, c.z, mean, inv_std, c.weight, c.shift, True)
        near(y, (before + c.z64).relu(), loose=4)
        dy = syncbn.relu_bw_c_last(c.dy, c.x, c.z, mean, inv_std, c.weight, c.shift)
        assert torch.equal(dy.cpu(), torch.where(before + c.z64 > 0, c.dy.cpu(), 0))
    else:
        near(syncbn.batchnorm_forward(c.x, mean, inv_std, c.weight, c.shift), before, loose=4)
        dy = c.dy
    dy64 = dy.cpu().double()
    sums = getattr(syncbn, f"reduce_bn{end}")(dy, c.x, mean, inv_std, c.weight)
    assert sums[2].dtype == sums[3].dtype == c.weight.dtype
    near(sums[2], (dy64 * normal).sum(c.over), loose=4)
    near(sums[3], dy64.sum(c.over), loose=4)
    of_ranks = [s * ranks for s in sums[:2]]
    dx = getattr(syncbn, f"batchnorm_backward{end}")(dy, c.x, mean, inv_std, c.weight, *of_ranks, counts)
    g = dy64 - c.spread(dy64.mean(c.over)) - normal * c.spread((dy64 * normal).mean(c.over))
    near(dx, g * c.spread(c.weight64 * (c.var64 + 1e-3).rsqrt()), loose=4)


def test_no_weight(variant):
    c = Case("first", (3, 4, 6), F32, variant.device, affine=False)
    near(syncbn.batchnorm_forward(c.x, c.mean, c.inv_std, None, None), c.forward(z=False, relu=False))
    assert [s.numel() for s in syncbn.reduce_bn(c.dy, c.x, c.mean, c.inv_std, None)] == [4, 4, 0, 0]


def test_half_statistics(variant):
    """Public apex merges statistics of the dtype they are given in."""
    means = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=F16, device=variant.device)
    found = syncbn.welford_parallel(
        means,
        torch.ones_like(means),
        torch.tensor([2, 2], dtype=torch.int64, device="cpu").to(variant.device),
        0.0,
    )
    assert [t.dtype for t in found] == [F16] * 3
    torch.testing.assert_close(found[0].cpu().float(), torch.tensor([2.0, 3.0], dtype=F32, device="cpu"))
    torch.testing.assert_close(
        found[1].cpu().float(), torch.tensor([8.0, 8.0], dtype=F32, device="cpu") / 3, rtol=1e-3, atol=0
    )


def test_records_no_gradients(variant):
    c = Case("first", (3, 4, 6), F32, variant.device)
    c.x.requires_grad_()
    assert not syncbn.welford_mean_var(c.x)[0].requires_grad
    assert not syncbn.batchnorm_forward(c.x, c.mean, c.inv_std, c.weight, c.shift).requires_grad
