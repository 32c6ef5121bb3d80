"""What each rank of test_groupbn_ranks.py runs, on gloo."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from sync_batchnorm_ranks import Counted, _near, _random

from apex._legacy import bnp, cudnn_gbn_lib
from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.groupbn import BatchNorm2d_NHWC


def _ranks(size):
    """The ranks of this one's group."""
    first = dist.get_rank() // size * size
    return range(first, first + size)


def _like_one_process(mesh, make, size=2, batches=(1, 3, 0, 2), dtype=torch.float32, z=False, relu=False):
    """Two steps: outputs, gradients and running statistics of torch's batch norm over the group's batches at once."""
    ranks = _ranks(size)
    ours, theirs = make(), torch.nn.BatchNorm2d(8)
    with torch.no_grad():
        for seed, p in enumerate(ours.parameters(), 50):
            p.copy_(_random(p.shape, p.dtype, seed) + 1)
    theirs.load_state_dict(ours.state_dict())
    theirs.double()
    split, mine = [batches[r] for r in ranks], ranks.index(dist.get_rank())
    for step in range(2):
        samples = [
            [_random((batches[r], 8, 3, 5), dtype, 100 * step + 10 * r + seed) * 2 + 0.5 for r in ranks]
            for seed in range(2 if z else 1)
        ]
        leaves = [s[mine].detach().requires_grad_() for s in samples]
        whole = [torch.cat(s).double().requires_grad_() for s in samples]
        gradients = [_random((batches[r], 8, 3, 5), dtype, 1000 + 10 * r) for r in ranks]
        counted = Counted()
        gathers = int(size > 1) * (
            1 if step else 2
        )  # before its first batch a layer asks for the others' channels
        with counted.watch():
            y = ours(*leaves)
            assert (counted.gathered, counted.reduced) == (gathers, 0)
            y.backward(gradients[mine])
        assert (counted.gathered, counted.reduced) == (gathers, int(size > 1))
        expected = theirs(whole[0])
        expected = expected + whole[1] if z else expected
        expected = expected.relu() if relu else expected
        expected.backward(torch.cat(gradients).double())
        _near(y, expected.split(split)[mine].detach(), dtype)
        for a, b in zip(leaves, whole, strict=True):
            _near(a.grad, b.grad.split(split)[mine], dtype)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):  # averages over the group
        _near(a.grad, b.grad / size, dtype if dtype != torch.float16 else torch.bfloat16)
    for name in ("running_mean", "running_var"):
        _near(getattr(ours, name), getattr(theirs, name), torch.float32)
        everyone = [torch.empty(8, dtype=torch.float32, device="cpu") for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, getattr(ours, name))
        assert all(torch.equal(everyone[r], everyone[ranks[0]]) for r in ranks)  # to the last bit
    # A rank may evaluate alone.
    ours.eval()
    counted = Counted()
    with counted.watch():
        ours(*leaves)
    assert (counted.gathered, counted.reduced) == (0, 0)
    return ours


def _nhwc(relu=False, size=2):
    return lambda: BatchNorm2d_NHWC(8, fuse_relu=relu, bn_group=size, torch_channels_last=True)


def _one_value_a_rank(mesh):
    """Nothing to normalize by on a rank, but in the group."""
    layer = BatchNorm2d_NHWC(8, bn_group=2, torch_channels_last=True)
    x = _random((1, 8, 1, 1), torch.float32, dist.get_rank())
    y = layer(x)
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x)
    group = torch.cat([everyone[r] for r in _ranks(2)]).double()
    expected = torch.nn.BatchNorm2d(8).double()(group)
    _near(y, expected[dist.get_rank() % 2 :][:1].detach(), torch.float32)


def _legacy(mesh):
    """bnp's functions do in a group what the module does, on batches that differ."""
    rank = dist.get_rank()
    layer = BatchNorm2d_NHWC(8, fuse_relu=True, bn_group=2, torch_channels_last=True)
    other = copy.deepcopy(layer)
    x, z = (_random((1 + rank % 2, 8, 3, 5), torch.float32, 10 * rank + s) for s in (1, 2))
    x, z = (t.contiguous(memory_format=torch.channels_last).requires_grad_() for t in (x, z))
    y = layer(x, z)
    gradient = _random(y.shape, y.dtype, 5)
    wanted = torch.autograd.grad(y, [x, z, layer.weight, layer.bias], gradient)
    batch = (
        torch.empty(8, dtype=torch.float32, device="cpu"),
        torch.empty(8, dtype=torch.float32, device="cpu"),
    )
    state = (other.weight, other.bias, other.running_mean, other.running_var, *batch)
    mask = torch.empty((x.numel() + 31) // 32 * 2, dtype=torch.int32, device="cpu")
    end = (
        None,
        0.1,
        1e-5,
        None,
        None,
        None,
        None,
        2,
        torch.tensor([2], dtype=torch.int32, device="cpu"),
        2,
        16,
        False,
    )
    assert torch.equal(bnp.bn_addrelu_fwd_nhwc(x, z, *state, mask, *end), y)
    for a, b in zip(bnp.bn_addrelu_bwd_nhwc(x, gradient, *state, mask, *end), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(other.state_dict(), layer.state_dict(), rtol=0, atol=0)


def _cudnn_gbn_lib(mesh):
    """Its functions do in a group what the module does."""
    rank = dist.get_rank()
    layer = GroupBatchNorm2d(8, 2)
    x = _random((1 + rank % 2, 8, 3, 5), torch.float32, rank).requires_grad_()
    y = layer(x)
    gradient = _random(y.shape, y.dtype, 5)
    wanted = torch.autograd.grad(y, [x, layer.weight, layer.bias], gradient)
    numbers = [torch.full((8,), value, dtype=torch.float32, device="cpu") for value in (0.0, 1.0, 7.0, 7.0)]
    end = (1e-5, 2, rank % 2, [0, 0])
    found = cudnn_gbn_lib.forward(x, layer.weight, layer.bias, *numbers, 0.1, *end)
    torch.testing.assert_close(found, y.detach(), rtol=0, atol=0)
    for a, b in zip(numbers[:2], (layer.running_mean, layer.running_var), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    gradients = cudnn_gbn_lib.backward(x, gradient, layer.weight, *numbers[2:], *end)
    for a, b in zip(gradients, wanted, strict=True):
        _near(a, b.double(), torch.float32)
    with pytest.raises(ValueError, match="this rank is number"):
        cudnn_gbn_lib.forward(x, layer.weight, layer.bias, *numbers, 0.1, 1e-5, 2, 1 - rank % 2, [0, 0])


def _refused(mesh):
    for make in (lambda: BatchNorm2d_NHWC(8, bn_group=3), lambda: GroupBatchNorm2d(8, 3)):
        with pytest.raises(ValueError, match="must divide the world size"):
            make()


def _places(mesh):
    layer, rank = GroupBatchNorm2d(8, 2), dist.get_rank()
    assert (layer.group_id, layer.group_rank) == (rank // 2, rank % 2)


def _compiled(mesh):
    """One graph, collectives included, with the numbers of eager mode; once, as it takes seconds."""
    if os.environ["APEX_VARIANT"] != "cpu" or dist.get_world_size() > 2:
        return
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    eager = BatchNorm2d_NHWC(8, fuse_relu=True, bn_group=2, torch_channels_last=True)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, fullgraph=True, backend=counter)
    for step in range(2):
        x = _random((3, 8, 3, 3), torch.float32, 10 * step + dist.get_rank()).requires_grad_()
        found = torch.autograd.grad(compiled(x, x.sin()).sum(), [x, *other.parameters()])
        wanted = torch.autograd.grad(eager(x, x.sin()).sum(), [x, *eager.parameters()])
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    torch.testing.assert_close(other.state_dict(), eager.state_dict())


CASES = {
    "unequal_batches": lambda mesh: _like_one_process(mesh, _nhwc()),
    "relu": lambda mesh: _like_one_process(mesh, _nhwc(relu=True), relu=True),
    "add_relu": lambda mesh: _like_one_process(mesh, _nhwc(relu=True), z=True, relu=True),
    "half": lambda mesh: _like_one_process(mesh, _nhwc(relu=True), z=True, relu=True, dtype=torch.float16),
    "groups_of_1": lambda mesh: _like_one_process(mesh, _nhwc(size=1), size=1, batches=(1, 3, 2, 2)),
    "cudnn_gbn": lambda mesh: _like_one_process(mesh, lambda: GroupBatchNorm2d(8, 2)),
    "one_value_a_rank": _one_value_a_rank,
    "legacy": _legacy,
    "cudnn_gbn_lib": _cudnn_gbn_lib,
    "refused": _refused,
    "places": _places,
    "compiled": _compiled,
}
