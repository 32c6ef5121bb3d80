"""amp and torch.compile, in both orders."""

from __future__ import annotations

import contextlib

import amp_runs as runs
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from apex import amp


class Model(nn.Module):
    """Layers, operators and functions of each of amp's lists."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.float32, device="cpu")
        self.norm = nn.LayerNorm(8, dtype=torch.float32, device="cpu")
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float32, device="cpu") / 3)
        self.last = nn.Linear(8, 3, dtype=torch.float32, device="cpu")

    def forward(self, x):
        h = self.norm(torch.relu(self.first(x)))
        h = h @ self.weight + torch.nn.functional.softmax(h, -1)
        return self.last(torch.cat([h, h * 2], -1)[:, 4:12]) / (1 + h.exp().sum(-1, keepdim=True))


@pytest.fixture(params=[None, "meta"])
def default_device(request):
    with torch.device(request.param) if request.param else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize("compiled_first", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_compiled_model_gives_the_same_bits(level, compiled_first):
    """One graph, no breaks; eager and compiled runs take the same steps."""
    runs_of = []
    for compiled in (False, True):
        runs.forget()
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model()
        counter = CompileCounterWithBackend("aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if compiled and compiled_first:
            model = torch.compile(model, fullgraph=True, backend=counter)
        model, optimizer = runs.initialize(
            model, optimizer, opt_level=level, loss_scale=None if level in ("O0", "O4", "O5") else 64.0
        )
        if compiled and not compiled_first:
            model = torch.compile(model, fullgraph=True, backend=counter)
        losses = runs.train(model, optimizer, 3)
        runs_of.append((losses, runs.values(model)))
        assert counter.frame_count == compiled
        if runs._amp_state.__dict__.get("handle"):
            assert not runs._amp_state.handle.cache
    assert runs_of[0][0] == runs_of[1][0] and runs.equal(runs_of[0][1], runs_of[1][1])


@pytest.mark.usefixtures("default_device")
def test_several_batch_sizes_compile_no_oftener_than_without_amp():
    counts = []
    for level in (None, "O1"):
        runs.forget()
        torch._dynamo.reset()
        model = Model()
        if level:
            runs.initialize(model, opt_level=level)
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        for n in (4, 7, 9):
            torch.testing.assert_close(
                compiled(torch.ones(n, 6, dtype=torch.float32, device="cpu")),
                model(torch.ones(n, 6, dtype=torch.float32, device="cpu")),
            )
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


def test_a_graph_made_with_casts_off_is_not_used_with_casts_on():
    linear = nn.Linear(3, 3, dtype=torch.float32, device="cpu")
    runs.initialize(linear, opt_level="O1")
    compiled = torch.compile(lambda x: torch.nn.functional.linear(x, linear.weight), backend="aot_eager")
    with amp.disable_casts():
        assert compiled(torch.ones(2, 3, dtype=torch.float32, device="cpu")).dtype == torch.float32
    assert compiled(torch.ones(2, 3, dtype=torch.float32, device="cpu")).dtype == torch.float16


def test_casts_that_are_off_in_a_part_of_a_graph():
    """Patched functions stand in the graph as calls, which ask whether casts are on when the graph is compiled."""
    linear = nn.Linear(3, 3, dtype=torch.float32, device="cpu")
    runs.initialize(linear, opt_level="O1")

    def both(x):
        with amp.disable_casts():
            full = torch.nn.functional.linear(x, linear.weight) + torch.mm(x, x.mT).sum()
        return full, torch.nn.functional.linear(x, linear.weight)

    x = torch.ones(2, 3, dtype=torch.float32, device="cpu")
    expected = [y.dtype for y in both(x)]
    assert expected == [torch.float32, torch.float16]
    compiled = torch.compile(both, backend="aot_eager")
    for _ in range(2):
        assert [y.dtype for y in compiled(x)] == expected
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="enter it outside"):
        torch.compile(both, fullgraph=True, backend="aot_eager")(x)
