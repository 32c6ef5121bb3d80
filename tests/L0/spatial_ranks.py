"""What each rank of test_spatial_bottleneck.py runs, on gloo: strips of an image beside the whole image."""

from __future__ import annotations

import copy
import functools

import lists
import pytest
import torch
import torch.distributed as dist
from lists import BF16, F16, F32, F64
from torch_defaults import float32_on_cpu

from apex.contrib.bottleneck import (
    Bottleneck,
    HaloExchangerAllGather,
    HaloExchangerNoComm,
    HaloExchangerPeer,
    HaloExchangerSendRecv,
    SpatialBottleneck,
)
from apex.contrib.bottleneck.halo_exchangers import HaloExchanger, HaloPadder
from apex.contrib.bottleneck.spatial import SpatialBottleneckFunction
from apex.contrib.peer_memory import PeerMemoryPool

NHWC = (0, 2, 3, 1)
BLOCKS = [(8, 4, 8, 1), (8, 4, 12, 1), (8, 4, 8, 2)]


def ranks():
    return list(range(dist.get_world_size()))


def device():
    """The rank's GPU where NCCL connects the ranks, else the CPU."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


@functools.cache
def pool():
    return PeerMemoryPool(4096, 4096, device=device(), timeout=60)


EXCHANGERS = {
    "gather": lambda nhwc=False: HaloExchangerAllGather(ranks(), dist.get_rank(), None),
    "send": lambda nhwc=False: HaloExchangerSendRecv(ranks(), dist.get_rank()),
    "peer": lambda nhwc=False: HaloExchangerPeer(ranks(), dist.get_rank(), pool(), nhwc),
}


def _random(shape, dtype, seed, scale=1.0):
    return lists.random(dtype, device(), (shape,), scale=scale, seed=seed)[0]


def blocks(sizes, dtype, exchanger, method, nhwc=False):
    """(Bottleneck, SpatialBottleneck) of the same numbers."""
    torch.manual_seed(1)
    *channels, stride = sizes
    how = dict(stride=stride, use_cudnn=True, explicit_nhwc=nhwc)
    size, rank = dist.get_world_size(), dist.get_rank()
    with float32_on_cpu():
        whole = Bottleneck(*channels, **how)
        part = SpatialBottleneck(
            *channels, **how, spatial_parallel_args=(size, rank, None, exchanger, method, False)
        )
    for i, (name, buffer) in enumerate(whole.named_buffers()):
        values = _random(buffer.shape, F64, i, 0.2)
        buffer.copy_(values + (0.0 if name.endswith(("bias", "mean")) else 1.0))
    part.load_state_dict(whole.state_dict())
    return whole.to(device(), dtype), part.to(device(), dtype)


def strip(tensor, axis):
    """This rank's rows."""
    return tensor.chunk(dist.get_world_size(), axis)[dist.get_rank()].contiguous()


def added(tensors):
    """The sums over the ranks."""
    found = [t.detach().double().contiguous() for t in tensors]
    for t in found:
        dist.all_reduce(t)
    return found


def near(found, wanted, loose):
    unit = loose * lists.ROUNDING[found.dtype]
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted.double(), rtol=unit, atol=unit * scale)


def values(exchanger, method, sizes, dtype=F64, nhwc=False, rows=4):
    """Output and gradients of the strip, and the sum of the weights' gradients, are the whole image's in float64."""
    exchanger = EXCHANGERS[exchanger](nhwc)
    whole, part = blocks(sizes, dtype, exchanger, method, nhwc)
    height, axis = rows * dist.get_world_size(), 1 if nhwc else 2
    x = _random((2, sizes[0], height, 5), dtype, 20)
    x = (x.permute(NHWC) if nhwc else x).contiguous()
    exact = copy.deepcopy(whole).double()
    wide = x.double().requires_grad_()
    y = exact(wide)
    g = torch.cos(torch.arange(y.numel(), dtype=F64, device=y.device)).view(y.shape)
    wanted = torch.autograd.grad(y, [wide, *exact.w_conv], g)
    mine = strip(x, axis).requires_grad_()
    found_y = part(mine)
    found = torch.autograd.grad(found_y, [mine, *part.w_conv], strip(g, axis).to(dtype))
    assert found_y.dtype == dtype
    if dtype in (F16, BF16):
        _near_by_norm(strip(y, axis), found_y, strip(wanted[0], axis), found[0], dtype)
        return
    near(found_y, strip(y, axis), 64)
    near(found[0], strip(wanted[0], axis), 64)
    for a, b in zip(added(found[1:]), wanted[1:], strict=True):
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a, b, rtol=0, atol=256 * lists.ROUNDING[dtype] * scale)


def _near_by_norm(y, found_y, grad, found_grad, dtype):
    """Halves near 0 lie on either side of a ReLU by luck: one that differs shows in gradients."""
    for wanted, found, luck in ((y, found_y, 0.0), (grad, found_grad, 0.15)):
        error = (found.detach().double() - wanted).norm() / wanted.norm()
        assert error <= 4 * lists.ROUNDING[dtype] + luck, error


def second_order():
    """The gradient of the gradient's norm, through the exchange and its own backward."""
    for method in (1, 2, 3):
        whole, part = blocks(BLOCKS[1], F64, EXCHANGERS["send"](), method)
        x = _random((1, 8, 3 * dist.get_world_size(), 4), F64, 3)
        results = []
        for module, leaf in ((whole, x.clone()), (part, strip(x, 2))):
            leaf.requires_grad_()
            (grad,) = torch.autograd.grad(module(leaf).square().sum(), leaf, create_graph=True)
            results.append(torch.autograd.grad(grad.square().sum(), leaf)[0])
        near(results[1], strip(results[0], 2), 4096)


def compiled():
    """One graph, whatever exchanges."""
    from torch._dynamo.testing import CompileCounterWithBackend

    for name, method in (("send", 1), ("gather", 2), ("peer", 3)):
        counter = CompileCounterWithBackend("aot_eager")
        _, part = blocks(BLOCKS[2], F32, EXCHANGERS[name](), method)
        x = strip(_random((2, 8, 4 * dist.get_world_size(), 5), F32, 20), 2).requires_grad_()
        graph = torch.compile(copy.deepcopy(part), fullgraph=True, backend=counter)
        results = [torch.autograd.grad(m(x).square().sum(), x)[0] for m in (part, graph)]
        near(results[1], results[0], 64)
        assert counter.frame_count == 1


def uneven():
    """Every rank says what differs, the ones that are far from it too."""
    exchanger, last = EXCHANGERS["send"](), dist.get_rank() == dist.get_world_size() - 1
    part = blocks(BLOCKS[0], F32, exchanger, 2)[1]
    with pytest.raises(ValueError, match=r"strips of all ranks must have one shape.*rank 0: \[1, 8, 4, 5\]"):
        part(_random((1, 8, 5 if last else 4, 5), F32, 1))
    with pytest.raises(ValueError, match="must have one shape and dtype"):
        part.to(F64 if last else F32)(_random((1, 8, 4, 5), F64 if last else F32, 1))
    part = blocks(BLOCKS[2], F32, exchanger, 2)[1]
    with pytest.raises(ValueError, match="3 rows does not divide by the stride 2"):
        part(_random((1, 8, 3, 5), F32, 1))
    part(_random((1, 8, 4, 5), F32, 1))  # nothing is out of step


def exchange(name):
    """What arrives, in every layout, in place and not; zeros at the image's edges."""
    exchanger, rank, size = EXCHANGERS[name](), dist.get_rank(), dist.get_world_size()
    base = _random((2, 3, 4, 5), F32, 0)
    for form in (lambda t: t, lambda t: t.transpose(1, 3), lambda t: t.to(memory_format=torch.channels_last)):
        left, right = (form(base + 10 * rank + end) for end in (1, 2))
        above = form(base + 10 * (rank - 1) + 2) if rank else torch.zeros_like(left)
        below = form(base + 10 * (rank + 1) + 1) if rank < size - 1 else torch.zeros_like(left)
        found = exchanger.left_right_halo_exchange(left, right)
        into = [torch.full_like(left, 7.0) for _ in range(2)]
        assert exchanger.left_right_halo_exchange(left, right, *into) is None
        for a, b, wanted in zip(found, into, (above, below), strict=True):
            assert torch.equal(a, wanted) and torch.equal(b, wanted)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32):
        t = torch.full((1, 1, 3), rank, dtype=dtype, device=device())
        above, below = exchanger.left_right_halo_exchange(t, t)
        assert above.tolist() == [[[max(0, rank - 1)] * 3]] and above.dtype == dtype
        assert below.tolist() == [[[(rank + 1) % size] * 3]]


def padder():
    """The image with the neighbours' rows, by height and by width, in both layouts."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for explicit_nhwc in (False, True):
        for by_height in (True, False):
            axis = (1 if explicit_nhwc else 2) + (not by_height)
            for half in (1, 2):
                whole = _random([6] * axis + [3 * size] + [5] * (3 - axis), F32, 4)
                pad = HaloPadder(EXCHANGERS["send"]())
                found = pad(whole.narrow(axis, 3 * rank, 3), half, explicit_nhwc, by_height)
                pad.wait()
                edge = torch.zeros_like(whole.narrow(axis, 0, half))
                wanted = torch.cat([edge, whole, edge], axis).narrow(axis, 3 * rank, 3 + 2 * half)
                assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match="at least half_halo = 4"):
        HaloPadder(EXCHANGERS["send"]())(_random((1, 2, 3, 4), F32, 0), 4, False, True)


def no_exchange():
    """A rank's own halos, swapped, at the edges too; a module runs with it."""
    exchanger = HaloExchangerNoComm(ranks(), dist.get_rank())
    left, right = _random((1, 2), F32, 1), _random((1, 2), F32, 2)
    lists.assert_same_bits(exchanger.left_right_halo_exchange(left, right), [right, left])
    for method in (1, 2, 3):
        part = blocks(BLOCKS[0], F32, exchanger, method)[1]
        x = _random((1, 8, 4 + dist.get_rank(), 5), F32, 3).requires_grad_()
        part(x).sum().backward()
        assert x.grad.isfinite().all()


def refused():
    size, rank = dist.get_world_size(), dist.get_rank()
    with pytest.raises(ValueError, match=f"rank_in_group is {size}"):
        HaloExchangerNoComm(ranks(), size)
    with pytest.raises(ValueError, match="pass comm=torch.distributed.new_group"):
        HaloExchangerAllGather([rank], 0, None)
    with pytest.raises(ValueError, match=r"this is rank \d, and ranks"):
        HaloExchangerSendRecv(ranks()[::-1], (rank + (size % 2 and rank == size // 2)) % size)
    exchanger, x = EXCHANGERS["send"](), _random((1, 2), F32, 0)
    with pytest.raises(NotImplementedError, match="use one of its subclasses"):
        HaloExchanger(ranks(), rank).left_right_halo_exchange(x, x)
    with pytest.raises(ValueError, match="both given, or both None"):
        exchanger.left_right_halo_exchange(x, x, x)
    with pytest.raises(ValueError, match="must be alike"):
        exchanger.left_right_halo_exchange(x, x[:, :1])
    with pytest.raises(TypeError, match="must be alike"):
        exchanger.left_right_halo_exchange(x, x.double())
    for arguments, text in (
        ((size, rank, None, exchanger, 4, False), "spatial_method must be 1, 2 or 3, not 4"),
        (
            (size + 1, rank, None, exchanger, 1, False),
            f"and the halo exchanger .* says rank {rank} of {size}",
        ),
        ((size, rank, None, None, 1, False), "says rank None of None"),
        ((size, rank, exchanger), "not 3 values"),
    ):
        with pytest.raises(ValueError, match=text):
            SpatialBottleneck(8, 4, 8, spatial_parallel_args=arguments)
    numbers = [torch.ones(4, dtype=F32, device=device())] * 3
    with pytest.raises(ValueError, match="must be 1, 2 or 3, not 0"):
        SpatialBottleneckFunction.apply(
            size, rank, None, exchanger, 0, False, False, 1, numbers, numbers, None, None, x
        )


CASES = {
    **{
        f"values-{name}-{method}-{i}-{nhwc}": lambda mesh, a=(name, method, sizes, F64, nhwc): values(*a)
        for name in EXCHANGERS
        for method in (1, 2, 3)
        for i, sizes in enumerate(BLOCKS)
        for nhwc in (False, True)
    },
    **{
        f"values-{dtype}-{method}": lambda mesh, a=("send", method, BLOCKS[2], dtype): values(*a)
        for dtype in (F32, F16, BF16)
        for method in (1, 2, 3)
    },
    **{
        f"values-of-one-row-{method}": lambda mesh, a=("send", method, BLOCKS[1], F64, False, 1): values(*a)
        for method in (1, 2, 3)
    },
    **{f"exchange-{name}": lambda mesh, name=name: exchange(name) for name in EXCHANGERS},
    "second_order": lambda mesh: second_order(),
    "uneven": lambda mesh: uneven(),
    "padder": lambda mesh: padder(),
    "no_exchange": lambda mesh: no_exchange(),
    "refused": lambda mesh: refused(),
    "compiled": lambda mesh: compiled() if dist.get_world_size() == 2 else None,
}
