"""Cases of test_distributed.py: each option of DistributedDataParallel by what it does."""

from __future__ import annotations

import functools
import warnings

import torch
import torch.distributed as dist
from ddp_common import (
    Probe,
    close,
    collectives,
    grads,
    loss_of,
    messages,
    mine,
    network,
    raises,
    rows,
    same_on_all_ranks,
)
from torch import nn

from apex.parallel import DistributedDataParallel as DDP


def _parity(mesh, passes=3, **options):
    """The same gradients as one process has with the whole batch."""
    whole = network(seed=0)
    model = network(seed=dist.get_rank())  # rank 0's parameters are broadcast
    ddp = DDP(model, **{"message_size": 20, **options})
    close(model.parameters(), whole.parameters(), 0)
    for step in range(passes):
        ddp.zero_grad()
        whole.zero_grad()
        loss_of(ddp(mine(rows(step)))).backward()
        loss_of(whole(rows(step))).backward()
        close(grads(model), grads(whole))
        same_on_all_ranks(grads(model))
    return ddp


def _triggers(mesh):
    module = network()
    ddp = DDP(module, message_size=1, allreduce_trigger_params=[module[2].weight])
    messages(ddp)
    # Gradients come from the last layer to the first, of a layer's parameters in an order of the engine's.
    for calls in (messages(ddp, 1), messages(ddp, 2)):
        sent = sum(p.numel() for p in module.parameters()) + 6 + 2 * 3  # flags of presence, and two statuses
        assert len(calls) == 2 and sum(n for n, *_ in calls) == sent
    assert ddp._live.bucket_of[id(module[2].weight)] == ddp._live.bucket_of[id(module[4].weight)] == 0
    assert ddp._live.bucket_of[id(module[0].weight)] == 1


def _message_size(mesh):
    small, large = DDP(network(), message_size=1), DDP(network())
    for ddp, count in ((small, 6), (large, 1)):
        assert len(messages(ddp)) == 1  # one for each dtype, until the order is known
        for step in range(1, 3):
            assert len(messages(ddp, step)) == count
    medium = DDP(network(), message_size=40)
    messages(medium)
    *full, last = messages(medium, 1)
    assert len(full) >= 1 and all(n >= 40 for n, *_ in full), full


def _overlaps(mesh):
    """From the second pass on, the last layer's gradients are on their way before the first layer's exist."""
    for options, expected in (({}, [False, True, True]), ({"delay_allreduce": True}, [False] * 3)):
        module, probe = network(), Probe()
        ddp = DDP(nn.Sequential(module[0], probe, *module[1:]), 1, **options)
        for step, overlaps in enumerate(expected):
            seen = []
            with collectives() as calls:
                probe.call = functools.partial(_count, calls, seen)
                loss_of(ddp(mine(rows(step)))).backward()
            assert (seen[0] > 0) == overlaps, (options, step, seen)
            assert len(calls) > seen[0]


def _count(calls, seen):
    seen.append(len(calls))


def _retained(mesh):
    ddp = _parity(mesh, retain_allreduce_buffers=True)
    assert len(ddp.allreduce_buffers) == len(ddp._live.buckets) > 1
    for buffer, bucket in zip(ddp.allreduce_buffers, ddp._live.buckets, strict=True):
        assert torch.equal(buffer, torch.cat([p.grad.reshape(-1) for p in bucket.params]))
        buffer.fill_(7.0)
        assert all((p.grad == 7.0).all() for p in bucket.params)
    _parity(mesh, retain_allreduce_buffers=True, delay_allreduce=True)
    assert DDP(network()).allreduce_buffers == []


def _large_gradients(mesh, **options):
    """The gradient of a float16 parameter that is 20000 on each rank; the sum of four is past float16."""
    weight = nn.Linear(1, 1, bias=False).to(torch.float16)
    ddp = DDP(weight, **options)
    with collectives() as calls:
        (ddp(torch.full((1, 1), 100.0, dtype=torch.float16)) * 200.0).sum().backward()
    return weight.weight.grad.item(), calls[0][1]


def _always_fp32(mesh):
    ranks = dist.get_world_size()
    assert _large_gradients(mesh, allreduce_always_fp32=True) == (20000.0, torch.float32)
    found, dtype = _large_gradients(mesh)
    assert dtype == torch.float16
    assert found == (20000.0 if ranks < 4 else float("inf"))
    module = nn.Linear(3, 3).double()  # what is wider than float32 stays
    ddp = DDP(module, allreduce_always_fp32=True)
    with collectives() as calls:
        ddp(torch.ones(1, 3).double()).sum().backward()
    assert calls[0][1] == torch.float64


def _factors(mesh):
    ranks = dist.get_world_size()
    assert _large_gradients(mesh, gradient_predivide_factor=float(ranks))[0] == 20000.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _large_gradients(mesh, gradient_average_split_factor=float(ranks))[0] == 20000.0
    assert any("gradient_predivide_factor" in str(w.message) for w in caught)
    _parity(mesh, gradient_predivide_factor=3.0)
    for options, factor in (
        (dict(gradient_average=False), 1.0),
        (dict(gradient_average=False, gradient_predivide_factor=4.0), 0.25),
        (dict(gradient_average=False, delay_allreduce=True), 1.0),
    ):
        module, whole = network(), network()
        ddp = DDP(module, 20, **options)
        loss_of(whole(rows())).backward()
        for _ in range(2):
            messages(ddp)
            close(grads(module), [g * ranks * factor for g in grads(whole)])


def _streams(mesh):
    """Process groups take turns: two that it makes itself, two that are given."""
    ddp = _parity(mesh, num_allreduce_streams=2)
    groups = [group for *_, group in messages(ddp)]
    assert len(set(groups)) == 2 and None not in groups
    assert groups == [groups[i % 2] for i in range(len(groups))]
    given = [dist.new_group() for _ in range(2)]
    ddp = _parity(mesh, num_allreduce_streams=2, allreduce_communicators=(given, [None, None]))
    assert {group for *_, group in messages(ddp)} == set(given)


def _prof(mesh):
    from torch.profiler import ProfilerActivity, profile

    names = []
    for prof in (True, False):
        ddp = DDP(network(), 20, prof=prof)
        messages(ddp)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            messages(ddp)
        names.append({event.key for event in trace.key_averages()})
    ours = {"forward pass DDP logic", "allreduce_hook", "comm_ready_buckets", "allreduce_epilogue"}
    assert ours <= names[0] and not ours & names[1]


def _by_hand(mesh):
    """What public apex's hooks call, called by the script instead."""
    for options in (dict(), dict(retain_allreduce_buffers=True), dict(gradient_predivide_factor=2.0)):
        whole = network()
        loss_of(whole(rows())).backward()
        wanted = grads(whole)
        ddp = DDP(network(), num_allreduce_streams=2, **options)
        ddp.disable_allreduce()

        def own_gradients(ddp=ddp):
            ddp.zero_grad()
            loss_of(ddp(mine(rows()))).backward()
            return grads(ddp)

        own_gradients()
        ddp.allreduce_fallback()
        close(grads(ddp), wanted)
        bucket = own_gradients()
        kept = [grad.clone() for grad in bucket]
        flat = ddp.allreduce_bucket(bucket, 1, False)
        close([flat], [torch.cat([grad.reshape(-1) for grad in wanted])])
        close(bucket, kept if ddp.retain_allreduce_buffers else wanted)
        bucket = own_gradients()
        ddp.allreduce_maybe_retain(bucket, 1, force_default_stream=True)
        close(bucket, wanted)
        if ddp.retain_allreduce_buffers:
            assert bucket[0].data_ptr() == ddp.allreduce_buffers[1].data_ptr()

    halves = DDP(network(dtype=torch.float16), allreduce_always_fp32=True)
    bucket = [torch.full((2,), 6e4, dtype=torch.float16)]  # the sum is beyond float16
    assert halves.allreduce_bucket(bucket, 0, True).eq(6e4).all() and bucket[0].eq(6e4).all()


def _refused(mesh):
    for options, word in (
        (dict(shared_param=True), "delay_allreduce=True"),
        (dict(delay_allreduce=True, num_allreduce_streams=2), "num_allreduce_streams"),
        (dict(delay_allreduce=True, allreduce_trigger_params=[]), "allreduce_trigger_params"),
        (dict(gradient_predivide_factor=0.0), "above 0"),
        (dict(allreduce_communicators=([None], [None])), "num_allreduce_streams"),
        (dict(allreduce_communicators=([None], [None]), num_allreduce_streams=2), "got 1 and 1"),
    ):
        with raises(ValueError, word):
            DDP(network(), **options)
    with raises(RuntimeError, "the same module on every rank"):
        DDP(nn.Linear(2, 2 + dist.get_rank()))
    with raises(RuntimeError, "no shape yet"):
        DDP(nn.LazyLinear(2))
    sparse = DDP(nn.Embedding(4, 2, sparse=True))
    with raises(TypeError, "weight", "sparse=True"):
        sparse(torch.tensor([1])).sum().backward()


def _parity_with(**options):
    return lambda mesh: _parity(mesh, **options)


CASES = {
    "parity": _parity,
    "parity_delayed": _parity_with(delay_allreduce=True),
    "parity_one_bucket": _parity_with(message_size=10**6),
    "parity_bucket_each": _parity_with(message_size=1),
    "parity_prof": _parity_with(prof=True),
    "message_size": _message_size,
    "triggers": _triggers,
    "overlaps": _overlaps,
    "retained": _retained,
    "always_fp32": _always_fp32,
    "factors": _factors,
    "streams": _streams,
    "prof": _prof,
    "by_hand": _by_hand,
    "refused": _refused,
}
