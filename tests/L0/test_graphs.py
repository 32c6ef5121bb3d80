"""Every op of the library in graphs: traced by torch.compile, captured, and replayed by cudagraph trees.

What an op keeps between calls (counters, tables, scratch) must not lie in a graph's pool, nor be zeroed by a graph
alone. On a CPU the same samples run as one graph of aot_eager.
"""

from __future__ import annotations

import pytest
import torch
from op_samples import Call, assert_same, samples

from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.transducer import TransducerJoint
from apex.optimizers import FusedAdam
from apex.parallel import SyncBatchNorm

F32, I32 = torch.float32, torch.int32
EVERY = pytest.mark.parametrize(
    ("op", "index"), [(op, index) for op, index in samples() if index is not None]
)
WITH_GRAPHS = pytest.mark.parametrize(
    "how", (dict(backend="cudagraphs"), dict(mode="reduce-overhead")), ids=("cudagraphs", "reduce-overhead")
)


@pytest.fixture(autouse=True)
def nothing_compiled(exact_convolutions):
    """Each test compiles anew, and leaves no graph behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs_were_left_out():
    """How often torch ran a compiled function without a graph, since the counters were cleared."""
    return torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


def check_compiled(call, how, turns=4):
    """Compiled and eager calls by turns, each turn on other values."""
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(call, fullgraph=True, dynamic=False, **how)
    for turn in range(turns):
        torch.compiler.cudagraph_mark_step_begin()
        found = call.run(compiled, turn)
        assert_same(found, call.run(turn=turn))
    assert graphs_were_left_out() == 0


def test_every_op_has_a_sample():
    assert [op for op, index in samples() if index is None] == []


@EVERY
def test_as_one_graph(op, index):
    check_compiled(Call(op, index, "cpu"), dict(backend="aot_eager"), turns=2)


@pytest.mark.gpu
@WITH_GRAPHS
@EVERY
def test_under_cudagraph_trees(op, index, how):
    check_compiled(Call(op, index, "cuda"), how)


@pytest.fixture
def handles():
    """torch's own of cuBLAS and cuDNN: it makes them at a process's first product, which no capture allows."""
    x = torch.ones(1, 1, 1, 1, device="cuda")
    return x[0, 0] @ x[0, 0], torch.nn.functional.conv2d(x, x)


@pytest.mark.gpu
@pytest.mark.usefixtures("handles")
@EVERY
def test_captured(op, index):
    """Captured without a call before; eager calls before the first replay and between replays are right, and these."""
    call = Call(op, index, "cuda")
    static = [t.detach() for t in call.fresh()]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        results = call(*static)
    results = [x for x in results if isinstance(x, torch.Tensor)]
    with torch.no_grad():
        first = call.run()
    for turn in (0, 1, 2, 0):
        for own, value in zip(static, call.fresh(turn), strict=True):
            own.copy_(value.detach())
        graph.replay()
        with torch.no_grad():
            wanted = call.run(turn=turn)
        assert_same([x.clone() for x in results], wanted)
    assert_same(wanted, first)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "index"),
    [
        ("welford_mean_var", 0),
        ("welford_mean_var", 1),
        ("reduce_bn", 0),
        ("reduce_bn", 1),
        ("transducer_joint_backward", 0),
    ],
)
def test_graphs_beside_each_other(op, index):
    """Two graphs of one op, replayed on two streams at once, and eager calls on a third: none counts in another's."""
    call = Call(op, index, "cuda")
    wanted, graphs = call.run(), []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call(*call.tensors)
        graphs.append((graph, torch.cuda.Stream(), results))
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream, _ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        eager = call(*call.tensors)
    torch.cuda.synchronize()
    for found in (eager, *(results for _, _, results in graphs)):
        assert_same([x for x in found if isinstance(x, torch.Tensor)], wanted)


@pytest.mark.gpu
def test_a_step_is_captured_where_its_plan_is_made():
    """Eager steps before the first replay count from zero, whatever lay in the graph's memory."""
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20,), 0x7F7F7F7F, dtype=I32, device="cuda") for _ in range(64)]
    del junk
    torch.cuda.empty_cache()
    p = torch.nn.Parameter(torch.randn(300_000, dtype=F32, device="cuda"))
    optimizer = FusedAdam([p], lr=0.1, capturable=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())  # drops the plan
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = int(optimizer.param_groups[0]["step"])
    for _ in range(3):
        optimizer.step()
    assert int(optimizer.param_groups[0]["step"]) == before + 3
    graph.replay()
    optimizer.step()
    assert int(optimizer.param_groups[0]["step"]) == before + 5


# ---- modules -----------------------------------------------------------------------------------------------


def batch_norm(make):
    """(module, its peer of torch, shape) for a device."""

    def build(device):
        shape = (8, 64, 12, 12) if device == "cpu" else (64, 64, 56, 56)
        return make().to(device), torch.nn.BatchNorm2d(64, dtype=F32, device=device), [shape]

    return build


def joint(device):
    batch, frames, labels, hidden = (2, 20, 6, 32) if device == "cpu" else (2, 400, 60, 512)
    ours = TransducerJoint(relu=True)
    f_len, g_len = (torch.full((batch,), n, dtype=I32, device=device) for n in (frames, labels))
    return (
        lambda f, g: ours(f, g, f_len, g_len),
        lambda f, g: (f.unsqueeze(2) + g.unsqueeze(1)).relu(),
        [(batch, frames, hidden), (batch, labels, hidden)],
    )


MODULES = {
    "SyncBatchNorm": batch_norm(lambda: SyncBatchNorm(64)),
    "GroupBatchNorm2d": batch_norm(lambda: GroupBatchNorm2d(64, 1)),
    "TransducerJoint": joint,
}


def check_module(name, device, how):
    ours, theirs, shapes = MODULES[name](device)
    compiled = torch.compile(lambda *x: ours(*(t * 1.0 for t in x)) * 1.0, **how)
    for _ in range(4):
        values = [torch.randn(shape, dtype=F32, device=device) for shape in shapes]
        mine, peers = ([t.clone().requires_grad_() for t in values] for _ in range(2))
        if isinstance(ours, torch.nn.Module):
            ours.zero_grad()  # as torch's own modules: a gradient of a graph lives until the next step begins
        torch.compiler.cudagraph_mark_step_begin()
        compiled(*mine).square().sum().backward()
        theirs(*peers).square().sum().backward()
        for a, b in zip(mine, peers, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", MODULES)
def test_modules_compiled(name):
    check_module(name, "cpu", dict(backend="aot_eager"))


@pytest.mark.gpu
@WITH_GRAPHS
@pytest.mark.parametrize("name", MODULES)
def test_modules_under_cudagraph_trees(name, how):
    check_module(name, "cuda", how)
