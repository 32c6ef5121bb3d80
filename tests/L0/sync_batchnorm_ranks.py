"""What each rank of test_sync_batchnorm_ranks.py runs, on gloo."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import sharded_adam
import torch
import torch.distributed as dist

from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.parallel import ReduceOp, SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from apex.parallel.sync_batchnorm_kernel import SyncBatchnormFunction

HOME = torch.device("cpu")  # where tensors of a rank lie


def run_on_gpus(rank, ranks, folder):
    """One rank of test_sync_batchnorm_two_gpus.py, on its GPU."""
    global HOME
    HOME = sharded_adam.start_nccl(rank, ranks, folder)
    sharded_adam.run_cases(__name__, None, rank, folder)


def _group(mesh, size):
    """Neighbours share a group, and nobody else does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = create_syncbn_process_group(size)
    assert dist.get_world_size(group) == size
    found = torch.tensor(float(rank), dtype=torch.float32, device=HOME)
    dist.all_reduce(found, group=group)
    first = rank // size * size
    assert found.item() == sum(range(first, first + size)) and first + size <= world


def _all_ranks(mesh):
    assert create_syncbn_process_group(0) is None


def _indivisible(mesh):
    for size in (3, -1, dist.get_world_size() + 1, "2", 1.0, None):
        with pytest.raises(ValueError, match="must divide the world size"):
            create_syncbn_process_group(size)


class Counted:
    """How many collectives ran; each takes a rank's time in which all wait for all."""

    def __init__(self):
        self.gathered = self.reduced = 0

    @contextlib.contextmanager
    def watch(self):
        """While it is entered."""
        gather, gather_into, reduce = dist.all_gather, dist.all_gather_into_tensor, dist.all_reduce

        def all_gather(*arguments, **keywords):
            self.gathered += 1
            return gather(*arguments, **keywords)

        def all_gather_into_tensor(*arguments, **keywords):
            self.gathered += 1
            return gather_into(*arguments, **keywords)

        def all_reduce(*arguments, **keywords):
            self.reduced += 1
            return reduce(*arguments, **keywords)

        dist.all_gather, dist.all_reduce = all_gather, all_reduce
        dist.all_gather_into_tensor = all_gather_into_tensor
        try:
            yield
        finally:
            dist.all_gather, dist.all_gather_into_tensor, dist.all_reduce = gather, gather_into, reduce


def _batches(uneven, world):
    """How large the batch of each rank is."""
    return {False: [2] * world, True: [1, 3, 0, 2][:world]}[uneven]


def _random(shape, dtype, seed):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
    ).to(torch.get_default_device(), dtype)


def _near(found, expected, dtype):
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * scale)


def _like_one_process(
    mesh,
    shape=(5, 4, 3),
    batches=None,
    dtype=torch.float32,
    format=torch.contiguous_format,
    z=False,
    group=None,
    mean=0.5,
    **options,
):
    """Two steps: the outputs, gradients and running statistics of torch's batch norm over all batches at once.

    shape: of one sample, channels first. group: ranks that share statistics.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = batches or _batches(True, world)
    ranks = range(world) if group is None else range(rank // group * group, (rank // group + 1) * group)
    process_group = None if group is None else create_syncbn_process_group(group)
    ours = SyncBatchNorm(shape[0], process_group=process_group, **options)
    last, relu = ours.channel_last, ours.fuse_relu
    with torch.no_grad():
        for seed, p in enumerate(ours.parameters(), 50):
            p.copy_(_random(p.shape, p.dtype, seed) + 1)
    if dtype == torch.float64:
        ours.double()
    theirs = {
        1: torch.nn.BatchNorm1d,
        2: torch.nn.BatchNorm1d,
        3: torch.nn.BatchNorm2d,
        4: torch.nn.BatchNorm3d,
    }
    kept = {k: v for k, v in options.items() if k not in ("channel_last", "fuse_relu")}
    theirs = theirs[len(shape)](shape[0], **kept).double()
    theirs.load_state_dict(ours.state_dict())
    for step in range(2):
        inputs = []
        for seed in range(2 if z else 1):
            of_rank = [
                _random((batches[r], *shape), dtype, 100 * step + 10 * r + seed) * 2 + mean for r in ranks
            ]
            inputs.append((of_rank[ranks.index(rank)].contiguous(memory_format=format), torch.cat(of_rank)))
        mine = [(x.movedim(1, -1) if last else x).detach().requires_grad_() for x, _ in inputs]
        whole = [x.double().requires_grad_() for _, x in inputs]
        counted = Counted()
        with counted.watch():
            y = ours(*mine)
            before = counted.reduced
            gradients = [_random((batches[r], *shape), dtype, 1000 + 10 * r) for r in ranks]
            gradient = gradients[ranks.index(rank)]
            y.backward(gradient.movedim(1, -1) if last else gradient)
        alone = group == 1
        gathers = 1 if step else 2  # before its first batch a layer asks for the others' channels
        assert (counted.gathered, before, counted.reduced) == ((0, 0, 0) if alone else (gathers, 0, 1))
        expected = theirs(whole[0])
        expected = expected + whole[1] if z else expected
        expected = expected.relu() if relu else expected
        expected.backward(torch.cat(gradients).double())
        split = [batches[r] for r in ranks]
        assert y.dtype == dtype
        assert y.numel() == 0 or last or y.is_contiguous(memory_format=format)
        _near(y.movedim(-1, 1) if last else y, expected.split(split)[ranks.index(rank)].detach(), dtype)
        for a, b in zip(mine, whole, strict=True):
            _near(a.grad.movedim(-1, 1) if last else a.grad, b.grad.split(split)[ranks.index(rank)], dtype)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        total = a.grad.clone()  # a rank's own part, as of any layer
        dist.all_reduce(total, group=process_group)
        _near(total, b.grad, dtype if dtype != torch.float16 else torch.bfloat16)
    for name, value in theirs.named_buffers():
        found = getattr(ours, name)
        _near(found, value.double(), torch.float64 if name == "num_batches_tracked" else found.dtype)
    everyone = [torch.empty_like(ours.weight) for _ in range(world)] if ours.affine else []
    for name in ("running_mean", "running_var"):
        mine = getattr(ours, name)
        if mine is None or group is not None or not everyone:
            continue
        dist.all_gather(everyone, mine)
        assert all(torch.equal(mine, other) for other in everyone)  # to the last bit
    return ours


def _one_value_a_rank(mesh):
    """Report: (1, C, 1, 1) on each rank was refused."""
    world = dist.get_world_size()
    _like_one_process(mesh, shape=(5, 1, 1), batches=[1] * world)
    _like_one_process(mesh, shape=(5,), batches=[1] * world)


def _a_lone_value(mesh):
    """One element on all ranks together: nothing to normalize by, and no nan that stays for ever."""
    layer = SyncBatchNorm(3)
    x = torch.full(
        (1 if dist.get_rank() == 0 else 0, 3, 1), 4.0, requires_grad=True, dtype=torch.float32, device=HOME
    )
    layer(x).sum().backward()
    assert x.grad.eq(0).all() and layer.running_mean.isfinite().all() and layer.running_var.isfinite().all()


def _eval_speaks_to_nobody(mesh):
    """A rank may evaluate alone, whether there are running statistics or not."""
    for options in (dict(), dict(track_running_stats=False), dict(fuse_relu=True)):
        layer = SyncBatchNorm(3, **options)
        layer(_random((2, 3, 4), torch.float32, dist.get_rank()))
        layer.eval()
        if dist.get_rank() == 0:
            x = _random((2, 3, 4), torch.float32, 7)
            y = layer(x)
            other = torch.nn.BatchNorm1d(3, track_running_stats=layer.track_running_stats).eval()
            other.load_state_dict(layer.state_dict())
            torch.testing.assert_close(y, other(x).relu() if layer.fuse_relu else other(x))


def _frozen_input(mesh):
    """Inputs that need no gradient, on every rank or on some, and weights that need none: nobody waits in vain."""
    rank, world = dist.get_rank(), dist.get_world_size()
    samples = [_random((2, 3, 4), torch.float32, r) for r in range(world)]
    gradients = [_random((2, 3, 4), torch.float32, 50 + r) for r in range(world)]
    for needs, affine in (((), True), ((0,), True), ((1,), True), (range(world), False)):
        layer, counted, x = SyncBatchNorm(3, affine=affine), Counted(), samples[rank].clone()
        x.requires_grad_(rank in needs)
        with counted.watch():
            layer(x).backward(gradients[rank])
        assert (counted.gathered, counted.reduced) == (2, 1)
        whole = torch.cat(samples).double().requires_grad_()
        other = torch.nn.BatchNorm1d(3, affine=affine).double()
        other(whole).backward(torch.cat(gradients).double())
        if x.requires_grad:
            _near(x.grad, whole.grad.chunk(world)[rank], torch.float32)
        if affine:
            _near(layer.bias.grad, gradients[rank].double().sum((0, 2)), torch.float32)


def _absent(mesh):
    """Where a rank does not come the others are told, when the time is over."""
    layer = SyncBatchNorm(3, process_group=dist.new_group())
    if dist.get_rank() == 0 and dist.get_backend() == "gloo":
        sharded_adam.shorten(layer.process_group)
        before = copy.deepcopy(layer.state_dict())
        with pytest.raises(
            RuntimeError, match="in vain for the other ranks' part of a batch norm's statistics"
        ):
            layer(_random((2, 3, 4), torch.float32, 0))
        for name in ("running_mean", "running_var"):
            assert torch.equal(layer.state_dict()[name], before[name])


def _backends_by_device(mesh):
    """Groups whose backend is named by device, or by nobody: torch.distributed.get_backend calls them otherwise."""
    if dist.get_backend() != "gloo":
        return
    x = _random((2, 3, 4), torch.float32, dist.get_rank())
    wanted = SyncBatchNorm(3)(x)
    assert torch.equal(SyncBatchNorm(3, process_group=dist.new_group(backend="cpu:gloo"))(x), wanted)


def _other_channels(mesh):
    """Another number of channels, or float64, on one rank: every rank raises, and nothing is counted; then it goes on.

    Statistics of different lengths are gathered into what is nobody's, or wait for each other for ever.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    odd = rank == world - 1
    for channels, dtype, said in (
        (4 if odd else 3, torch.float32, f"rank 0 has 3, .*rank {world - 1} has 4"),
        (3, torch.float64 if odd else torch.float32, f"rank 0 has 3, .*rank {world - 1} has 3, float64"),
    ):
        layers = [SyncBatchNorm(channels), SyncBatchNorm(channels, fuse_relu=True, channel_last=True)]
        layers.append(GroupBatchNorm2d(channels, group_size=world))
        for layer in layers:
            layer.to(HOME, dtype)
            before = copy.deepcopy(layer.state_dict())
            last = getattr(layer, "channel_last", False)
            shape = (2, 5, 5, channels) if last else (2, channels, 5, 5)
            for _ in range(2):  # after it was refused, too
                with pytest.raises(ValueError, match=said):
                    layer(_random(shape, dtype, rank))
            for name, value in before.items():
                assert torch.equal(layer.state_dict()[name], value), name
    _like_one_process(mesh, shape=(5, 4), batches=_batches(False, world))


def _channels_of_groups(mesh):
    """Groups may differ from each other."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size = world // 2
    layer = SyncBatchNorm(3 + rank // size, process_group=create_syncbn_process_group(size))
    layer(_random((2, layer.num_features, 4), torch.float32, rank)).sum().backward()


def _defaults(mesh):
    """Under other default dtypes and on another default device the numbers are the same."""
    found, device = [], torch.get_default_device()
    for dtype, other in (
        (torch.float32, device),
        (torch.bfloat16, device),
        (torch.float16, device),
        (torch.float64, device),
        (torch.float32, "meta"),
    ):
        layer = SyncBatchNorm(3, fuse_relu=True)
        x = _random((2, 3, 4), torch.float16, dist.get_rank()).requires_grad_()
        gradient = _random((2, 3, 4), torch.float16, 50 + dist.get_rank())
        torch.set_default_dtype(dtype)
        torch.set_default_device(other)
        try:
            layer(x).backward(gradient)
            with torch.no_grad():
                evaluated = layer.eval()(x)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(device)
        found.append([x.grad, layer.weight.grad, layer.running_var, evaluated])
    for others in found[1:]:
        for a, b in zip(others, found[0], strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def _large_mean(mesh):
    layer = SyncBatchNorm(3)
    batches = _batches(True, dist.get_world_size())
    samples = [_random((n, 3, 50), torch.float32, 60 + r) + 1e4 for r, n in enumerate(batches)]
    y, rank, whole = layer(samples[dist.get_rank()]), dist.get_rank(), torch.cat(samples).double()
    expected = torch.nn.BatchNorm1d(3).double()(whole).split(batches)[rank]
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-3)  # two roundings of the mean
    torch.testing.assert_close(layer.running_var.double(), 0.9 + 0.1 * whole.var((0, 2)), rtol=1e-5, atol=0)


def _whole_model(mesh):
    """A converted model in torch's DistributedDataParallel trains as one process with all samples does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = torch.nn.Sequential(
        torch.nn.Conv2d(2, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.Conv2d(6, 4, 2),
        torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(64, 3),
    ).double()  # fmt: skip
    model = convert_syncbn_model(copy.deepcopy(alone))
    assert sum(type(m) is SyncBatchNorm for m in model.modules()) == 2
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for seed in range(4):
        x = _random((3 * world, 2, 7, 7), torch.float64, seed)
        for module, samples, optimizer in zip(
            (model, alone), (x.chunk(world)[rank], x), optimizers, strict=True
        ):
            optimizer.zero_grad()
            module(samples).square().mean().backward()
            optimizer.step()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(model.module.state_dict()[name], value, rtol=1e-9, atol=1e-9)


def _compiled(mesh):
    """One graph, collectives included, with the numbers of eager mode."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    eager = torch.nn.Sequential(torch.nn.Linear(6, 6), SyncBatchNorm(6), torch.nn.Tanh())
    for p in eager.parameters():
        dist.broadcast(p.data, 0)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, fullgraph=True, backend=counter)
    for step in range(2):
        x = _random((3, 6), torch.float32, 10 * step + dist.get_rank()).requires_grad_()
        found = torch.autograd.grad(compiled(x).sum(), [x, *other.parameters()])
        wanted = torch.autograd.grad(eager(x).sum(), [x, *eager.parameters()])
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    torch.testing.assert_close(other.state_dict(), eager.state_dict())


def _given_statistics(mesh):
    """Each rank's part is as in a batch norm of the whole batch, also where ranks share by twos."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for group, ranks in ((None, world), (create_syncbn_process_group(2), 2)):
        torch.manual_seed(3)
        whole = torch.randn(3 * world, 4, 5, dtype=torch.float32, device=HOME)
        gradient, weight, bias = (
            torch.randn(whole.shape, dtype=torch.float32, device=HOME),
            torch.rand(4, dtype=torch.float32, device=HOME) + 1,
            torch.rand(4, dtype=torch.float32, device=HOME),
        )
        mine = slice(3 * rank, 3 * rank + 3)
        first = 3 * (rank // ranks * ranks)
        shared = slice(first, first + 3 * ranks)
        x = whole[mine].clone().requires_grad_()
        mean, square = x.detach().mean((0, 2)), x.detach().square().mean((0, 2))
        for t in (mean, square):
            dist.all_reduce(t, ReduceOp.SUM, group)
            t /= ranks
        y = SyncBatchnormFunction.apply(x, weight, bias, mean, square - mean**2, 1e-5, group, ranks)
        y.backward(gradient[mine])
        leaf = whole[shared].double().requires_grad_()
        expected = torch.nn.functional.batch_norm(leaf, None, None, weight.double(), bias.double(), True)
        expected.backward(gradient[shared].double())
        here = slice(3 * rank - first, 3 * rank - first + 3)
        torch.testing.assert_close(y.double(), expected[here], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.grad.double(), leaf.grad[here], rtol=1e-4, atol=1e-4)


CASES = {
    "backends_by_device": _backends_by_device,
    "given_statistics": _given_statistics,
    "group_of_1": functools.partial(_group, size=1),
    "group_of_2": functools.partial(_group, size=2),
    "all_ranks": _all_ranks,
    "indivisible": _indivisible,
    "unequal_batches": _like_one_process,
    "equal_batches": lambda mesh: _like_one_process(mesh, batches=_batches(False, dist.get_world_size())),
    "one_value_a_rank": _one_value_a_rank,
    "a_lone_value": _a_lone_value,
    "two_dimensions": functools.partial(_like_one_process, shape=(6,)),
    "three_dimensions": functools.partial(_like_one_process, shape=(6, 5)),
    "five_dimensions": functools.partial(_like_one_process, shape=(3, 2, 3, 4)),
    "channels_last_format": functools.partial(_like_one_process, shape=(8, 3, 3), format=torch.channels_last),
    "channel_last": functools.partial(_like_one_process, shape=(8, 3, 3), channel_last=True),
    "add_and_relu": functools.partial(_like_one_process, z=True, fuse_relu=True),
    "channel_last_add_and_relu": functools.partial(
        _like_one_process, z=True, fuse_relu=True, channel_last=True
    ),
    "float16": functools.partial(_like_one_process, dtype=torch.float16),
    "bfloat16": functools.partial(_like_one_process, dtype=torch.bfloat16),
    "float64": functools.partial(_like_one_process, dtype=torch.float64),
    "no_affine": functools.partial(_like_one_process, affine=False),
    "no_running_statistics": functools.partial(_like_one_process, track_running_stats=False),
    "plain_average": functools.partial(_like_one_process, momentum=None),
    "alone_in_a_group": lambda mesh: _like_one_process(
        mesh, group=1, batches=_batches(False, dist.get_world_size())
    ),
    "two_in_a_group": functools.partial(_like_one_process, group=2),
    "large_mean": _large_mean,
    "eval_speaks_to_nobody": _eval_speaks_to_nobody,
    "frozen_input": _frozen_input,
    "absent": _absent,
    "other_channels": _other_channels,
    "channels_of_groups": _channels_of_groups,
    "defaults": _defaults,
    "whole_model": _whole_model,
    "compiled": _compiled,
}
