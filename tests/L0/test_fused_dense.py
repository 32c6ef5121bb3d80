"""apex.fused_dense and apex.mlp: modules, functions, public apex's raw functions."""

from __future__ import annotations

import copy
import math
import pathlib
import sys

import lists
import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64
from torch import nn
from torch_defaults import float32_on_cpu, skip_compiled

from apex import _functional, amp, fused_dense, mlp
from apex._legacy import fused_dense_cuda, mlp_cuda
from apex.fused_dense import FusedDense, FusedDenseGeluDense
from apex.mlp import MLP

ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}
APEX = str(pathlib.Path(amp.__file__).parents[1])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def near(found, wanted, loose=4):
    """Within some roundings of what torch's own layers give in the same dtype."""
    unit = loose * lists.ROUNDING[found.dtype]
    scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    torch.testing.assert_close(found, wanted, rtol=unit, atol=unit * scale)


def ones(*shape, dtype=F32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


def gelu(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_modules_are_torchs_layers(device, dtype, bias):
    torch.manual_seed(1)
    dense = FusedDense(24, 40, bias, device=device, dtype=dtype)
    two = FusedDenseGeluDense(24, 48, 16, bias, device=device, dtype=dtype)
    x, y = (lists.random(dtype, device, ((2, 5, 24),), seed=2)[0].requires_grad_() for _ in range(2))
    for module, plain in (
        (dense, lambda x: F.linear(x, dense.weight, dense.bias)),
        (two, lambda x: F.linear(gelu(F.linear(x, two.weight1, two.bias1)), two.weight2, two.bias2)),
    ):
        found, wanted = module(x), plain(y)
        near(found, wanted)
        g = torch.ones_like(found)
        parameters = list(module.parameters())
        for a, b in zip(
            torch.autograd.grad(found, (x, *parameters), g),
            torch.autograd.grad(wanted, (y, *parameters), g),
            strict=True,
        ):
            near(a, b, 16)


@float32_on_cpu()
def test_values_at_the_beginning():
    """Dense layers begin as torch.nn.Linear, from the same random numbers; nothing is left as memory was."""
    torch.manual_seed(3)
    ours = FusedDense(7, 5)
    two = FusedDenseGeluDense(7, 5, 3)
    torch.manual_seed(3)
    theirs = nn.Linear(7, 5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        limit = 1 / math.sqrt(7)
        assert a.abs().max() <= limit and b.abs().max() <= limit and a.std() > 0.3 * limit
    assert all(p.isfinite().all() and p.abs().max() > 0 for p in two.parameters())
    assert "7, 5, bias=True" in repr(ours) and "7, 5, 3, bias=True" in repr(two)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_mlp(device, dtype, activation, bias):
    """As torch's layers, the activation behind every one."""
    torch.manual_seed(4)
    module = MLP([13, 27, 11, 5], bias, activation, device=device, dtype=dtype)
    layers = []
    for i, weight in enumerate(module.weights):
        linear = nn.Linear(*weight.t().shape, bias=bias, device=device, dtype=dtype)
        linear.weight.data.copy_(weight)
        if bias:
            linear.bias.data.copy_(module.biases[i])
        layers.append(linear)
    x, y = (lists.random(dtype, device, ((9, 13),), seed=2)[0].requires_grad_() for _ in range(2))
    found, wanted = module(x), y
    for linear in layers:
        wanted = ACTIVATIONS[activation](linear(wanted))
    near(found, wanted, 16)
    found.sum().backward()
    wanted.sum().backward()
    near(x.grad, y.grad, 64)
    for linear, weight in zip(layers, module.weights, strict=True):
        near(weight.grad, linear.weight.grad, 64)


@float32_on_cpu()
def test_mlp_keeps_public_names():
    module = MLP([3, 5, 2])
    assert list(module.state_dict()) == ["weight_0", "bias_0", "weight_1", "bias_1"]
    assert repr(module) == "MLP(MLP sizes: [3, 5, 2], Bias=1, activation=relu)".replace("1, a", "True, a")
    twin = copy.deepcopy(module)
    twin.weights[0].data.zero_()
    assert module.weights[0].abs().max() > 0
    module.half()
    assert module.weights[0].dtype == F16 and module(ones(1, 3, dtype=F16)).dtype == F16
    with pytest.raises(TypeError, match="none, relu, sigmoid, not 'gelu'"):
        MLP([3, 5], activation="gelu")
    with pytest.raises(ValueError, match="as many biases"):
        mlp.mlp_function(True, 1, ones(2, 3), ones(4, 3))
    with pytest.raises(ValueError, match="as many biases"):
        mlp_cuda.forward(True, 1, [ones(2, 3), ones(4, 3), ones(4), ones(4)])
    with pytest.raises(ValueError, match="of the input and of each layer"):
        MLP([3])
    for activation in (-1, 3, "tanh"):
        for function in (mlp.mlp_function, lambda *a: mlp_cuda.forward(*a[:2], a[2:])):
            with pytest.raises(ValueError, match="not "):
                function(False, activation, ones(2, 3), ones(4, 3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_raw_functions(device, dtype):
    """They return lists, record nothing, and give what the differentiable ones do."""
    torch.manual_seed(5)
    two = FusedDenseGeluDense(16, 24, 8, device=device, dtype=dtype)
    x = lists.random(dtype, device, ((6, 16),), seed=2)[0].requires_grad_()
    g = lists.random(dtype, device, ((6, 8),), seed=3)[0]
    parameters = (two.weight1, two.bias1, two.weight2, two.bias2)
    output = two(x)
    wanted = torch.autograd.grad(output, (x, *parameters), g)
    hidden, found, before = fused_dense_cuda.linear_gelu_linear_forward(x, *parameters)
    lists.assert_same_bits([found], [output])
    assert not found.requires_grad
    lists.assert_same_bits(
        fused_dense_cuda.linear_gelu_linear_backward(x, before, hidden, two.weight1, two.weight2, g), wanted
    )
    one = F.linear(x, two.weight1, two.bias1)
    near(fused_dense_cuda.linear_bias_forward(x, two.weight1, two.bias1), one)
    g = lists.random(dtype, device, ((6, 24),), seed=3)[0]
    found = fused_dense_cuda.linear_bias_backward(x, two.weight1, g)
    for a, b in zip(found, torch.autograd.grad(one, (x, two.weight1, two.bias1), g), strict=True):
        near(a, b, 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", range(3))
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_raw_mlp(device, activation, bias):
    module = MLP([8, 16, 8], bias, list(ACTIVATIONS)[activation], device=device, dtype=F32)
    x = lists.random(F32, device, ((6, 8),), seed=2)[0].requires_grad_()
    g = lists.random(F32, device, ((6, 8),), seed=3)[0]
    inputs = [x, *module.weights, *module.biases]
    outputs = mlp_cuda.forward(bias, activation, inputs)
    assert len(outputs) == 2 and not outputs[0].requires_grad
    output = module(x)
    lists.assert_same_bits([outputs[0]], [output])
    wanted = torch.autograd.grad(output, inputs, g)
    for a, b in zip(mlp_cuda.backward(bias, activation, g, outputs, inputs), wanted, strict=True):
        near(a, b)


@pytest.mark.parametrize(
    "make", [lambda: FusedDense(8, 8), lambda: FusedDenseGeluDense(8, 8, 8), lambda: MLP([8, 8])]
)
def test_amp_casts(make):
    """torch.autocast and amp's O1 cast inputs and weights to half; weights get float32 gradients."""
    module, x = float32_on_cpu()(make)(), torch.randn(4, 8, dtype=F32, device="cpu")
    with torch.autocast("cpu", BF16):
        assert module(x).dtype == BF16
    model, optimizer = amp.initialize(
        module, torch.optim.SGD(module.parameters(), lr=0.1), opt_level="O1", verbosity=0
    )
    try:
        output = model(x)
        assert output.dtype == F16
        with amp.scale_loss(output.float().mean(), optimizer) as loss:
            loss.backward()
        assert all(p.grad.dtype == F32 and p.grad.isfinite().all() for p in model.parameters())
    finally:
        amp._amp_state.handle._deactivate()


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device, counting_backend):
    """One graph, with the values of eager."""
    skip_compiled("modules")
    torch.manual_seed(6)
    given = {"device": device, "dtype": F32}
    for module in (FusedDenseGeluDense(16, 32, 8, **given), MLP([16, 32, 8], **given)):
        x = lists.random(F32, device, ((4, 16),), seed=2)[0].requires_grad_()
        graph = torch.compile(module, fullgraph=True, backend=counting_backend)
        near(graph(x), module(x), 16)
        graph(x).sum().backward()
    assert fused_dense.fused_dense_function(x, ones(3, 16, device=device), None).shape == (4, 3)


def test_a_product_is_one_frame_of_python(monkeypatch):
    """Its host time is made of frames. Without a direct entry it goes by torch.ops, and makes more."""
    monkeypatch.setattr(amp._amp_state, "handle", amp._amp_state.no_handle)
    x, w, b = ones(3, 4), ones(5, 4), ones(5)
    wanted, frames = F.linear(x, w, b), []
    sys.setprofile(
        lambda frame, event, _: frames.append(frame.f_code.co_filename) if event == "call" else None
    )
    try:
        found = fused_dense.fused_dense_function(x, w, b)
    finally:
        sys.setprofile(None)
    ours = [name for name in frames if name.startswith(APEX) and "_portable" not in name]
    assert len(ours) == 1 or _functional.entry("dense") is None
    assert torch.equal(found, wanted)
    assert torch.equal(fused_dense.dense_no_bias_function(x, w), F.linear(x, w))
