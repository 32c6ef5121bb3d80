"""The norms, LayerNormLinear, LayerNormMLP and TransformerLayer: as they are made of parts, in float64 and in FP8."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import torch_defaults
from te_common import (
    ALL_RECIPES,
    RECIPES,
    clean,  # noqa: F401  a fixture
    near,
    random,
    train,
)

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.pytorch.module.layernorm_mlp import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("clean")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def drawn(module):
    """Its parameters away from zeros and ones."""
    torch.manual_seed(2)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0.2 if parameter.dim() == 1 else 0.0, 0.2)
    return module


def norm(x, weight, bias, kind, eps=1e-5, centered=False):
    x = x.double()
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + (1.0 if centered else 0.0))
    return x if bias is None else x + bias.double()


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms(kind, centered, dtype):
    made = getattr(te, kind)(24, eps=1e-3, zero_centered_gamma=centered, params_dtype=dtype, device="cpu")
    assert made.weight.unique().item() == (0.0 if centered else 1.0)
    drawn(made)
    x = random(5, 24, dtype=dtype, grad=True)
    wide, p = (
        x.detach().double().requires_grad_(),
        [q.detach().double().requires_grad_() for q in made.parameters()],
    )
    expected = norm(wide, p[0], p[1] if len(p) > 1 else None, kind, 1e-3, centered)
    found, grad = made(x), random(5, 24, seed=1, dtype=dtype)
    assert found.dtype == dtype
    found.backward(grad)
    expected.backward(grad.double())
    near(found, expected.detach(), dtype)
    for value, other in zip((x, *made.parameters()), (wide, *p), strict=True):
        near(value.grad, other.grad, dtype, units=8)


def test_norms_mark_parameters_of_sequence_parallel_ranks():
    made = te.LayerNorm(8, sequence_parallel=True, device="cpu")
    assert made.weight.sequence_parallel and made.bias.sequence_parallel
    assert not te.RMSNorm(8, device="cpu").weight.sequence_parallel


@ALL_RECIPES
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norm_and_linear(kind, of):
    """The same bits as the two layers one behind the other."""
    made = drawn(te.LayerNormLinear(32, 48, normalization=kind, zero_centered_gamma=True, device="cpu"))
    first = getattr(te, kind)(32, zero_centered_gamma=True, device="cpu")
    second = te.Linear(32, 48, device="cpu")
    parts = dict(made.named_parameters())
    first.load_state_dict({n[11:]: v for n, v in parts.items() if n.startswith("layer_norm")})
    second.load_state_dict({n: v for n, v in parts.items() if not n.startswith("layer_norm")})
    pair, x, x2 = torch.nn.Sequential(first, second), random(5, 32, grad=True), random(5, 32, grad=True)
    for _ in range(2):
        assert torch.equal(train(made, of, x), train(pair, of, x2))
        assert torch.equal(x.grad, x2.grad)
        for p, q in zip(made.parameters(), pair.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_what_norm_and_linear_return():
    options = dict(return_bias=True, return_layernorm_output=True, device="cpu")
    made, x = te.LayerNormLinear(32, 48, **options), random(5, 32)
    output, bias, normed = made(x)
    assert bias is made.bias and torch.equal(normed, te.LayerNorm(32, device="cpu")(x))
    near(output, (normed.double() @ made.weight.double().t()).detach(), F32, 16)
    assert sorted(dict(made.named_parameters())) == ["bias", "layer_norm_bias", "layer_norm_weight", "weight"]
    for bad in (dict(normalization="BatchNorm"), dict(parallel_mode="row")):
        with pytest.raises(ValueError):
            te.LayerNormLinear(8, 8, device="cpu", **bad)


def activated(u, name):
    first, second = u.chunk(2, -1) if ACTIVATIONS[name][1] else (u, 1.0)
    functions = {
        "gelu": lambda t: F.gelu(t, approximate="tanh"),
        "relu": torch.relu,
        "silu": F.silu,
        "quick_gelu": lambda t: t * torch.sigmoid(1.702 * t),
        "squared_relu": lambda t: torch.relu(t).square(),
    }
    return functions[ACTIVATIONS[name][0]](first) * second


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_norm_and_mlp(activation, bias):
    made = drawn(te.LayerNormMLP(24, 40, activation=activation, bias=bias, device="cpu"))
    rows = 80 if ACTIVATIONS[activation][1] else 40
    assert made.fc1_weight.shape == (rows, 24) and made.fc2_weight.shape == (24, 40)
    x = random(5, 24, grad=True)
    p = {n: q.detach().double().requires_grad_() for n, q in made.named_parameters()}
    wide = x.detach().double().requires_grad_()
    hidden = norm(wide, p["layer_norm_weight"], p["layer_norm_bias"], "LayerNorm") @ p["fc1_weight"].t()
    hidden = activated(hidden + p.get("fc1_bias", 0.0), activation)
    expected = hidden @ p["fc2_weight"].t() + p.get("fc2_bias", 0.0)
    grad = random(5, 24, seed=1)
    expected.backward(grad.double())
    near(train(made, None, x, grad), expected.detach(), F32, 32)
    for name, parameter in made.named_parameters():
        near(parameter.grad, p[name].grad, F32, 64)
    near(x.grad, wide.grad, F32, 64)


@ALL_RECIPES
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_norm_and_mlp_in_fp8(activation, of):
    """As its four parts, with the activation of te's own op between them."""
    made = drawn(te.LayerNormMLP(32, 48, activation=activation, normalization="RMSNorm", device="cpu"))
    rows = made.fc1_weight.shape[0]
    parts = (
        te.LayerNormLinear(32, rows, normalization="RMSNorm", return_bias=True, device="cpu"),
        te.Linear(48, 32, device="cpu"),
    )
    state = dict(made.named_parameters())
    parts[0].load_state_dict(
        dict(layer_norm_weight=state["layer_norm_weight"], weight=state["fc1_weight"], bias=state["fc1_bias"])
    )
    parts[1].load_state_dict(dict(weight=state["fc2_weight"], bias=state["fc2_bias"]))
    x, grad = random(5, 32, grad=True), random(5, 32, seed=1)
    for _ in range(2):
        found, of_input = train(made, of, x, grad), x.grad
        with te.fp8_autocast(fp8_recipe=of):
            first, bias = parts[0](x)
            op = torch.ops.apex.bias_activation_forward.default
            name, gated = ACTIVATIONS[activation]
            expected = parts[1](op(first, bias, name, gated))
        (wanted,) = torch.autograd.grad(expected, x, grad)
        assert torch.equal(found, expected) and torch.equal(of_input, wanted)


def test_what_norm_and_mlp_return():
    made, x = (
        te.LayerNormMLP(32, 48, return_bias=True, return_layernorm_output=True, device="cpu"),
        random(5, 32),
    )
    output, bias, normed = made(x)
    assert (
        output.shape == x.shape
        and bias is made.fc2_bias
        and torch.equal(normed, te.LayerNorm(32, device="cpu")(x))
    )
    with pytest.raises(NotImplementedError, match="gelu"):
        te.LayerNormMLP(8, 8, activation="tanh", device="cpu")


# ---- TransformerLayer -----------------------------------------------------------------------------------------------


def layer(**options):
    options = dict(hidden_dropout=0.0, attention_dropout=0.0, device="cpu") | options
    return drawn(te.TransformerLayer(32, 64, 4, **options))


def of_attention(p, prefix, x, memory=None, causal=True, cross=False):
    first = ("layernorm_query" if cross else "layernorm_qkv") + "."
    normed = x
    if f"{prefix}{first}layer_norm_weight" in p:
        normed = norm(
            x, p[f"{prefix}{first}layer_norm_weight"], p[f"{prefix}{first}layer_norm_bias"], "LayerNorm"
        )
    else:
        first = "qkv."
    names = (
        [f"{first}query_", f"{first}key_", f"{first}value_"]
        if not cross
        else [first, "key_value.key_", "key_value.value_"]
    )
    sources = (normed, normed, normed) if not cross else (normed, memory, memory)
    q, k, v = (
        (t @ p[f"{prefix}{n}weight"].t() + p[f"{prefix}{n}bias"]).unflatten(-1, (-1, 8)).permute(1, 2, 0, 3)
        for t, n in zip(sources, names, strict=True)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(8)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    found = (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(-2)
    return found @ p[f"{prefix}proj.weight"].t() + p[f"{prefix}proj.bias"], normed


def of_mlp(p, x):
    normed = norm(x, p["layernorm_mlp.layer_norm_weight"], p["layernorm_mlp.layer_norm_bias"], "LayerNorm")
    hidden = normed @ p["layernorm_mlp.fc1_weight"].t() + p["layernorm_mlp.fc1_bias"]
    hidden = F.gelu(hidden, approximate="tanh")
    return hidden @ p["layernorm_mlp.fc2_weight"].t() + p["layernorm_mlp.fc2_bias"], normed


def expected_of(made, x, memory=None, post=False, parallel=False):
    p = {n: q.detach().double() for n, q in made.named_parameters()}
    x = x.double()
    found, normed = of_attention(p, "self_attention.", x)
    if parallel:
        mlp, normed = of_mlp(p, x)
        return (normed if post else x) + found + mlp
    x = found + (normed if post else x)
    if memory is not None:
        found, normed = of_attention(p, "inter_attention.", x, memory.double(), False, True)
        x = found + (normed if post else x)
    found, normed = of_mlp(p, x)
    x = found + (normed if post else x)
    if made.output_layernorm:
        x = norm(x, p["layernorm.weight"], p["layernorm.bias"], "LayerNorm")
    return x


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("decoder", [False, True])
def test_transformer_layers(post, output, decoder):
    made = layer(
        apply_residual_connection_post_layernorm=post,
        output_layernorm=output,
        layer_type="decoder" if decoder else "encoder",
    )
    x, memory = random(5, 3, 32), random(7, 3, 32, seed=1) if decoder else None
    near(made(x, encoder_output=memory), expected_of(made, x, memory, post), F32, units=64)
    wanted = {"self_attention", "layernorm_mlp"} | ({"inter_attention"} if decoder else set())
    assert {name for name, _ in made.named_children()} == wanted | ({"layernorm"} if output else set())


@pytest.mark.parametrize("post", [False, True])
def test_attention_and_mlp_beside_each_other(post):
    made, x = (
        layer(parallel_attention_mlp=True, apply_residual_connection_post_layernorm=post),
        random(5, 3, 32),
    )
    near(made(x), expected_of(made, x, post=post, parallel=True), F32, units=64)


def test_batches_first():
    one, other, x = layer(), layer(attn_input_format="bshd"), random(5, 3, 32)
    assert torch.equal(other(x.transpose(0, 1)).transpose(0, 1), one(x))


@pytest.mark.parametrize("form, dim", [("sbhd", 1), ("bshd", 0)])
def test_whole_samples_are_left_out(form, dim):
    made, x = layer(drop_path_rate=0.5, attn_input_format=form), random(8, 8, 32)
    torch.manual_seed(0)
    change = (made._drop_path(x) / x).transpose(0, dim).flatten(1)
    assert all(row.eq(row[0]).all() and row[0].item() in (0.0, 2.0) for row in change)
    assert 0 < change[:, 0].count_nonzero() < 8
    made.eval()
    assert torch.equal(made(x), made(x))


def test_dropout_is_of_training():
    made, x = layer(hidden_dropout=0.5), random(5, 3, 32)
    assert not torch.equal(made(x), made(x))
    made.eval()
    assert torch.equal(made(x), made(x))


@pytest.mark.parametrize(
    "options",
    [
        dict(layer_type="both"),
        dict(fuse_wgrad_accumulation=True),
        dict(parallel_attention_mlp=True, output_layernorm=True),
        dict(num_gqa_groups=3),
    ],
    ids=str,
)
def test_layers_that_are_refused(options):
    with pytest.raises(ValueError):
        layer(**options)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@ALL_RECIPES
def test_transformer_layers_in_fp8(of, dtype):
    """Near the layer without; every parameter has a gradient."""
    made, x = layer(params_dtype=dtype, layer_type="decoder"), random(5, 3, 32, dtype=dtype, grad=True)
    memory = random(7, 3, 32, seed=1, dtype=dtype)
    wide = made(x, encoder_output=memory).detach()
    found = train(made, of, x, steps=2, encoder_output=memory)
    assert found.dtype == dtype and 0 < (found - wide).norm() < 0.15 * wide.norm()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("of", [RECIPES["delayed"], RECIPES["current"]], ids=["delayed", "current"])
def test_compiled_without_breaks(of):
    torch_defaults.skip_compiled("layers of apex.transformer_engine")
    made, x, x2 = layer(), random(5, 3, 32, grad=True), random(5, 3, 32, grad=True)
    other = copy.deepcopy(made)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        y, y2 = train(compiled, of, x), train(other, of, x2)
        torch.testing.assert_close(y, y2, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.grad, x2.grad, rtol=1e-3, atol=1e-3)


@ALL_RECIPES
def test_checkpoints_repeat_every_bit(of):
    made, x, x2 = layer(hidden_dropout=0.3), random(5, 3, 32, grad=True), random(5, 3, 32, grad=True)
    other = copy.deepcopy(made)
    for step in range(3):
        results = []
        for module, value, again in ((made, x, True), (other, x2, False)):
            value.grad = None
            torch.manual_seed(step)
            with te.fp8_autocast(fp8_recipe=of):
                y = te.checkpoint(module, value) if again else module(value)
            y.square().sum().backward()
            results.append((y, value.grad))
        assert all(map(torch.equal, *results))
        assert all(
            torch.equal(p.grad, q.grad) for p, q in zip(made.parameters(), other.parameters(), strict=True)
        )


@pytest.mark.parametrize("of", [None, RECIPES["delayed"]], ids=["wide", "fp8"])
@pytest.mark.parametrize(
    "options", [{}, dict(output_layernorm=True), dict(parallel_attention_mlp=True)], ids=str
)
def test_autocast_gives_its_dtype(options, of):
    """The residual is of it, too; gradients have the dtypes of what they are of."""
    made, x = layer(**options), random(5, 3, 32, grad=True)
    with torch.autocast("cpu", dtype=BF16), te.fp8_autocast(enabled=of is not None, fp8_recipe=of):
        y = made(x)
    assert y.dtype == BF16
    y.float().sum().backward()
    assert x.grad.dtype == F32 and all(p.grad.dtype == F32 for p in made.parameters())
    with torch.no_grad():
        expected = made(x)
    assert expected.dtype == F32 and (y - expected).norm() < 0.1 * expected.norm()


def test_main_gradients_of_a_layer():
    made, x = layer(fuse_wgrad_accumulation=True, fuse_qkv_params=True), random(5, 3, 32)
    plain = layer(fuse_qkv_params=True)
    for p in made.parameters():
        if p.dim() == 2:
            p.main_grad = torch.zeros_like(p, dtype=F32)
    for module in (made, plain):
        train(module, RECIPES["current"], x, is_first_microbatch=True)
    for p, q in zip(made.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.main_grad if p.dim() == 2 else p.grad, q.grad)
