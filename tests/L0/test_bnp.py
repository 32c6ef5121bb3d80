"""The extension bnp of public apex: its names and argument orders, and what each function does."""

from __future__ import annotations

import inspect

import lists
import pytest
import torch
from channels import Case, near
from lists import F16, F32

from apex._legacy import bnp

# Facts of apex/contrib/csrc/groupbn/interface.cpp and ipc.cu, the same in both public trees.
SYNC = "my_data pair_data pair_data2 pair_data3 bn_group magic_tensor occupancy grid_dim_x coop"
STATE = "scale bias running_mean running_inv_var"
BATCH = "minibatch_mean minibatch_inv_var"
SIGNATURES = {
    "get_buffer_size": "bn_sync_steps",
    "get_data_ptr": "data",
    "get_remote_data_ptr": "handle offset",
    "close_remote_data": "handle",
    "bn_fwd_nhwc": f"x {STATE} {BATCH} ret_cta momentum epsilon fuse_relu {SYNC}",
    "bn_fwd_eval_nhwc": f"x {STATE} ret_cta bn_group momentum epsilon fuse_relu",
    "bn_bwd_nhwc": f"x dy {STATE} {BATCH} ret_cta momentum epsilon fuse_relu {SYNC}",
    "bn_fwd_nhwc_occupancy": "",
    "bn_bwd_nhwc_occupancy": "",
    "bn_addrelu_fwd_nhwc": f"x z {STATE} {BATCH} bitmask ret_cta momentum epsilon {SYNC}",
    "bn_addrelu_fwd_eval_nhwc": f"x z {STATE} ret_cta bn_group momentum epsilon",
    "bn_addrelu_bwd_nhwc": f"x dy {STATE} {BATCH} bitmask ret_cta momentum epsilon {SYNC}",
    "bn_addrelu_fwd_nhwc_occupancy": "",
    "bn_addrelu_bwd_nhwc_occupancy": "",
}
END = (None, None, None, None, 1, torch.tensor([0], dtype=torch.int32, device="cpu"), 2, 16, False)
EPS = 1e-3


def test_names_and_argument_orders():
    found = {name: " ".join(inspect.signature(getattr(bnp, name)).parameters) for name in bnp.__all__}
    assert found == SIGNATURES


def test_what_has_no_meaning_here():
    """The chain of calls with which public apex's module shares memory between ranks runs, and shares nothing."""
    buffer = torch.zeros(bnp.get_buffer_size(2), dtype=torch.uint8, device="cpu")
    assert buffer.numel() > 0 and bnp.get_data_ptr(buffer) == buffer.data_ptr()
    handle = torch.zeros(64, dtype=torch.uint8, device="cpu")
    assert bnp.get_remote_data_ptr(handle, torch.zeros(1, dtype=torch.int32, device="cpu")) is None
    assert bnp.close_remote_data(handle) is None
    assert bnp.bn_fwd_nhwc_occupancy() > 0 and bnp.bn_addrelu_bwd_nhwc_occupancy() > 0


def arguments(case):
    """(running statistics, minibatch statistics), all of which are written."""
    like = [torch.full((case.channels,), v, dtype=F32, device=case.x.device) for v in (0.0, 1.0, 7.0, 7.0)]
    return like[:2], like[2:]


@pytest.mark.parametrize(
    "layout, shape", [("last", (3, 4, 5, 8)), ("memory", (3, 8, 4, 5)), ("last", (2, 3, 4, 5))]
)
@pytest.mark.parametrize("mode", ["", "relu", "add relu"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_one_step(variant, layout, shape, mode, dtype):
    c = Case(layout, shape, dtype, variant.device, weight_dtype=F32)
    relu, add = "relu" in mode, "add" in mode
    running, batch = arguments(c)
    state = (c.weight, c.shift, *running)
    r64 = (c.var64 + EPS).rsqrt()
    normal = (c.x64 - c.spread(c.x64.mean(c.over))) * c.spread(r64)
    before = normal * c.spread(c.weight64) + c.spread(c.shift64)
    before = before + c.z64 if add else before
    c.dy[before.abs().to(c.dy.device) < 1e-5] = 0  # where rounding may decide the sign
    dy64 = torch.where(before > 0, c.dy.cpu().double(), 0) if relu else c.dy.cpu().double()
    if add:  # a mask of the size that public apex makes
        bitmask = torch.full(((c.x.numel() + 31) // 32 * 2,), -1, dtype=torch.int32, device=c.x.device)
        y = bnp.bn_addrelu_fwd_nhwc(c.x, c.z, *state, *batch, bitmask, None, 0.1, EPS, *END)
        dx, dz, *of_affine = bnp.bn_addrelu_bwd_nhwc(c.x, c.dy, *state, *batch, bitmask, None, 0.1, EPS, *END)
        assert torch.equal(dz.cpu().double(), dy64)
    else:
        y = bnp.bn_fwd_nhwc(c.x, *state, *batch, None, 0.1, EPS, relu, *END)
        dx, *of_affine = bnp.bn_bwd_nhwc(c.x, c.dy, *state, *batch, None, 0.1, EPS, relu, *END)
    near(y, before.relu() if relu else before, loose=4)
    near(batch[0], c.x64.mean(c.over))
    near(batch[1], r64, loose=4)
    near(running[0], 0.1 * c.x64.mean(c.over))
    near(running[1], 0.9 + 0.1 * c.x64.var(c.over))
    g = dy64 - c.spread(dy64.mean(c.over)) - normal * c.spread((dy64 * normal).mean(c.over))
    near(dx, g * c.spread(c.weight64 * r64), loose=4)
    near(of_affine[0], (dy64 * normal).sum(c.over), loose=4)
    near(of_affine[1], dy64.sum(c.over), loose=4)
    assert y.stride() == dx.stride() == c.x.stride()


@pytest.mark.parametrize("mode", ["", "relu", "add relu"])
def test_eval(variant, mode):
    c = Case("last", (3, 4, 5, 8), F16, variant.device, weight_dtype=F32)
    var = (c.inv_std.double() ** -2 - EPS).float()
    state = (c.weight, c.shift, c.mean, var)
    if "add" in mode:
        y = bnp.bn_addrelu_fwd_eval_nhwc(c.x, c.z, *state, None, 1, 0.1, EPS)
    else:
        y = bnp.bn_fwd_eval_nhwc(c.x, *state, None, 1, 0.1, EPS, "relu" in mode)
    near(y, c.forward("add" in mode, "relu" in mode), loose=4)


def test_refused(variant):
    c = Case("last", (3, 4, 5, 8), F32, variant.device)
    running, batch = arguments(c)
    state = (c.weight, c.shift, *running)
    for size, step in ((14, 1), (60, 2)):
        mask = torch.zeros(size, dtype=torch.int32, device=variant.device)[::step]
        with pytest.raises(ValueError, match="hold 60 bytes"):
            bnp.bn_addrelu_fwd_nhwc(c.x, c.z, *state, *batch, mask, None, 0.1, EPS, *END)
    mask = torch.zeros(15, dtype=torch.int32, device=variant.device)
    with pytest.raises(ValueError, match="z must be as x"):
        bnp.bn_addrelu_fwd_nhwc(c.x, c.z[:2], *state, *batch, mask, None, 0.1, EPS, *END)
    with pytest.raises(ValueError, match=r"must be \[N, H, W, 8\]"):
        bnp.bn_fwd_nhwc(c.x[..., :4], *state, *batch, None, 0.1, EPS, False, *END)
    for wrong in ([batch[0][:1], batch[1]], [batch[0], batch[1].expand(2, 8).contiguous()]):
        with pytest.raises(ValueError, match=r"minibatch_inv_var must be \[8\]"):
            bnp.bn_fwd_nhwc(c.x, *state, *wrong, None, 0.1, EPS, False, *END)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        bnp.bn_fwd_nhwc(c.x, *state, *batch, None, 0.1, EPS, False, *END[:4], 2, *END[5:])
    nothing = [
        torch.zeros(8, device=variant.device, dtype=F32),
        torch.ones(8, device=variant.device, dtype=F32),
    ]
    lists.assert_same_bits(running, nothing)  # nothing was counted
    assert not bnp.bn_fwd_nhwc(
        c.x.requires_grad_(), *state, *batch, None, 0.1, EPS, False, *END
    ).requires_grad
