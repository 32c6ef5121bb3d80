"""Models on several streams, and ranks without work on GPUs: recorded on made-up streams here, on two GPUs for real."""

from __future__ import annotations

import contextlib
import json
import types

import gpu_streams
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from stream_races import Device, Races
from torch import nn

from apex.amp._combined import ddp, parts
from apex.contrib.optimizers import DistributedFusedAdam, _ranks
from apex.parallel import _reduction, distributed

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")


@pytest.fixture
def races(monkeypatch):
    """A Races on made-up streams, to which torch's streams and collectives go."""
    device = Device()
    races = Races(device)
    monkeypatch.setattr(torch, "get_device_module", lambda of: device)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: races.record(tensor, stream))

    def all_reduce(tensor, op=None, group=None, async_op=False):
        return races.collective([tensor], [tensor])

    def reduce_scatter(shard, whole, op=None, group=None, async_op=False):
        call = contextlib.nullcontext if shard.is_meta else lambda: shard.copy_(whole[: shard.numel()])
        return races.collective([whole], [shard], call)

    def all_gather(whole, shard, group=None, async_op=False):
        return races.collective([shard], [whole], lambda: whole.view(2, -1).copy_(shard))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(_ranks, "_reduce_scatter", reduce_scatter)
    monkeypatch.setattr(_ranks, "_all_gather", all_gather)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield races
    dist.destroy_process_group()


def _sides(races, count=2):
    """Streams that come after the main one."""
    sides = [races.device.Stream() for _ in range(count)]
    for side in sides:
        side.wait_stream(races.device.current)
    return sides


def _ends(races, sides):
    """As the engine at the end of a backward pass."""
    for side in sides:
        races.device.current.wait_stream(side)
    races.look_for_freed()


def test_the_recorder_finds_races(races):
    main, (side, other) = races.device.current, _sides(races)
    with races:
        x = torch.zeros(3)
        with races.device.stream(side):
            x.add_(1)  # not after its making: the streams waited before that
        side.wait_stream(main)
        with races.device.stream(other):
            y = torch.zeros(3)
        other_waits = races.found.copy()
        with races.device.stream(side):
            side.wait_stream(other)
            y.add_(1)
        del y
        races.look_for_freed()
        with races.device.stream(other):
            z = torch.zeros(3)
        with races.device.stream(side):
            side.wait_stream(other)
            z.add_(1)
        z.record_stream(side)
        del z
        races.look_for_freed()
    assert len(other_waits) == 2 and all("aten.add_" in race for race in other_waits)  # reads and writes
    assert len(races.found) == 3 and "free again" in races.found[2]


def test_slices_of_combined_gradients_wait_for_every_stream(races, monkeypatch):
    monkeypatch.setattr(ddp, "LEAST", 1)
    monkeypatch.setattr(ddp.Reducer, "_check_ranks_agree", lambda self, parts: None)
    params = [nn.Parameter(torch.zeros(60, device="meta")) for _ in range(6)]
    sides = _sides(races, 3)
    with races:
        part = parts.Part(params, None, [(0, 6)], False)
        _ends(races, ())
        for side in sides:
            side.wait_stream(races.device.current)
        reducer = ddp.Reducer(3, torch.device("meta"))
        reducer.attach([part])
        reducer._ordered = True
        assert len(reducer._slices) == 2
        reducer.start()
        for i in reversed(range(6)):
            with races.device.stream(sides[i % 3]):
                part.grads[i].add_(1)
                piece = next(s for s in reducer._slices if s.start <= i / 6 < s.start + 0.5)
                reducer._arrived(piece, i)
        assert len(reducer._works) == 1
        _ends(races, sides)
        while reducer._next < 2:
            reducer._send_next()
        reducer._wait()
        part.grad.mul_(2)  # what amp does next
    assert not races.found


def test_buckets_of_data_parallel_gradients(races, monkeypatch):
    """Gathered after every stream that writes gradients; their memory outlives what the side stream reads of it."""
    scale = lambda sources, targets, factor: torch._foreach_copy_(targets, sources)  # noqa: E731
    monkeypatch.setattr(_reduction, "_scale", scale)
    monkeypatch.setattr(_reduction, "_is_written_raw", lambda grad: grad is not None)
    monkeypatch.setattr(_reduction.Reduction, "check", lambda self, who, late: self.wait())
    monkeypatch.setattr(distributed._checks, "broadcast_parameters", lambda module: None)
    module = nn.ParameterList([nn.Parameter(torch.zeros(60, device="meta")) for _ in range(6)])
    ddp = distributed.DistributedDataParallel(module, message_size=120)
    live, params = ddp._live, list(module)
    live.set_buckets([params[4:], params[2:4], params[:2]], True)
    live.needs_refresh = False
    ddp._make_groups()
    monkeypatch.setattr(ddp, "_queue_epilogue", lambda: None)
    sides = _sides(races)
    with races:
        for _ in range(2):
            for side in sides:
                side.wait_stream(races.device.current)
            for i in reversed(range(6)):
                with races.device.stream(sides[i % 2]):
                    params[i].grad = torch.ones(60, device="meta")
                    ddp._gradient_ready(params[i])
            assert live.next == 2
            _ends(races, sides)
            ddp._epilogue(True)
            _ends(races, ())
            torch._foreach_mul_([p.grad for p in params], 2.0)
            for side in sides:
                side.wait_stream(races.device.current)
            for p in params:
                p.grad = None
    assert not races.found


class _Grid:
    """Two ranks that shard, of which this is the first."""

    def __init__(self, monkeypatch, optimizer):
        ranks = optimizer._ranks
        for name in ("count", "shards"):
            monkeypatch.setattr(ranks, name, 2)
        answer = types.SimpleNamespace(started=False, late=False, problem=None)
        monkeypatch.setattr(ranks, "ask", lambda *args, **kwargs: lambda: answer)
        monkeypatch.setattr(ranks, "sum_over_shards", lambda tensor: None)


def _sharded_adam(races, monkeypatch, params, **options):
    optimizer = DistributedFusedAdam(params, lr=0.1, **options)
    _Grid(monkeypatch, optimizer)
    optimizer.distributed_size = optimizer._layout._ranks = 2
    for part in (optimizer._gradients, optimizer._parameters):
        part._streams._module = races.device
    optimizer._gradients._on_host = False
    return optimizer


@pytest.mark.parametrize(
    "options", [{}, dict(overlap_param_sync=True), dict(contiguous_grad_buffer=True)], ids=str
)
@pytest.mark.parametrize("reads_first", [False, True], ids=["main", "side"])
def test_buckets_and_parameters_of_a_sharded_optimizer(races, monkeypatch, options, reads_first):
    """Gradients that come on two streams, in turn, and parameters that a side stream uses first."""
    params = [nn.Parameter(torch.zeros(60)) for _ in range(6)]
    optimizer = _sharded_adam(races, monkeypatch, params, pipeline_size=1, bucket_cap_mb=0.0002, **options)
    sides, hooks = _sides(races), [optimizer._make_post_backward_hook(p, 0, i) for i, p in enumerate(params)]
    with races:
        optimizer.init_params()
        assert len(optimizer.state["buckets"]) > 2
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            for side in sides:
                side.wait_stream(races.device.current)
            for i in reversed(range(6)):
                with races.device.stream(sides[i % 2]):
                    params[i].grad = torch.ones(60)
                    hooks[i]()
            _ends(races, sides)
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            for side in sides:
                side.wait_stream(races.device.current)
            with races.device.stream(sides[0] if reads_first else races.device.current):
                params[3].detach().mul(2)
            for p in params:
                p.detach().mul(2)  # the main stream, which waits for nobody
            optimizer.param_sync()
            optimizer.grad_norm(force=True)
            _ends(races, ())
    assert not races.found


# ---- for real -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """How each case ended on two GPUs with NCCL, by rank."""
    return _results_of(tmp_path_factory.mktemp("nccl"), "nccl", list(gpu_streams.CASES))


def _results_of(folder, backend, names):
    # A rank that a collective aborted has written which case it was; the others' results stand.
    with contextlib.suppress(torch.multiprocessing.ProcessExitedException):
        torch.multiprocessing.spawn(gpu_streams.run, (2, str(folder), backend, names), nprocs=2)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.alone
@pytest.mark.two_gpus
@pytest.mark.parametrize("case", gpu_streams.CASES)
def test_two_gpus(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", gpu_streams.ON_ONE_GPU)
def test_one_gpu(tmp_path, case):
    """Two processes on gloo."""
    for rank, result in enumerate(_results_of(tmp_path, "gloo", [case])):
        assert not result[case], f"rank {rank}: {result[case]}"
