"""amp and torch.compile, in both orders."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys

import amp_runs as runs
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from apex import amp
from apex.amp import _compiling


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
        if runs._amp_state.handle is not runs._amp_state.no_handle:
            assert not runs._amp_state.handle.cache
    assert runs_of[0][0] == runs_of[1][0] and runs.equal(runs_of[0][1], runs_of[1][1])


def test_methods_that_were_patched_are_torch_s_own_again():
    """As in a process whose first compilation runs under O1; a later model, under a default device, broke its graph."""
    methods = torch._dynamo.trace_rules.get_tensor_method
    methods.cache_clear()
    runs.initialize(Model(), opt_level="O1")
    assert torch.Tensor.exp not in methods()
    runs.forget()
    assert torch.Tensor.exp in methods()


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


# What dynamo puts into the graph by name: methods, operators, and functions that torch is written with itself.
BY_NAME = {
    "a method": lambda x, w: x.mm(w),
    "an operator": lambda x, w: x @ w,
    "an operator the other way": lambda x, w: 1.0 / x.half().exp() + 0 * w.sum(),
    "a function of torch's": lambda x, w: torch.nn.functional.multi_head_attention_forward(
        x[:, None], x[:, None], x[:, None], 4, 1, w.repeat(3, 1), None, None, None, False, 0.0, w, None,
        need_weights=False, training=False,
    )[0],
    "a function and a method": lambda x, w: torch.nn.functional.linear(x, w).mm(w),
}  # fmt: skip


def operands():
    return torch.ones(4, 4, dtype=torch.float32, device="cpu"), torch.eye(
        4, dtype=torch.float32, device="cpu"
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", BY_NAME.values(), ids=BY_NAME)
def test_graphs_are_used_while_casts_are_as_they_were(function, backend):
    """One graph with casts and one without, and each in its place, whichever was first."""
    runs.initialize(nn.Linear(3, 3, dtype=torch.float32, device="cpu"), opt_level="O1")
    with_casts = function(*operands()).dtype
    with amp.disable_casts():
        without = function(*operands()).dtype
    assert with_casts != without
    for on_first in (True, False):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(function, backend=counter, fullgraph=True)
        for on in (on_first, not on_first, on_first, on_first, not on_first):
            with contextlib.nullcontext() if on else amp.disable_casts():
                assert compiled(*operands()).dtype == (with_casts if on else without)
        assert counter.frame_count == 2


def test_a_graph_has_one_guard(monkeypatch):
    """However many functions ask: each guard is asked before each call."""
    made, make = [], _compiling._add_guard
    monkeypatch.setattr(_compiling, "_add_guard", lambda *arguments: (made.append(1), make(*arguments)))
    runs.initialize(nn.Linear(3, 3, dtype=torch.float32, device="cpu"), opt_level="O1")
    compiled = torch.compile(lambda x, w: ((x @ w) @ w).exp().mm(w), backend="aot_eager", fullgraph=True)
    compiled(*operands())
    assert len(made) == 1


@pytest.mark.parametrize("function", BY_NAME.values(), ids=BY_NAME)
def test_a_graph_from_before_initialize_and_one_from_after_amp(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)

    def same_as_eager():
        found, expected = compiled(*operands()), function(*operands())
        assert found.dtype == expected.dtype
        return found.dtype

    dtypes = [same_as_eager()]
    for level in ("O1", "O4", "O1"):
        runs.forget()
        runs.initialize(nn.Linear(3, 3, dtype=torch.float32, device="cpu"), opt_level=level)
        dtypes.append(same_as_eager())
    amp._amp_state.handle._deactivate()
    dtypes.append(same_as_eager())
    assert dtypes[0] == dtypes[-1] != dtypes[1] and dtypes[1] == dtypes[3]


CACHED = """
import sys
import torch
from torch._dynamo.utils import counters
from apex import amp
if sys.argv[1] != "none":
    amp.initialize(torch.nn.Linear(3, 3, dtype=torch.float32, device="cpu"), opt_level=sys.argv[1], verbosity=0)
compiled = torch.compile(lambda x: x @ x)
found = compiled(torch.ones(4, 4, dtype=torch.float32, device="cpu")).dtype
print(found, counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler, which inductor needs on the CPU")
@pytest.mark.minutes
def test_torchs_caches_on_disk_tell_casts_apart(tmp_path):
    """Each process finds what a process like it has left there, and nothing else."""
    dtypes = {"none": "torch.float32", "O1": "torch.float16", "O4": "torch.bfloat16"}
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    order = ("none", "O1", "O4", "none", "O1")
    for i, level in enumerate(order):
        done = subprocess.run(
            [sys.executable, "-c", CACHED, level], env=environment, check=True, capture_output=True, text=True
        )
        assert done.stdout.split() == [dtypes[level], str(int(level in order[:i]))]


def test_the_users_own_tag_of_caches_stays(monkeypatch):
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "mine")
    compiled = torch.compile(BY_NAME["a method"], backend="aot_eager")
    compiled(*operands())
    runs.initialize(nn.Linear(3, 3, dtype=torch.float32, device="cpu"), opt_level="O1")
    compiled(*operands())
    tag = torch.compiler.config.cache_key_tag
    assert tag.startswith("mine apex.amp ")
    with amp.disable_casts():
        compiled(*operands())
    assert torch.compiler.config.cache_key_tag == "mine"
    torch._dynamo.reset()
    compiled(*operands())
    assert torch.compiler.config.cache_key_tag == tag
    amp._amp_state.handle._deactivate()  # what is compiled from now on has no wrappers that would tell
    assert torch.compiler.config.cache_key_tag == "mine"


@pytest.mark.parametrize("kind", runs.POLICIES)
def test_a_compiled_training_function(kind):
    """scale_loss, step and zero_grad inside: graphs break there, and what lies in flat buffers goes on lying there."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, optimizer = runs.start(kind, loss_scale=8.0)
        step = lambda i, model=model, optimizer=optimizer: runs.train(model, optimizer, 1, first=i)  # noqa: E731
        if compiled:
            step = torch.compile(step, backend="aot_eager")
        losses = [step(i) for i in range(3)]
        found.append((losses, runs.values(model) + runs.values(optimizer)))
    assert found[0][0] == found[1][0] and runs.equal(found[0][1], found[1][1])
