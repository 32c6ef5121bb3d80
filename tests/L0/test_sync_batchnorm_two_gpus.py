"""SyncBatchNorm over two GPUs with NCCL, and on streams and in CUDA graphs of one."""

from __future__ import annotations

import lists
import pytest
import sharded_adam
import sync_batchnorm_ranks
import torch
from lists import F16, F32

from apex.parallel import SyncBatchNorm

pytestmark = pytest.mark.gpu

results, test_nccl = sharded_adam.cases_on_two_gpus(
    sync_batchnorm_ranks.run_on_gpus, sync_batchnorm_ranks.CASES
)


def _step(layer, x, gradient):
    # Nothing that is returned keeps the graph: its leaves' nodes belong to the stream on which it was made.
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], gradient)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["", "channels_last"])
def test_graph(format):
    """Capture, replays with other values, eager steps between them, and a second graph beside the first."""
    layer = SyncBatchNorm(64).cuda()
    batches = [
        lists.random(F16, "cuda", ((16, 64, 28, 28),), seed=s)[0].contiguous(memory_format=format)
        for s in range(6)
    ]
    gradient = lists.random(F16, "cuda", ((16, 64, 28, 28),), seed=9)[0].contiguous(memory_format=format)
    wanted = [_step(layer, x.requires_grad_(), gradient) for x in batches]
    x = batches[0].detach().clone(memory_format=torch.preserve_format).requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _step(layer, x, gradient)
    torch.cuda.current_stream().wait_stream(side)
    graphs, found = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            found.append(_step(layer, x, gradient))
    for i, values in enumerate(batches):
        with torch.no_grad():
            x.copy_(values)
        graphs[i % 2].replay()
        lists.assert_same_bits(found[i % 2], wanted[i])
        lists.assert_same_bits(_step(layer, batches[i], gradient), wanted[i])


def test_streams_beside_each_other():
    """Two streams reduce at once; each has its own counters."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    tensors = [lists.random(F32, "cuda", ((32, 64, 28, 28),), seed=s)[0] for s in range(2)]
    wanted = [torch.ops.apex.welford_mean_var(x) for x in tensors]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for stream, x in zip(streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                found.append(torch.ops.apex.welford_mean_var(x))
    torch.cuda.synchronize()
    for i, statistics in enumerate(found):
        lists.assert_same_bits([statistics], [wanted[i % 2]])


def test_nothing_waits_for_the_device():
    layer = SyncBatchNorm(64, momentum=None).cuda()
    x = torch.randn(8, 64, 7, 7, device="cuda", requires_grad=True, dtype=F32)
    layer(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
