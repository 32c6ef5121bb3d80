"""What each rank of test_fused_adam_sharded.py runs: FusedAdam over parameters that FSDP2 shards, on gloo."""

from __future__ import annotations

import copy
import datetime
import importlib
import json
import os
import pathlib
import time
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from apex._loader import bindings
from apex.optimizers import FusedAdam

HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)


def ask_as_nccl():
    """From here on torch's collectives refuse tensors that are not contiguous, as NCCL does and gloo does not."""
    c10d = dist.distributed_c10d

    def lies_whole(one):
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        of = formats.get(one.dim(), torch.contiguous_format)
        return one.is_contiguous() or one.is_contiguous(memory_format=of)

    def asking(check, tensors_of):
        def ask(given, name):
            check(given, name)
            if not all(map(lies_whole, tensors_of(given))):
                raise ValueError(f"{name}: tensors must be contiguous")

        return ask

    for name, tensors_of in (("_check_single_tensor", lambda one: [one]), ("_check_tensor_list", list)):
        if hasattr(c10d, name):
            setattr(c10d, name, asking(getattr(c10d, name), tensors_of))


def run(rank, ranks, folder, environment, module=__name__):
    """One rank: every case of a module, and a file that says how each ended ("" is well)."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    ask_as_nccl()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    run_cases(module, init_device_mesh("cpu", (ranks,)), rank, folder)


def start_nccl(rank, ranks, folder, **options):
    """The GPU of this rank, on which tensors are made from now on; the ranks are connected by NCCL."""
    home = torch.device("cuda", rank)
    torch.cuda.set_device(home)
    torch.set_default_device(home)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
        **options,
    )
    return home


def shorten(group, seconds=2):
    """From here on the ranks of a gloo group, and of groups made like it, wait so long for each other's collectives.

    Groups are made with more time: ranks of a busy machine come to a start many seconds after each other.
    """
    gloo = group if isinstance(group, dist.ProcessGroupGloo) else group._get_backend(torch.device("cpu"))
    gloo._set_default_timeout(datetime.timedelta(seconds=seconds))


def run_cases(module, mesh, rank, folder):
    """Every case of a module, which gets the mesh, and a file that says how each ended. Ends the process.

    What each took is printed, so that a run that is cut off tells where it was.
    """
    results = {}
    for name, case in importlib.import_module(module).CASES.items():
        results[name], begin = "", time.monotonic()
        try:
            case(mesh)
        except Exception:
            results[name] = traceback.format_exc()
        how = "failed" if results[name] else "passed"
        print(f"rank {rank}: {name} {how} in {time.monotonic() - begin:.1f} s", flush=True)
    (pathlib.Path(folder) / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # now and then a thread of torch's still runs while a group ends, which aborts the process


def results_of(ranks, variant, folder, module=__name__):
    """How each case of a module ended, by rank; skips where nothing native is here to be asked for."""
    if variant == "cpu" and not bindings.load().native:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    torch.multiprocessing.spawn(run, (ranks, str(folder), {"APEX_VARIANT": variant}, module), nprocs=ranks)
    return _read(ranks, folder)


def results_on_gpus(run, folder):
    """The same of run(rank, 2, folder) on two GPUs."""
    torch.multiprocessing.spawn(run, (2, str(folder)), nprocs=2)
    return _read(2, folder)


def cases_on_two_gpus(run, cases):
    """A module's fixture and test, to be called `results` and `test_nccl`: each case of run, as of results_on_gpus."""

    @pytest.fixture(scope="module")
    def results(tmp_path_factory):
        """How each case ended, by rank."""
        return results_on_gpus(run, tmp_path_factory.mktemp("nccl"))

    @pytest.mark.two_gpus
    @pytest.mark.parametrize("case", cases)
    def test_nccl(results, case):
        for rank, result in enumerate(results):
            assert not result[case], f"rank {rank}: {result[case]}"

    return results, test_nccl


def _read(ranks, folder):
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _models(mesh, dtype=torch.float32):
    """(sharded, whole) with the same weights. No size divides by the ranks, and one leaves a rank empty."""
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).to(dtype)
    sharded = copy.deepcopy(whole)
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return sharded, whole


def _train(model, optimizer, seeds, dtype=torch.float32):
    """The same batch on every rank, so that the mean of their gradients is each one's."""
    for seed in seeds:
        x = torch.randn(
            8, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
        ).to(dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _check_same(sharded, whole, tolerance):
    for (name, p), q in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(p, DTensor)
        torch.testing.assert_close(
            p.full_tensor(), q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


def _parity(mesh, **options):
    sharded, whole = _models(mesh)
    optimizer = FusedAdam(sharded.parameters(), **HYPER, **options)
    oracle = torch.optim.AdamW(whole.parameters(), **HYPER)
    _train(sharded, optimizer, range(5))
    _train(whole, oracle, range(5))
    _check_same(sharded, whole, 1e-6)
    for p in sharded.parameters():
        moment = optimizer.state[p]["exp_avg"]
        assert isinstance(moment, DTensor) and moment.placements == p.placements
        assert moment.to_local().shape == p.to_local().shape
    assert int(optimizer.param_groups[0]["step"]) == 5


def _masters(mesh):
    sharded, whole = _models(mesh, torch.bfloat16)
    optimizer = FusedAdam(sharded.parameters(), **HYPER, master_weights=True)
    other = FusedAdam(whole.parameters(), **HYPER, master_weights=True)
    _train(sharded, optimizer, range(5), torch.bfloat16)
    _train(whole, other, range(5), torch.bfloat16)
    _check_same(sharded, whole, 1e-2)
    for p in sharded.parameters():
        master = optimizer.state[p]["master_param"].to_local()
        assert master.dtype == torch.float32
        assert torch.equal(p.to_local(), master.to(torch.bfloat16))


def _resume(mesh):
    sharded, whole = _models(mesh)
    optimizer = FusedAdam(sharded.parameters(), **HYPER)
    _train(sharded, optimizer, range(5))
    again, _ = _models(mesh)
    first = FusedAdam(again.parameters(), **HYPER)
    _train(again, first, range(3))
    resumed = FusedAdam(again.parameters(), **HYPER)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    _train(again, resumed, range(3, 5))
    for p, q in zip(sharded.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
        for name in ("exp_avg", "exp_avg_sq"):
            a, b = optimizer.state[p][name], resumed.state[q][name]
            assert isinstance(b, DTensor) and torch.equal(a.to_local(), b.to_local())


def _replicated_gradient(mesh):
    """A gradient that lies on every rank as a whole, as a user's own collective leaves it."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    full = torch.arange(10.0, dtype=torch.float32, device="cpu").view(5, 2)
    p = torch.nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
    q = torch.nn.Parameter(full.clone())
    optimizer, oracle = FusedAdam([p], **HYPER), torch.optim.AdamW([q], **HYPER)
    gradient = torch.randn(
        5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu"
    )
    p.grad = distribute_tensor(gradient, mesh, [Replicate()])
    q.grad = gradient
    for _ in range(2):
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(p.full_tensor(), q, rtol=1e-6, atol=1e-6)


CASES = {
    "parity": _parity,
    "capturable": lambda mesh: _parity(mesh, capturable=True),
    "masters": _masters,
    "resume": _resume,
    "replicated_gradient": _replicated_gradient,
}
