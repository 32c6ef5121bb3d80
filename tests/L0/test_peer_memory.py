"""Peer memory and the exchange of halos through it: processes of a CPU, of one GPU, of two."""

from __future__ import annotations

import os

import peer_ranks
import pytest
import sharded_adam
import spatial_ranks
import torch
import torch.distributed as dist

from apex._loader.errors import ArgumentError, PeerMemoryError
from apex.contrib.peer_memory import _memory

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")


def run_on_one_gpu(rank, ranks, folder):
    """Two processes share a card: each waits while the other one runs. gloo, since NCCL refuses that."""
    torch.cuda.set_device(0)
    sharded_adam.run(rank, ranks, folder, {}, "peer_ranks")


def run_on_two_gpus(rank, ranks, folder):
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    sharded_adam.start_nccl(rank, ranks, folder)
    sharded_adam.run_cases("peer_ranks", None, rank, folder)


@pytest.fixture(
    scope="module",
    params=[
        "2-cpu",
        "4-cpu",
        pytest.param("one gpu", marks=pytest.mark.gpu),
        pytest.param("two gpus", marks=pytest.mark.two_gpus),
    ],
)
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    if request.param.endswith("cpu"):
        return sharded_adam.results_of(int(request.param[0]), "cpu", folder, "peer_ranks")
    return sharded_adam.results_on_gpus(
        run_on_one_gpu if request.param == "one gpu" else run_on_two_gpus, folder
    )


@pytest.mark.parametrize("case", peer_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"


def run_spatial(rank, ranks, folder):
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    sharded_adam.start_nccl(rank, ranks, folder)
    torch.backends.cudnn.allow_tf32 = False
    sharded_adam.run_cases("spatial_ranks", None, rank, folder)


@pytest.fixture(scope="module")
def spatial_results(tmp_path_factory):
    return sharded_adam.results_on_gpus(run_spatial, tmp_path_factory.mktemp("spatial"))


@pytest.mark.two_gpus
@pytest.mark.parametrize("case", spatial_ranks.CASES)
def test_spatial_bottleneck_on_gpus(spatial_results, case):
    """The layer and all exchangers on two GPUs, streams beside each other included."""
    for rank, result in enumerate(spatial_results):
        assert not result[case], f"rank {rank}: {result[case]}"


CPU = torch.device("cpu")


def test_memory_of_the_cpu():
    """Zeroed; a handle opens the same bytes; what is freed lives as long as its tensors; wrong handles are named."""
    raw = _memory.allocate(CPU, 1000)
    handle = _memory.handle(raw)
    other = _memory.opened(CPU, 1000, handle)
    one, same = (_memory.view(a, [2, 5], torch.float32, False) for a in (raw, other))
    assert other != raw and same.eq(0).all()
    one.fill_(3.0)
    assert same.eq(3.0).all()
    _memory.free(raw)
    _memory.free(other)
    assert one.eq(3.0).all() and same.eq(3.0).all()
    for broken in (handle, bytes(64)):
        with pytest.raises(PeerMemoryError, match="cannot be opened(?s:.*)HaloExchangerSendRecv"):
            _memory.opened(CPU, 1000, broken)
    with pytest.raises(ArgumentError, match="begins at the address"):
        _memory.free(raw)


def test_a_handle_of_another_file_is_not_opened():
    """Numbers of processes and files say nothing in another container: the file's own name does."""
    raw = _memory.allocate(CPU, 64)
    other = _memory.allocate(CPU, 64)
    first, second = _memory.handle(raw), _memory.handle(other)
    forged = first[:8] + second[8:16] + first[16:]
    with pytest.raises(PeerMemoryError, match="another file"):
        _memory.opened(CPU, 64, forged)
    for address in (raw, other):
        _memory.free(address)


def test_views_take_four_dimensions_for_channels_last():
    raw = _memory.allocate(CPU, 64)
    with pytest.raises(ArgumentError, match="channels_last takes 4 dimensions, not 2"):
        _memory.view(raw, [2, 2], torch.float32, True)
    _memory.free(raw)
