"""Norms and activations that are cast in the pass that makes them: as those that are made first, and cast then."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_defaults
from te_common import (
    RECIPES,
    clean,  # noqa: F401  a fixture
    near,
    random,
    train,
)

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.common.recipe import QParams
from apex.transformer_engine.pytorch import _casts, _mlp
from apex.transformer_engine.pytorch._quantizers import Current, Delayed
from apex.transformer_engine.pytorch._scaling import Scaling
from apex.transformer_engine.pytorch.module import _norm, layernorm_mlp
from apex.transformer_engine.pytorch.module.layernorm_mlp import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("clean")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
KINDS = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
ONE_SCALE = pytest.mark.parametrize(
    "of", [RECIPES["delayed"], RECIPES["current"]], ids=["delayed", "current"]
)


def delayed(dtype=E4M3, scale=37.0):
    """A quantizer that records, and where."""
    scaling = Scaling(1, 2, torch.device("cpu"))
    return Delayed(dtype, torch.full_like(scaling.scale, scale), scaling, 0, True), scaling.amax_history[0]


def same_codes(found, expected, of=None):
    """Within one code: codes of one sign are in the order of their numbers, and both zeros are one.

    of: what `expected` was cast from; where its dtype has few digits so near to 0, codes may differ by more.
    """

    def places(q):
        code = q.view(torch.uint8).to(torch.int32)
        return torch.where(code >= 0x80, 0x80 - code, code)

    assert found.dtype == expected.dtype and found.shape == expected.shape and found.is_contiguous()
    apart = (places(found) - places(expected)).abs()
    if of is not None:
        apart = apart[of.abs() >= 16 * torch.finfo(of.dtype).tiny]
    assert apart.numel() > 0 and apart.max() <= 1


@DTYPES
@KINDS
@pytest.mark.parametrize("centered", [False, True])
def test_norm(kind, centered, dtype):
    """Codes, their transpose, the largest magnitude of the unrounded norm, and what its gradient needs."""
    x = random(40, 48, dtype=dtype)
    gamma = random(48, seed=1, dtype=dtype)
    beta = random(48, seed=2, dtype=dtype) if kind == "LayerNorm" else None
    quantizer, amax = delayed()
    options = 1e-3, kind == "LayerNorm", centered
    found, mean, rstd = quantizer.quantize_norm(x, gamma, beta, options, True)
    y = _norm.normalize(kind, x, gamma, beta, 1e-3, centered)
    same_codes(found.rows, delayed()[0].quantize(y, True, False).rows)
    assert torch.equal(found.columns.view(torch.uint8), found.rows.view(torch.uint8).t())
    assert found.row_scale == found.column_scale == torch.ones_like(found.row_scale) / 37.0
    wide = x.double() - x.double().mean(1, keepdim=True) if mean is not None else x.double()
    exact = wide / (wide.square().mean(1, keepdim=True) + 1e-3).sqrt() * (gamma.double() + centered)
    exact = exact if beta is None else exact + beta.double()
    torch.testing.assert_close(amax.double(), exact.abs().amax()[None], rtol=2.0**-21, atol=0)
    torch.testing.assert_close(rstd.double(), (wide.square().mean(1) + 1e-3).rsqrt(), rtol=1e-6, atol=0)
    assert quantizer.quantize_norm(x, gamma, beta, options, False)[0].columns is None


@DTYPES
@pytest.mark.parametrize("make", ["delayed", "current"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_its_gradient(activation, make, dtype):
    name, gated = ACTIVATIONS[activation]
    u, grad = random(40, 96 if gated else 48, dtype=dtype), random(40, 48, seed=1, dtype=dtype)
    forward = torch.ops.apex.bias_activation_forward.default
    made = u.clone().requires_grad_()
    y = forward(made, None, name, gated)
    (of_u,) = torch.autograd.grad(y, made, grad)
    for matrix, of, expected, sums in (
        (u, _casts.Activation(name, gated), y.detach(), False),
        (grad, _casts.Activation(name, gated, u), of_u, True),
    ):
        dtype8 = E5M2 if sums else E4M3
        quantizer, amax = delayed(dtype8) if make == "delayed" else (Current(dtype8, QParams()), None)
        found, total = quantizer.quantize_and_sum(matrix, True, True, sums, of)
        scale = torch.ones_like(found.row_scale) / found.row_scale
        same_codes(found.rows, _casts.cast(expected, scale, dtype8, None, True, False)[0], expected)
        assert torch.equal(found.columns.view(torch.uint8), found.rows.view(torch.uint8).t())
        largest = expected.float().abs().amax()
        unit = {F32: 2.0**-20, BF16: 2.0**-8, F16: 2.0**-10}[dtype]
        recorded = _casts.amax(matrix, of) if amax is None else amax[0]
        torch.testing.assert_close(recorded, largest, rtol=unit, atol=0)
        if sums:
            near(total, expected.double().sum(0), dtype, units=40)
        if amax is None:
            limit = torch.finfo(dtype8).max
            torch.testing.assert_close(scale, limit / recorded, rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_an_amax_is_what_the_cast_records(seed):
    """The pass that only looks, and the pass that casts, see the same numbers."""
    u, grad = random(70, 90, seed=seed, dtype=BF16), random(70, 45, seed=9, dtype=BF16)
    for matrix, of in (
        (u, None),
        (u, _casts.Activation("silu", True)),
        (grad, _casts.Activation("gelu", True, u)),
    ):
        quantizer, recorded = delayed()
        quantizer.quantize(matrix, True, True, of)
        assert torch.equal(recorded, _casts.amax(matrix, of).reshape(1)) and recorded > 0
    assert _casts.amax(u) == u.float().abs().amax()


def refuse(*_):
    raise AssertionError("made in a pass of its own")


def test_which_recipes_need_no_pass_of_their_own(monkeypatch):
    """Delayed scaling: neither norm nor activation; current scaling: no activation; blocks and wide gradients: both."""
    made, x = te.LayerNormMLP(32, 48, activation="swiglu", device="cpu"), random(5, 32, grad=True)
    first = te.LayerNormLinear(32, 48, normalization="RMSNorm", device="cpu")
    monkeypatch.setattr(layernorm_mlp, "call", refuse)
    for name in ("delayed", "delayed-e4m3", "current"):
        train(made, RECIPES[name], x)
    monkeypatch.setattr(_norm, "normalize", refuse)
    for module in (made, first):
        for name in ("delayed", "delayed-e4m3"):
            train(module, RECIPES[name], x)
        for name in ("current", "blocks", "delayed-wide-wgrad"):
            with pytest.raises(AssertionError, match="pass of its own"):
                train(module, RECIPES[name], x)
    monkeypatch.undo()
    monkeypatch.setattr(_mlp.MLP, "apply", refuse)
    for name in ("blocks", "delayed-wide-wgrad"):
        train(made, RECIPES[name], x)


def parts_of(made):
    """The same layer of layers that share its parameters, norm and activation between them."""
    norm = te.LayerNorm(32, device="cpu")
    norm.weight, norm.bias = made.layer_norm_weight, made.layer_norm_bias
    gated = ACTIVATIONS[made.activation][1]
    first = te.Linear(32, 96 if gated else 48, device="cpu")
    second = te.Linear(48, 32, device="cpu")
    first.weight, first.bias = made.fc1_weight, made.fc1_bias
    second.weight, second.bias = made.fc2_weight, made.fc2_bias

    class Parts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.first, self.second = norm, first, second

        def forward(self, x):
            op = torch.ops.apex.bias_activation_forward.default
            return self.second(op(self.first(self.norm(x)), None, *ACTIVATIONS[made.activation]))

    return Parts()


@ONE_SCALE
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "srelu"])
def test_layers_of_halves(activation, dtype, of):
    """Not farther from the values without FP8 than the layer's parts are, which round to halves between them."""
    torch.manual_seed(0)
    made = te.LayerNormMLP(32, 48, activation=activation, params_dtype=dtype, device="cpu")
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.2 if parameter.dim() == 1 else 0.0, 0.2)
    parts, grad = parts_of(made), random(64, 32, seed=1, dtype=dtype)
    names = [name for name, _ in made.named_parameters()]
    results = []
    for module, recipe in ((made, of), (parts, of), (copy.deepcopy(made).double(), None)):
        x = random(64, 32, dtype=dtype).to(next(module.parameters()).dtype).requires_grad_()
        y = train(module, recipe, x, grad.to(x.dtype), steps=1 if recipe is None else 3)
        owner = module if recipe is None else made
        results.append((y, x.grad, *(p.grad for p in owner.parameters())))
    for name, found, other, exact in zip(["y", "x", *names], *results, strict=True):
        assert found.dtype == other.dtype == dtype
        error, allowed = (((t.double() - exact).norm() / exact.norm()).item() for t in (found, other))
        assert error < 1.2 * allowed + 0.002, f"{name}: {error}, of parts {allowed}"


@ONE_SCALE
@pytest.mark.parametrize("frozen", ["layer_norm", "fc1_weight", "fc1", "fc2_weight", "fc2", "all", "input"])
def test_parts_that_are_frozen(frozen, of):
    """No gradient of what wants none; those of the others stay as they were."""
    made = te.LayerNormMLP(32, 48, device="cpu")
    other, grad = copy.deepcopy(made), random(8, 32, seed=1)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not (name.startswith(frozen) or frozen == "all"))
    x, x2 = random(8, 32, grad=frozen != "input"), random(8, 32, grad=True)
    train(made, of, x, grad)
    train(other, of, x2, grad)
    assert (x.grad is None) if frozen == "input" else torch.equal(x.grad, x2.grad)
    for p, q in zip(made.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad) if p.requires_grad else p.grad is None


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_autocast(dtype):
    """Parameters and inputs in float32: the norm is of the input as it is, and gradients have its dtype."""
    made, x = te.LayerNormMLP(32, 48, activation="geglu", device="cpu"), random(8, 32, dtype=dtype, grad=True)
    for _ in range(2):
        made.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype=BF16), te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
            y = made(x)
        y.float().square().sum().backward()
    assert y.dtype == BF16 and x.grad.dtype == dtype
    assert all(p.grad.dtype == F32 and p.grad.isfinite().all() for p in made.parameters())
    wide = copy.deepcopy(made)
    expected = wide(x.float())
    assert (y - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.minutes)])
@ONE_SCALE
@pytest.mark.parametrize("make", [te.LayerNormLinear, te.LayerNormMLP])
def test_compiled_without_breaks(make, of, backend):
    torch_defaults.skip_compiled("layers of apex.transformer_engine")
    made = make(32, 48, device="cpu")
    other, x, x2 = copy.deepcopy(made), random(8, 32, grad=True), random(8, 32, grad=True)
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    for _ in range(3):
        torch.testing.assert_close(train(compiled, of, x), train(other, of, x2), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.grad, x2.grad, rtol=1e-4, atol=1e-5)
        for p, q in zip(made.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
    with te.fp8_autocast():  # of which each has new scales
        pass
    for name in ("scaling_fwd", "scaling_bwd"):
        torch.testing.assert_close(made.fp8_meta[name].amax_history, other.fp8_meta[name].amax_history)


@pytest.mark.gpu
@ONE_SCALE
@pytest.mark.parametrize("make", [te.LayerNormLinear, te.LayerNormMLP])
def test_on_a_card(make, of):
    """As on the CPU, but for codes that roundings of sums move."""
    made = make(64, 96, params_dtype=BF16, device="cpu")
    other, results = copy.deepcopy(made).to("cuda"), []
    for module, device in ((made, "cpu"), (other, "cuda")):
        x = random(48, 64, dtype=BF16, device=device, grad=True)
        y = train(module, of, x, steps=3)
        results.append(
            [t.detach().double().cpu() for t in (y, x.grad, *(p.grad for p in module.parameters()))]
        )
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found - expected).norm() < 0.05 * expected.norm()


@ONE_SCALE
def test_second_derivatives_are_refused(of):
    made, x = te.LayerNormMLP(32, 48, device="cpu"), random(8, 32, grad=True)
    with te.fp8_autocast(fp8_recipe=of):
        y = made(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


@ONE_SCALE
@pytest.mark.parametrize("leading", [(0,), (), (2, 0), (2, 3, 1)], ids=str)
def test_any_leading_dimensions(leading, of):
    for make in (te.LayerNormLinear, te.LayerNormMLP):
        made, x = make(16, 16, device="cpu"), random(*leading, 16, grad=True)
        y = train(made, of, x)
        assert y.shape == x.shape == x.grad.shape
        assert all(p.grad.isfinite().all() for p in made.parameters())


@ONE_SCALE
@pytest.mark.parametrize("dtype, main", [(F32, F32), (BF16, F32)], ids=str)
def test_main_gradients(of, dtype, main):
    """Both weights' gradients are added; the cast weights of the first microbatch serve again."""
    made = te.LayerNormMLP(32, 48, params_dtype=dtype, fuse_wgrad_accumulation=True, device="cpu")
    plain = te.LayerNormMLP(32, 48, params_dtype=dtype, device="cpu")
    plain.load_state_dict(made.state_dict())
    for weight in (made.fc1_weight, made.fc2_weight):
        weight.main_grad = torch.full_like(weight, 9.0, dtype=main)
    x, grad = random(8, 32, dtype=dtype), random(8, 32, seed=1, dtype=dtype)
    sums = [0.0, 0.0]
    for first in (True, False):
        train(made, of, x, grad, is_first_microbatch=first)
        train(plain, of, x, grad, is_first_microbatch=first)
        sums = [s + w.grad.double() for s, w in zip(sums, (plain.fc1_weight, plain.fc2_weight), strict=True)]
    for weight, total in zip((made.fc1_weight, made.fc2_weight), sums, strict=True):
        assert weight.grad is None
        near(weight.main_grad, total, dtype, units=16)
