"""What one step of apex.transformer_engine's layers asks of the host: few ops, and nothing that a CUDA graph cannot
hold."""

from __future__ import annotations

import collections
import copy

import numpy as np
import pytest
import torch
from te_common import (
    ALL_RECIPES,
    DEVICES,
    RECIPES,
    clean,  # noqa: F401  a fixture
    random,
    train,
)
from torch.utils._python_dispatch import TorchDispatchMode

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.common.recipe import DelayedScaling
from apex.transformer_engine.pytorch import _scaling, _state
from apex.transformer_engine.pytorch._scaling import Scaling

pytestmark = pytest.mark.usefixtures("clean")

BF16 = torch.bfloat16
LAYERS = {
    "Linear": lambda **of: te.Linear(32, 48, **of),
    "split": lambda **of: te.Linear(32, 48, parameters_split=("q_", "k_", "v_"), **of),
    "GroupedLinear": lambda **of: te.GroupedLinear(2, 32, 48, **of),
    "LayerNormLinear": lambda **of: te.LayerNormLinear(32, 48, **of),
    "LayerNormMLP": lambda **of: te.LayerNormMLP(32, 64, activation="swiglu", normalization="RMSNorm", **of),
    "MultiheadAttention": lambda **of: te.MultiheadAttention(32, 2, attention_dropout=0.0, **of),
    "TransformerLayer": lambda **of: te.TransformerLayer(
        32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal", **of
    ),
}
ALL_LAYERS = pytest.mark.parametrize("name", LAYERS)


class Ops(TorchDispatchMode):
    """Counts ops by name, and notes those that take something from the host, or wait for the device."""

    # What torch.tensor, as_tensor and the like end in; what item, tolist and bool end in.
    HOST = (
        "aten.lift_fresh.default",
        "aten.lift.default",
        "aten._local_scalar_dense.default",
        "aten.nonzero.default",
    )

    def __init__(self):
        super().__init__()
        self.count, self.host = collections.Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = str(func), kwargs or {}
        self.count[name] += 1
        found = func(*args, **kwargs)
        tensors = [
            tensor for tensor in (found, *args) if isinstance(tensor, torch.Tensor) and tensor.dim() > 0
        ]
        if name in self.HOST or len({tensor.device for tensor in tensors}) > 1:
            self.host.append(name)
        return found


def step_of(layer, name, of, device="cpu"):
    """A function that runs a step, and gives the output and all gradients."""
    x = random(8, 2, 32, device=device, dtype=BF16, grad=True)
    splits = ([12, 4],) if name == "GroupedLinear" else ()

    def step():
        with te.fp8_autocast(fp8_recipe=of):
            output = layer(x, *splits)
        return output, *torch.autograd.grad(output.float().square().sum(), [x, *layer.parameters()])

    return step


@ALL_LAYERS
@ALL_RECIPES
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_takes_nothing_from_the_host(device, name, of):
    """Once it is known how long histories are and which numbers are wanted, all of that is on the device."""
    step = step_of(LAYERS[name](params_dtype=BF16, device=device), name, of, device)
    for _ in range(3):
        step()
    with Ops() as ops:
        step()
    assert not ops.host


def test_the_ops_that_count_are_seen():
    with Ops() as ops:
        torch.tensor([1.0], dtype=torch.float32, device="cpu").item()
    assert ops.host == ["aten.lift_fresh.default", "aten._local_scalar_dense.default"]


@pytest.mark.parametrize(
    "of, casts",
    [
        ("delayed", {"fp8_multi_update_scales": 1, "fp8_quantize": 3}),
        ("current", {"fp8_quantize": 3}),
        ("blocks", {"fp8_quantize_blocks": 3}),
    ],
)
def test_a_step_of_linear_is_casts_and_products(of, casts):
    """Beside the products' own: each tensor is cast once, all scales are made in one launch, nothing is filled."""
    layer = te.Linear(32, 48, params_dtype=BF16, device="cpu")
    x, grad = random(16, 32, dtype=BF16, grad=True), random(16, 48, dtype=BF16)

    def step():
        with te.fp8_autocast(fp8_recipe=RECIPES[of]):
            output = layer(x)
        torch.autograd.grad(output, [x, *layer.parameters()], grad)

    for _ in range(3):
        step()
    with Ops() as ops:
        step()
    found = {name.split(".")[1]: n for name, n in ops.count.items() if name.startswith("apex.fp8_")}
    assert found == casts
    made = [
        name for name in ops.count if any(word in name for word in ("fill", "zeros", "ones", "full", "clone"))
    ]
    assert not made


def test_new_scales_of_any_number_of_layers_are_a_launch(variant):
    """From the second step on, when their scales lie one behind the other; made in any order."""
    length = RECIPES["delayed"].amax_history_len
    scalings = [Scaling(3 - i % 2, 1024, torch.device(variant.device)) for i in range(600)]
    for scaling in scalings:
        scaling.resize(length)
    for step in range(3):
        if variant.simt:
            variant.kernels.clear()
        for i, scaling in enumerate(scalings):
            scaling.amax_history[0].fill_(1 + i + step)
        _scaling.update(scalings[::-1], [448.0 if i % 2 else 57344.0 for i in range(600)], RECIPES["delayed"])
        for i, scaling in enumerate(scalings):
            assert (scaling.scale == (57344.0 if i % 2 else 448.0) / np.float32(1 + i + step)).all()
    if variant.simt:
        assert variant.kernels["fp8_multi_update_scales_f32"] == 1


def test_a_graph_makes_the_scales_of_its_own_steps(monkeypatch):
    """Whoever made those of the step before: an autocast that is entered before the capture, say. Once an autocast."""
    made, x = te.Linear(32, 48, device="cpu"), random(8, 32, grad=True)
    train(made, RECIPES["delayed"], x, steps=2)
    monkeypatch.setattr(_state._Steady, "flush", lambda self: False)  # which is not by `update`
    updated, update = [], _scaling.update
    monkeypatch.setattr(
        _scaling, "update", lambda scalings, *of: updated.append(len(scalings)) or update(scalings, *of)
    )
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        assert updated == [2]  # forward and backward, by the autocast
        monkeypatch.setattr(_scaling, "is_captured", lambda tensor: True)
        made(x)
        made(x)
        assert updated == [2, 2]
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        made(x)
        assert updated == [2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("of", ["delayed", "current", "blocks"])
@ALL_LAYERS
def test_a_captured_step_trains_as_an_eager_one(name, of):
    """In a plain torch.cuda.graph, after the usual steps on another stream.

    Histories hold all steps: the eager steps between the replays move those of the graph on by a row, too.
    """
    torch.manual_seed(1)
    made = LAYERS[name](params_dtype=BF16, device="cuda")
    other = copy.deepcopy(made)
    fp8_recipe = DelayedScaling(amax_history_len=32) if of == "delayed" else RECIPES[of]
    step, eager = (step_of(layer, name, fp8_recipe, "cuda") for layer in (made, other))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        eager()
    for _ in range(3):
        graph.replay()
        for ours, theirs in zip(found, eager(), strict=True):
            assert (ours - theirs).float().norm() <= 0.02 * theirs.float().norm()
    with te.fp8_autocast(fp8_recipe=fp8_recipe):  # of which each has new scales
        pass
    for one, another in zip(made.modules(), other.modules(), strict=True):
        for part in ("scaling_fwd", "scaling_bwd") if hasattr(one, "fp8_meta") else ():
            torch.testing.assert_close(
                one.fp8_meta[part].scale, another.fp8_meta[part].scale, rtol=0.05, atol=0
            )


def test_scales_of_a_step_stay_what_they_were():
    """A backward multiplies with the scales of its forward, though others were made since: in inference mode, which
    makes none that training cannot save."""
    of, x, grad = RECIPES["delayed"], random(16, 32, dtype=BF16, grad=True), random(16, 48, dtype=BF16)
    layer = te.Linear(32, 48, params_dtype=BF16, device="cpu")
    other = copy.deepcopy(layer)

    def forward(module, k):
        with te.fp8_autocast(fp8_recipe=of):
            return module(x * 4.0**k)

    def backward(module, output):
        return torch.autograd.grad(output, [x, module.weight], grad)

    for k in range(2):
        for module in (layer, other):
            backward(module, forward(module, k))
    output, expected = (forward(module, 2) for module in (layer, other))
    wanted = backward(other, expected)
    with torch.inference_mode(), te.fp8_autocast(fp8_recipe=of):
        layer.eval()(random(16, 32, dtype=BF16))
    for ours, theirs in zip((output, *backward(layer, output)), (expected, *wanted), strict=True):
        assert torch.equal(ours, theirs)
    backward(layer, forward(layer.train(), 3))
