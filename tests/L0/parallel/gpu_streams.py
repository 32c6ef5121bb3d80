"""What each rank of test_several_streams.py runs on GPUs: several streams, ranks without work, passes that raise."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import traceback

import torch
import torch.distributed as dist
from torch import nn

LONG = int(5e8)  # cycles that a kernel sleeps: a fraction of a second
SIZE = 64 << 20  # elements: 256 MB of float32


def run(rank, ranks, folder, backend, names):
    """One rank: the named cases, and a file that says how each ended ("" is well)."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    file = pathlib.Path(folder, f"rank{rank}.json")
    results = dict.fromkeys(names, "not begun: an earlier case ended the process")
    for name in names:
        results[name] = "did not end: NCCL aborts a process whose collective waits for too long"
        file.write_text(json.dumps(results))
        results[name] = ""
        try:
            CASES[name](rank, device)
        except Exception:
            results[name] = traceback.format_exc()
        torch.cuda.synchronize()
        file.write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # now and then a thread of torch's still runs while a group ends, which aborts the process


class Slow(torch.autograd.Function):
    """Lets its stream sleep in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(LONG)
        return grad


class TwoStreams(nn.Module):
    """Gradients of `b` are there at once, on the main stream; those of `a` late, on another one."""

    def __init__(self, count=1000):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(count)) for _ in range(2))
        self.side = torch.cuda.Stream()

    def forward(self, x):
        main = torch.cuda.current_stream()
        of_b = (self.b * x).sum()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            of_a = Slow.apply(self.a * x).sum()  # later in the forward pass, so first in the backward
        main.wait_stream(self.side)
        return of_a + of_b


def _combine_ddp(rank, device):
    """A slice of gradients from two streams is averaged after both have written theirs."""
    from apex import amp

    model = TwoStreams().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O1", loss_scale=1.0, verbosity=0, combine_grad=True, combine_ddp=True
    )
    for _ in range(6):
        optimizer.zero_grad()
        x = torch.full((1000,), rank + 1.0, device=device)
        with amp.scale_loss(model(x), optimizer) as loss:
            loss.backward()
        torch.cuda.synchronize()
        for p in (model.a, model.b):
            assert p.grad.eq(1.5).all(), p.grad


def _ddp(rank, device):
    """The same of DistributedDataParallel, where memory of the size of a bucket is written at once after the pass."""
    from apex.parallel import DistributedDataParallel

    model = DistributedDataParallel(TwoStreams().to(device), message_size=1)
    for _ in range(6):
        model.zero_grad()
        model(torch.full((1000,), rank + 1.0, device=device)).backward()
        with torch.cuda.stream(model.module.side):
            [torch.full((1002,), 7.0, device=device) for _ in range(20)]
        torch.cuda.synchronize()
        for p in model.parameters():
            assert p.grad.eq(1.5).all(), p.grad


class Overwrite(torch.autograd.Function):
    """Backward: writes memory of SIZE floats, all free blocks of that size, on the stream of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        [torch.full((SIZE,), 1e6, device=grad.device) for _ in range(6)]
        return grad


def _buckets(rank, device):
    """A bucket's memory is not written again while NCCL reads it for a rank that comes late."""
    from apex.contrib.optimizers import DistributedFusedAdam

    c, b, a = (nn.Parameter(torch.zeros(n, device=device)) for n in (16, 1 << 20, SIZE))
    optimizer = DistributedFusedAdam([c, b, a], lr=0.1, pipeline_size=1)
    for p in (a, b, c):
        optimizer.init_params_bucket([p])
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for step in range(4):
        optimizer.zero_grad()
        side.wait_stream(main)
        with torch.cuda.stream(side):  # the order is the reverse of the backward pass's: a, b, c
            of_c = Overwrite.apply((c * 1.0).sum())
        of_b = (b * 1.0).sum()
        with torch.cuda.stream(side):
            of_a = (a * 1.0).sum()
        main.wait_stream(side)
        loss = of_a + of_b + of_c
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 1:
            torch.cuda._sleep(6 * LONG)
        loss.backward()
        optimizer.grad_sync()
        torch.cuda.synchronize()
        number = optimizer.state[a]["fragments"][0].bucket_id
        shard = optimizer._gradients.buckets[number].shard
        assert (shard.min().item(), shard.max().item()) == (1.0, 1.0), (step, shard.min(), shard.max())


def _gathered_parameters(rank, device):
    """A stream that reads parameters first does not keep their values from the main stream."""
    from apex.contrib.optimizers import DistributedFusedAdam

    count = 1 << 20
    for overlap in (False, True):
        p = nn.Parameter(torch.zeros(count, device=device))
        optimizer = DistributedFusedAdam([p], lr=1.0, overlap_param_sync=overlap)
        side, main, copy = torch.cuda.Stream(), torch.cuda.current_stream(), torch.empty(count, device=device)
        for step in range(2):
            optimizer.zero_grad()
            p.sum().backward()
            optimizer.step()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(2 * LONG)
                copy.lerp_(p.detach(), 0.1)
            seen = (p * 1.0).mean()
            kept = [torch.full((count,), 7.0, device=device) for _ in range(8)]
            torch.cuda.synchronize()
            del kept
            for found in (seen.item(), p.detach().mean().item()):
                assert abs(found + step + 1) < 1e-3, (overlap, step, found)


class Fuse(nn.Module):
    """Raises in the backward pass while it is lit."""

    def __init__(self):
        super().__init__()
        self.lit = False

    def forward(self, x):
        x.register_hook(self._raise)
        return x

    def _raise(self, grad):
        if self.lit:
            raise ArithmeticError("on purpose")


def _idle_and_raising_ddp(rank, device):
    """A pass that reaches nothing counts as 0; one that raised is told at the end of the next; no rank hangs."""
    from apex.parallel import DistributedDataParallel

    torch.manual_seed(0)
    first, last = nn.Linear(5, 5), nn.Linear(5, 5)
    fuse = Fuse()
    model = DistributedDataParallel(nn.Sequential(first, fuse, last).to(device), message_size=1)

    def one_pass(raising=False, idle=False):
        model.zero_grad()
        x = torch.full((2, 5), rank + 1.0, device=device)
        fuse.lit = raising
        if idle:
            model.empty_backward()
        else:
            model(x).sum().backward()

    for _ in range(2):
        one_pass(idle=rank == 1)
        assert last.bias.grad.eq(1.0).all(), last.bias.grad  # 2 on one of two ranks
    told = []
    for step in range(6):
        try:
            one_pass(raising=rank == 1 and step == 2)
        except (ArithmeticError, RuntimeError) as error:
            told.append((step, type(error).__name__))
        if step != 2:
            assert last.bias.grad.eq(2.0).all(), (step, last.bias.grad)
    assert told == ([(3, "RuntimeError")] if rank == 0 else [(2, "ArithmeticError")]), told


def _idle_and_skipped_adam(rank, device):
    """Ranks that reach nothing, batches that are skipped, a parameter that thaws: the mean, and no rank hangs."""
    from apex.contrib.optimizers import DistributedFusedAdam

    params = [nn.Parameter(torch.zeros(300, device=device)) for _ in range(4)]
    params[2].requires_grad_(False)
    optimizer = DistributedFusedAdam(params, lr=0.1, bucket_cap_mb=0.001, pipeline_size=1)
    for step in range(6):
        params[2].requires_grad_(step > 2)
        optimizer.zero_grad()
        if step % 2:  # a batch that one rank alone has, and that is skipped
            if rank == 0:
                sum((p * 1000.0).sum() for p in params if p.requires_grad).backward()
            optimizer.zero_grad()
        if rank == step % 2:
            sum((p * 2.0).sum() for p in params if p.requires_grad).backward()
        trained = sum(p.numel() for p in params if p.requires_grad)
        norm = optimizer.grad_norm().item()
        assert abs(norm - trained**0.5) < 1e-3 * norm, (step, norm)
        optimizer.step()
    assert params[0].lt(0).all() and params[2].lt(0).all()


CASES = {
    "combine_ddp": _combine_ddp,
    "ddp": _ddp,
    "buckets": _buckets,
    "gathered_parameters": _gathered_parameters,
    "idle_and_raising_ddp": _idle_and_raising_ddp,
    "idle_and_skipped_adam": _idle_and_skipped_adam,
}
ON_ONE_GPU = ("combine_ddp",)  # with two processes on gloo
