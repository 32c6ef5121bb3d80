"""DistributedFusedLAMB: one process; two and four on gloo; a rank that ends; a GPU, and two on NCCL."""

from __future__ import annotations

import datetime
import os
import pathlib

import pytest
import sharded_adam
import torch
import torch.distributed as dist
import torch.multiprocessing
import zero_common
import zero_lamb
import zero_lamb_grid
from zero_common import agree, backward, clones, equal, parameters
from zero_lamb import HYPER, Oracle, make

from apex import amp
from apex.amp import AmpUsageError
from apex.contrib.optimizers import DistributedFusedLAMB
from apex.optimizers import FusedLAMB

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """How each case ended, by rank."""
    return sharded_adam.results_of(2, "cpu", tmp_path_factory.mktemp("two"), "zero_lamb")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return sharded_adam.results_of(4, "reference", tmp_path_factory.mktemp("four"), "zero_lamb_grid")


@pytest.mark.parametrize("case", zero_lamb.CASES)
def test_two_ranks(two, case):
    for rank, result in enumerate(two):
        assert not result[case], f"rank {rank}: {result[case]}"


@pytest.mark.parametrize("case", zero_lamb_grid.CASES)
def test_four_ranks(four, case):
    for rank, result in enumerate(four):
        assert not result[case], f"rank {rank}: {result[case]}"


@pytest.mark.parametrize("case", [case for case in zero_lamb.CASES if case not in zero_lamb.SEVERAL])
def test_alone(alone, case):
    zero_lamb.CASES[case](None)


@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=1.0), dict(e5m2_allgather=True)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_variants(alone, variant, dtype, options):
    params = parameters(dtype, device=variant.device)
    optimizer = make(params, **options)
    oracle = Oracle(params, max_grad_norm=options.get("max_grad_norm", 0.0))
    for seed in range(2):
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.step()
        oracle.step(seed)
    saved = optimizer.state_dict()["state"]
    for key, value in enumerate(oracle.values):
        agree(saved[key]["param"], value, 1e-5 if dtype == F32 else 1e-2, 1e-5 if dtype == F32 else 1e-2)
    if variant.simt:
        launches = [n for name, n in variant.kernels.items() if "lamb_stage" in name]
        assert sum(launches) == 4  # two a step and group
        # Of a step, that of its gradients: the first of the two measures parameters and updates.
        assert sum(n for name, n in variant.kernels.items() if "l2norm" in name) == 2


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_one_rank_is_fused_lamb(alone, variant, limit):
    """Where each parameter lies in one bucket, sums are taken in the same order."""
    params = parameters(F32, device=variant.device)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = make(params, max_grad_norm=limit, dwu_num_blocks=1, dwu_num_chunks=1)
    other = FusedLAMB(twins, **HYPER, max_grad_norm=limit)
    for seed in range(3):
        optimizer.zero_grad()
        backward(params, seed)
        backward(twins, seed)
        optimizer.step()
        other.step()
        other.zero_grad()
    for p, q in zip(params, twins, strict=True):
        agree(p, q, 5e-7, 5e-7)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(lr=-1.0), ValueError),
        (dict(betas=(1.0, 0.9)), ValueError),
        (dict(max_grad_norm=-1.0), ValueError),
        (dict(dwu_num_blocks=0), ValueError),
        (dict(dwu_num_rs_pg=0), ValueError),
        (dict(dwu_group_size=3), RuntimeError),
        (dict(e5m2_allgather=True, set_param_views_to_flat_buffer=True), RuntimeError),
    ],
    ids=str,
)
def test_options_that_are_refused(alone, options, error):
    with pytest.raises(error):
        make(parameters(), **options)


def test_parameters_that_are_refused(alone):
    with pytest.raises(TypeError, match="float64"):
        make([torch.nn.Parameter(torch.zeros(3, dtype=torch.float64, device="cpu"))])
    with pytest.raises(ValueError, match="public apex"):
        make(parameters()).load_state_dict(dict(step=1, fp32_p=torch.zeros(3, dtype=F32, device="cpu")))


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        DistributedFusedLAMB(parameters())


def test_amp_is_refused(alone):
    model = torch.nn.Linear(2, 2, dtype=F32, device="cpu")
    with pytest.raises(AmpUsageError, match="GradScaler"):
        amp.initialize(model, make(model.parameters()), verbosity=0)


def test_torch_unscale_is_refused(alone):
    params = parameters()
    optimizer, scaler = make(params), torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros((), dtype=F32, device="cpu"))
    backward(params, 0)
    before = clones(params)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_grads\(grad_scaler=scaler\)"):
        scaler.step(optimizer)
    equal(clones(params), before)


def _ends(rank, ranks, folder):
    """The last rank ends after the first step; the others are told."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    params = parameters()
    optimizer = make(params)
    for seed in range(2):
        optimizer.zero_grad()
        backward(params, seed)
        if seed and rank == ranks - 1:
            os._exit(0)
        told = ""
        try:
            optimizer.step()
        except RuntimeError as error:
            told = str(error)
        pathlib.Path(folder, f"told{rank}-{seed}").write_text(told)
    os._exit(0)


def test_a_rank_that_ends(tmp_path):
    torch.multiprocessing.spawn(_ends, (2, str(tmp_path)), nprocs=2)
    assert not (tmp_path / "told0-0").read_text()
    assert "a rank ended" in (tmp_path / "told0-1").read_text()


# ---- GPUs ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_in_a_cuda_graph(alone, monkeypatch):
    """Reductions, norms, flag and step of one rank are captured; replays read what lies on the device."""
    monkeypatch.setattr(zero_common, "DEVICE", "cuda")
    params = parameters()
    optimizer, oracle = make(params, max_grad_norm=1.0), Oracle(params, max_grad_norm=1.0)
    grads = [torch.zeros_like(p) for p in params]

    def step():
        optimizer.zero_grad()
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for seed in range(2):
            torch._foreach_copy_(grads, zero_common.gradients(params, seed, 0))
            step()
            oracle.step(seed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(2, 5):
        torch._foreach_copy_(grads, zero_common.gradients(params, seed, 0))
        graph.replay()
        oracle.step(seed)
    grads[1].fill_(float("inf"))
    before = clones(params)
    graph.replay()
    equal(clones(params), before)
    oracle.check()
    assert int(optimizer.state["step"]) == 5


def _on_gpus(rank, ranks, folder):
    home = sharded_adam.start_nccl(rank, ranks, folder)
    zero_common.DEVICE = f"cuda:{home.index}"
    torch.set_default_device("cpu")  # where the cases draw their numbers
    sharded_adam.run_cases("zero_lamb", None, rank, folder)


@pytest.mark.two_gpus
def test_two_gpus(tmp_path):
    """Every case of two ranks, on NCCL."""
    for rank, result in enumerate(sharded_adam.results_on_gpus(_on_gpus, tmp_path)):
        failed = {case: told for case, told in result.items() if told}
        assert not failed, f"rank {rank}: {failed}"
