"""te.ops: operations alone, and what Sequential makes of neighbours."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from te_common import (
    ALL_RECIPES,
    DEVICES,
    EPSILON,
    FORMULAS,
    RECIPES,
    clean,  # noqa: F401  a fixture
    random,
    train,
)

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.pytorch import ops

pytestmark = pytest.mark.usefixtures("clean")
F32, BF16 = torch.float32, torch.bfloat16
ON = pytest.mark.parametrize("device", DEVICES)


def halves(function):
    return lambda x: function(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


ACTIVATIONS = {
    "GELU": FORMULAS["gelu"],
    "ReLU": FORMULAS["relu"],
    "SReLU": FORMULAS["srelu"],
    "QGELU": FORMULAS["qgelu"],
    "SiLU": F.silu,
    "GEGLU": FORMULAS["geglu"],
    "ReGLU": FORMULAS["reglu"],
    "SReGLU": halves(FORMULAS["srelu"]),
    "QGEGLU": halves(FORMULAS["qgelu"]),
    "SwiGLU": FORMULAS["swiglu"],
    "GLU": halves(torch.sigmoid),
}


@ON
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(device, name):
    x = random(3, 5, 32, device=device, grad=True)
    made, leaf = getattr(ops, name)(), x.detach().double().requires_grad_()
    y, wanted = made(x), ACTIVATIONS[name](leaf)
    grad = random(*y.shape, seed=1, device=device)
    y.backward(grad)
    wanted.backward(grad.double())
    near = dict(rtol=8 * EPSILON[F32], atol=8 * EPSILON[F32])
    assert torch.allclose(y.double(), wanted, **near) and torch.allclose(x.grad.double(), leaf.grad, **near)
    with pytest.raises(NotImplementedError, match=name):
        getattr(ops, name)(cache_quantized_input=True)


@ON
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@ALL_RECIPES
def test_a_norm_and_a_product_are_one_layer(device, norm, of):
    """The bits of te.LayerNormLinear, in FP8 and without, and those of its gradients."""
    given = dict(zero_centered_gamma=True, device=device)
    made = ops.Sequential(getattr(ops, norm)(32, eps=1e-3, **given), ops.Linear(32, 48, device=device))
    layer = te.LayerNormLinear(32, 48, eps=1e-3, normalization=norm, **given)
    pairs = dict(zip(layer.parameters(), made.parameters(), strict=True))
    for own, other in pairs.items():
        torch.nn.init.normal_(own)
        other.data.copy_(own)
    x, grad = random(8, 32, device=device, grad=True), random(8, 48, seed=1, device=device)
    for recipe in (None, of, of):
        found = []
        for module in (layer, made):
            if recipe is None:
                y = module(x)
                y.backward(grad)
            else:
                y = train(module, recipe, x, grad)
            found.append((y, x.grad))
            x.grad = None
        assert all(map(torch.equal, *found))
        for own, other in pairs.items():
            assert torch.equal(own.grad, other.grad)
            own.grad = other.grad = None
    if of.delayed() and not of.override_linear_precision[2]:
        calls = []
        made[1].register_forward_hook(lambda *_: calls.append(1))  # a hook is called: each runs by itself
        train(made, of, x, grad)
        assert calls == [1]


@ON
def test_extra_inputs_and_outputs(device):
    made = ops.Sequential(
        ops.Linear(16, 32, device=device),
        ops.MakeExtraOutput(),
        ops.GELU(),
        ops.AddExtraInput(),
        ops.AddExtraInput(),
    )
    x, a, b = (
        random(4, 16, device=device),
        random(4, 32, seed=1, device=device),
        random(4, 32, seed=2, device=device),
    )
    y, before = made(x, a, b)
    assert torch.allclose(before, F.linear(x, made[0].weight, made[0].bias), atol=1e-5)
    assert torch.allclose(y, FORMULAS["gelu"](before) + a + b, atol=1e-6)
    for extra in ((), (a,), (a, b, a)):
        with pytest.raises(ValueError, match="2 extra inputs"):
            made(x, *extra)


@ON
def test_an_extra_output_alone_and_the_sum_s_name_of_1_x(device):
    x, other = random(4, 16, device=device).requires_grad_(), random(4, 16, seed=1, device=device)
    first, second = ops.MakeExtraOutput()(x)
    (first * other + second).sum().backward()
    assert torch.equal(first, x) and torch.equal(second, x) and torch.allclose(x.grad, other + 1)
    assert torch.equal(ops.Sequential(ops.AddInPlace())(x, other), x + other)


@ON
def test_the_others(device):
    x = random(4, 6, device=device, grad=True)
    assert torch.equal(ops.Identity()(x), x) and torch.equal(ops.ConstantScale(3.0)(x), 3 * x)
    assert torch.equal(ops.Reshape((2, -1))(x), x.reshape(2, 12))
    bias = ops.Bias(6, device=device)
    assert not bias.bias.any()
    torch.nn.init.normal_(bias.bias)
    y = bias(x)
    y.sum().backward()
    assert torch.equal(y, x + bias.bias) and (bias.bias.grad == 4).all()
    drop = ops.Dropout(0.5)
    assert set(drop(torch.ones_like(x)).unique().tolist()) <= {0.0, 2.0} and torch.equal(drop.eval()(x), x)
    plain = ops.BasicLinear(6, 8, device=device)
    assert plain.bias is None and torch.allclose(plain(x), x @ plain.weight.t(), atol=1e-5)
    with pytest.raises(ValueError, match="last dimension"):
        ops.LayerNorm((4, 6), device=device)
    with pytest.raises(NotImplementedError, match="FusibleOperation"):
        ops.FusibleOperation()(x)


def test_as_a_container():
    made = ops.Sequential({"first": ops.Linear(8, 8, device="cpu"), "second": torch.nn.Tanh()})
    assert [name for name, _ in made.named_children()] == ["first", "second"]
    made.append(ops.ReLU())
    assert len(made) == 3 and type(made[:2]) is ops.Sequential and len(made[1:]) == 2
    x = random(2, 8)
    assert torch.equal(copy.deepcopy(made)(x), made(x)) and torch.equal(made(x), F.relu(made[1](made[0](x))))
    other = ops.Sequential(ops.Linear(8, 8, device="cpu"), torch.nn.Tanh())
    other.load_state_dict({k.replace("first", "0"): v for k, v in made.state_dict().items()})
    assert torch.equal(other(x), made[:2](x))


@ON
def test_bfloat16_and_main_grad(device):
    made = ops.Linear(16, 32, dtype=BF16, accumulate_into_main_grad=True, device=device)
    made.weight.main_grad = torch.ones(32, 16, dtype=F32, device=device)
    x = random(8, 16, dtype=BF16, device=device)
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        made(x).sum().backward()
    assert made.weight.dtype == BF16 and made.weight.main_grad.ne(1).any()
