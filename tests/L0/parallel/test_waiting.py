"""Waiting for other ranks: what is told as a rank that is not there, and what passes as it is."""

from __future__ import annotations

import ast
import datetime
import os
import pathlib
import re

import pytest
import torch
import torch.distributed as dist
from sharded_adam import shorten

import apex
from apex.contrib.optimizers._ranks import waiting_for_ranks
from apex.parallel._waiting import CALLS, waiting

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
APEX = pathlib.Path(apex.__file__).parent
TESTS = pathlib.Path(__file__).parents[2]


@pytest.fixture(params=["plain", "DistributedFusedAdam"])
def context(request, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda *arguments: 3)
    return {
        "plain": lambda: waiting("a thing"),
        "DistributedFusedAdam": lambda: waiting_for_ranks("a thing"),
    }[request.param]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("No backend type associated with device type cpu"),
        NotImplementedError("no such op"),
        ValueError("no rank"),
    ],
)
def test_other_errors_pass_as_they_are(context, error):
    """DistributedFusedAdam told every RuntimeError as a missing rank."""
    with pytest.raises(type(error)) as caught, context():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error: reset by peer"),
        RuntimeError("Timed out waiting 2000ms for send operation to complete"),
        RuntimeError("Connection closed by peer [127.0.0.1]:41231"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1"),
        dist.DistNetworkError("the client socket has failed"),
    ],
)
def test_a_missing_rank_is_told(context, error):
    with (
        pytest.raises(
            RuntimeError, match="rank 3 waited in vain for the other ranks' part of a thing"
        ) as caught,
        context(),
    ):
        raise error
    assert caught.value.__cause__ is error


def test_who_and_why(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda *arguments: 0)
    said = "^Somebody: rank .*: a rank ended, or did not make this call"
    with pytest.raises(RuntimeError, match=said), waiting("x", CALLS, "Somebody"):
        raise RuntimeError("Timed out")


def _one_rank(rank, folder):
    """A rank that never comes: a real time-out of gloo's."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    shorten(dist.group.WORLD)
    if rank == 0:
        flat = torch.zeros(3, dtype=torch.float32, device="cpu")
        with (
            pytest.raises(RuntimeError, match="in vain for the other ranks' part of a thing"),
            waiting("a thing"),
        ):
            dist.all_reduce(flat)
    os._exit(0)  # now and then a thread of torch's still runs while a group ends, which aborts the process


def test_real_errors_of_gloo(tmp_path):
    torch.multiprocessing.spawn(_one_rank, (str(tmp_path),), nprocs=2)


COLLECTIVES = {
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter", "gather_object", "new_group",
    "_reduce_scatter", "_all_gather", "_gather_into", "barrier", "all_gather_object", "broadcast_object_list",
}  # fmt: skip
SPOKEN_BY_CALLERS = {"_gather_into", "_make_groups"}  # functions whose every call stands within waiting()


def _naked(tree, within=False, function=""):
    """Calls of collectives that stand in no waiting(), of a module's tree."""
    for node in ast.iter_child_nodes(tree):
        waits = within
        if isinstance(node, ast.With):
            waits |= any("waiting" in ast.unparse(item.context_expr) for item in node.items)
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            own = isinstance(node.func, ast.Name) or ast.unparse(node.func).startswith(
                ("dist.", "distributed.", "torch.distributed.")
            )
            if name in COLLECTIVES and own and not within and function not in SPOKEN_BY_CALLERS:
                yield f"{ast.unparse(node.func)} in {function}"
        inside = node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else function
        yield from _naked(node, waits, inside)


def test_every_collective_says_what_it_waits_for():
    found = {}
    for path in APEX.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "torch.distributed" in text and (naked := list(_naked(ast.parse(text)))):
            found[str(path.relative_to(APEX))] = naked
    assert not found


LITTLE = 30  # seconds, by which ranks of a busy machine may come to a start after each other


def _hurried(path):
    """Calls that make process groups with less time than that."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("init_process_group", "new_group")
        ):
            timeout = next((ast.unparse(k.value) for k in node.keywords if k.arg == "timeout"), "")
            seconds = re.search(r"seconds=([\d.]+)", timeout)
            if seconds and float(seconds[1]) < LITTLE:
                yield f"{path.name}: {ast.unparse(node.func)} in {seconds[1]} s"


def test_groups_are_made_with_time():
    """What is to time out is made short afterwards, by `shorten`."""
    assert not [found for path in TESTS.rglob("*.py") for found in _hurried(path)]
