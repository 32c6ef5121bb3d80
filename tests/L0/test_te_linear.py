"""te.Linear: values and gradients under every recipe, and what may be around it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch_defaults
from te_common import (
    ALL_RECIPES,
    DEVICES,
    RECIPES,
    clean,  # noqa: F401  a fixture
    layer,
    near,
    random,
    train,
    wanted,
)

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.pytorch import _formats, _products

pytestmark = pytest.mark.usefixtures("clean")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)


def scales_of(made):
    forward, backward = made.fp8_meta["scaling_fwd"].scale, made.fp8_meta["scaling_bwd"].scale
    return forward[0], forward[1], backward[0]


@pytest.mark.parametrize("device", DEVICES)
@DTYPES
@ALL_RECIPES
@pytest.mark.parametrize("shape", [(24, 32, 48), (7, 130, 260), (1, 5, 3)], ids=str)
def test_values_and_gradients(of, shape, dtype, device):
    """As a float64 product of what the casts keep; the second step has scales of the first."""
    rows, inputs, outputs = shape
    made, x = (
        layer(inputs, outputs, dtype, device),
        random(rows, inputs, dtype=dtype, device=device, grad=True),
    )
    train(made, of, x)
    grad = random(rows, outputs, seed=5, dtype=dtype, device=device)
    with te.fp8_autocast(fp8_recipe=of):
        scales = scales_of(made) if of.delayed() else (None,) * 3
        y = made(x)
    x.grad = made.weight.grad = made.bias.grad = None
    y.backward(grad)
    expected = wanted(of, x, made.weight, made.bias, grad, scales)
    for found, value in zip((y, x.grad, made.weight.grad, made.bias.grad), expected, strict=True):
        assert found.dtype == dtype
        near(found, value, dtype, units=8 if dtype == F32 else 4)


@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (2, 3, 1)], ids=str)
@ALL_RECIPES
def test_any_leading_dimensions(of, leading):
    made, x = layer(20, 12), random(*leading, 20, grad=True)
    y = train(made, of, x)
    assert y.shape == (*leading, 12) and x.grad.shape == x.shape and made.weight.grad.isfinite().all()


def test_inputs_without_a_gradient_and_frozen_weights():
    made, x = layer(), random(5, 32)
    train(made, RECIPES["current"], x)
    assert x.grad is None and made.weight.grad is not None
    made.weight.requires_grad_(False)
    x.requires_grad_()
    train(made, RECIPES["current"], x)
    assert made.weight.grad is None and x.grad is not None


def test_bias_is_returned_or_not_there():
    made, x = layer(return_bias=True), random(5, 32)
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        y, bias = made(x)
    assert bias is made.bias
    other = layer()
    other.load_state_dict(made.state_dict())
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        torch.testing.assert_close(other(x), y + bias, rtol=1e-6, atol=1e-6)
    plain = layer(bias=False)
    assert plain.bias is None and [name for name, _ in plain.named_parameters()] == ["weight"]
    assert train(plain, RECIPES["current"], x).shape == (5, 48)


def test_parts_have_names_of_their_own():
    made = te.Linear(32, 48, parameters_split=("q_", "k_", "v_"), device="cpu")
    assert [n for n, _ in made.named_parameters()] == [f"{a}_{b}" for a in "qkv" for b in ("weight", "bias")]
    one, x = layer(), random(5, 32)
    with torch.no_grad():
        one.weight.copy_(torch.cat([made.q_weight, made.k_weight, made.v_weight]))
        one.bias.zero_()
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        assert torch.equal(made(x), one(x))
    assert te.Linear(8, 12, parameters_split={"a": 4, "b": 8}, device="cpu").bweight.shape == (8, 8)
    with pytest.raises(ValueError):
        te.Linear(8, 12, parameters_split={"a": 4, "b": 4}, device="cpu")
    with pytest.raises(ValueError):
        te.Linear(8, 10, parameters_split=("a", "b", "c"), device="cpu")


@pytest.mark.parametrize(
    "options, error",
    [
        (dict(parallel_mode="both"), ValueError),
        (dict(fuse_wgrad_accumulation=True, parameters_split=("a", "b")), ValueError),
        (dict(ub_split_ag=True), NotImplementedError),
        (dict(unknown=False), TypeError),
    ],
)
def test_arguments_that_are_refused(options, error):
    with pytest.raises(error):
        layer(**options)


def test_arguments_of_forward_that_are_refused():
    made = layer()
    with pytest.raises(RuntimeError):
        made(random(5, 32), made.weight)
    with te.fp8_autocast(), pytest.raises(TypeError):
        layer(dtype=torch.float64)(random(5, 32).double())


def test_switches_that_are_off_are_accepted():
    layer(ub_split_ag=False, ub_name="qkv", skip_weight_param_allocation=False)


@DTYPES
def test_autocast_gives_its_dtype(dtype):
    made, x = layer(dtype=F32), random(5, 32, grad=True)
    with torch.autocast("cpu", dtype=BF16), te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        y = made(x.to(dtype))
    assert y.dtype == BF16
    y.float().sum().backward()
    assert x.grad.dtype == F32 and made.weight.grad.dtype == F32
    expected = wanted(
        RECIPES["current"], x.to(dtype), made.weight, made.bias, torch.ones_like(y), (None,) * 3
    )
    near(y, expected[0], BF16)
    near(made.weight.grad, expected[2], F32)


# ---- microbatches and main gradients -------------------------------------------------------------------------------


def test_weights_are_cast_once_for_all_microbatches(monkeypatch):
    made, x = layer(), random(5, 32, grad=True)
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        first = made(x, is_first_microbatch=True)
        with torch.no_grad():
            made.weight.zero_()
        second = made(x, is_first_microbatch=False)
        third = made(x)
    assert torch.equal(first, second) and torch.equal(third, made.bias.expand_as(third))


def test_a_cast_weight_is_forgotten_where_weights_are_loaded_or_moved():
    made, x = layer(), random(5, 32)
    for change in (lambda: made.load_state_dict(layer(bias=True).state_dict()), made.bfloat16, made.float):
        with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
            made(x, is_first_microbatch=True)
        assert made._cached
        change()
        assert not made._cached


@pytest.mark.parametrize("of", [None, *RECIPES.values()], ids=["none", *RECIPES])
@pytest.mark.parametrize("dtype, main", [(F32, F32), (BF16, F32), (BF16, BF16)], ids=str)
def test_main_gradients(of, dtype, main):
    """They add up; the first microbatch begins at 0; .grad stays None, or is what Megatron-LM looks for."""
    made, plain = layer(dtype=dtype, fuse_wgrad_accumulation=True), layer(dtype=dtype)
    made.weight.main_grad = torch.full((48, 32), 9.0, dtype=main, device="cpu")
    x, grad = random(5, 32, dtype=dtype), random(5, 48, seed=4, dtype=dtype)
    for first in (True, False):
        train(made, of, x, grad, is_first_microbatch=first)
    train(plain, of, x, grad)
    once = plain.weight.grad.double()
    train(plain, of, x, grad)
    near(made.weight.main_grad, once + plain.weight.grad.double(), dtype, units=16)
    assert made.weight.grad is None
    made.weight.grad_added_to_main_grad = False
    train(made, of, x, grad)
    assert made.weight.grad_added_to_main_grad and made.weight.grad.shape == (48, 32)


def test_a_weight_without_main_grad_is_named():
    made = layer(fuse_wgrad_accumulation=True)
    with te.fp8_autocast(), pytest.raises(ValueError, match="main_grad"):
        made(random(5, 32, grad=True)).sum().backward()


# ---- around it -----------------------------------------------------------------------------------------------------


def test_second_derivatives_are_refused():
    made, x = layer(), random(5, 32, grad=True)
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        y = made(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        y = made(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)  # of a gradient that has no history
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_functional_transforms_are_refused():
    made, x = layer(), random(5, 32)
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        for transform in (torch.func.grad, torch.func.jacrev):
            with pytest.raises(RuntimeError):
                transform(lambda x: made(x).sum())(x)
        with pytest.raises(RuntimeError):
            torch.func.vmap(made)(x)


def clones(made):
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    loaded = layer()
    loaded.load_state_dict(made.state_dict())
    return copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.load(file, weights_only=False), loaded


@ALL_RECIPES
def test_copies_go_on_as_the_layer_does(of):
    """Copied between a step and its new scales, too."""
    made, x = layer(), random(5, 32, grad=True)
    train(made, of, x, steps=2)
    copied = clones(made)
    expected = train(made, of, x)
    for other in copied:
        assert torch.equal(train(other, of, x), expected)
        assert torch.equal(other.weight.grad, made.weight.grad)


def test_the_state_moves_with_the_layer_and_keeps_its_dtype():
    made = layer()
    train(made, RECIPES["delayed"], random(5, 32))
    assert made.half().fp8_meta["scaling_fwd"].scale.dtype == F32
    shadow = layer(device="meta")
    assert shadow.weight.device.type == "meta" and shadow.fp8_meta["scaling_fwd"].scale.device.type == "cpu"
    shadow.to_empty(device="cpu")
    shadow.load_state_dict(layer().state_dict())
    train(shadow, RECIPES["delayed"], random(5, 32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.minutes)])
@ALL_RECIPES
def test_compiled_without_breaks(of, backend, device):
    torch_defaults.skip_compiled("layers of apex.transformer_engine")
    made, x = layer(130, 48, device=device), random(5, 130, device=device, grad=True)
    other, x2 = copy.deepcopy(made), random(5, 130, device=device, grad=True)
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    for step in range(3):
        grad = random(5, 48, seed=step, device=device)
        y, y2 = train(compiled, of, x, grad), train(other, of, x2, grad)
        for found, value in zip((y, x.grad, made.weight.grad), (y2, x2.grad, other.weight.grad), strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)
    with te.fp8_autocast():  # of which each has new scales
        pass
    for name in ("scaling_fwd", "scaling_bwd"):
        torch.testing.assert_close(made.fp8_meta[name].amax_history, other.fp8_meta[name].amax_history)


@pytest.mark.parametrize("of", [RECIPES["delayed"], RECIPES["current"]], ids=["delayed", "current"])
def test_an_autocast_inside_of_what_is_compiled(of):
    torch_defaults.skip_compiled("layers of apex.transformer_engine")
    made, x = layer(), random(5, 32)
    other = copy.deepcopy(made)

    def run(module, x):
        with te.fp8_autocast(fp8_recipe=of):
            return module(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for step in range(3):
        found, expected = compiled(made, (step + 1) * x), run(other, (step + 1) * x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        found.sum().backward()
        expected.sum().backward()


@ALL_RECIPES
@pytest.mark.parametrize("older", [False, True])
def test_checkpoints_repeat_every_bit(of, older):
    """Scales are those of the first time, magnitudes count once, and dropout is the same."""
    made = torch.nn.Sequential(layer(32, 32), torch.nn.Dropout(0.5), layer(32, 48))
    other, x, x2 = copy.deepcopy(made), random(5, 32, grad=True), random(5, 32, grad=True)
    for step in range(3):
        grad = random(5, 48, seed=step)
        for module, value, run in ((made, x, True), (other, x2, False)):
            torch.manual_seed(step)
            with te.fp8_autocast(fp8_recipe=of):
                if run and older:
                    y = te.checkpoint(module, False, None, None, value)
                else:
                    y = te.checkpoint(module, value) if run else module(value)
            y.backward(grad)
        assert torch.equal(x.grad, x2.grad)
        for p, q in zip(made.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    with te.fp8_autocast():  # of which each has new scales
        pass
    for ours, theirs in zip((made[0], made[2]), (other[0], other[2]), strict=True):
        for name in ("scaling_fwd", "scaling_bwd"):
            assert torch.equal(ours.fp8_meta[name].amax_history, theirs.fp8_meta[name].amax_history)


# ---- weights in FP8 alone --------------------------------------------------------------------------------------------


def narrow_layer(**options):
    torch.manual_seed(3)
    with te.fp8_model_init(**options):
        return te.Linear(32, 48, device="cpu")


@ALL_RECIPES
def test_weights_in_fp8_alone(of):
    made, x = narrow_layer(), random(5, 32, grad=True)
    wide = layer()
    with torch.no_grad():
        wide.weight.copy_(made.weight.dequantize())
        wide.bias.copy_(made.bias)
    assert made.weight._codes.dtype == torch.float8_e4m3fn and made.weight.dtype == F32
    assert torch.equal(made(x), wide(x))
    found, expected = train(made, of, x), train(wide, of, x)
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert type(made.weight.grad) is torch.Tensor
    near(made.weight.grad, wide.weight.grad.double(), F32, units=2**19)


def test_an_optimizer_writes_into_them():
    made = narrow_layer(preserve_high_precision_init_val=True)
    before = made.weight.dequantize()
    assert (made.weight.get_high_precision_init_val() - before).abs().max() < 0.01
    made.weight.clear_high_precision_init_val()
    assert made.weight.get_high_precision_init_val() is None
    optimizer = torch.optim.Adam(made.parameters(), lr=0.05)
    train(made, RECIPES["delayed"], random(5, 32))
    optimizer.step()
    step = (made.weight.dequantize() - before).abs()
    assert type(made.weight) is te.Float8Tensor and 0.04 < step.median() < 0.06


def test_they_are_copied_saved_and_loaded():
    made, x = narrow_layer(), random(5, 32)
    other = narrow_layer()
    state = made.state_dict()
    other.load_state_dict(state)
    wide = layer()
    wide.load_state_dict(state)
    assert type(state["weight"]) is torch.Tensor and torch.equal(wide.weight, made.weight.dequantize())
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), other, made.to("cpu")):
        assert type(copied.weight) is te.Float8Tensor and torch.equal(copied(x), made(x))
    assert made.bfloat16().weight.dtype == BF16


# ---- products --------------------------------------------------------------------------------------------------------


def test_what_serves_is_told():
    assert te.served("cpu") == {"formats": "OCP", "products": "emulated"}
    assert te.is_fp8_available() is True and te.is_fp8_available(return_reason=True) == (True, "")


@pytest.mark.parametrize(
    "arch, wanted", [("gfx942", _formats.FNUZ), ("gfx950", _formats.OCP), ("gfx90a", _formats.OCP)]
)
def test_formats_follow_the_device(monkeypatch, arch, wanted):
    monkeypatch.setattr(_formats, "_arch", lambda device: arch)
    assert _formats.formats(torch.device("cpu")) == wanted
    assert _formats.dtype_of(RECIPES["current"], torch.device("cpu"), False) == wanted[1]
    made, x = layer(), random(5, 32, grad=True)
    assert (train(made, RECIPES["current"], x) - made(x)).norm() < 0.08 * made(x).norm()


@pytest.mark.parametrize("shape", [(16, 16, 16), (3, 5, 7), (17, 48, 20)], ids=str)
def test_what_the_card_is_given_has_sizes_it_takes(monkeypatch, shape):
    """By a stand-in for torch._scaled_mm that asks for what cublasLt asks for."""
    seen = []

    def scaled_mm(a, b, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
        assert a.is_contiguous() and b.t().is_contiguous()
        assert a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0 and b.shape[1] % 16 == 0
        seen.append((a.shape, b.shape))
        found = a.float() @ b.float() * (scale_a * scale_b)
        return (found if bias is None else found + bias).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    m, n, k = shape
    a, b = (random(rows, k, seed=rows).to(torch.float8_e4m3fn) for rows in (m, n))
    scale, bias = torch.tensor(0.5, dtype=F32, device="cpu"), random(n)
    for dtype in (F32, BF16):
        for added in (None, bias.to(dtype)):
            arguments = (a, scale, b, scale, dtype, added)
            monkeypatch.setattr(_formats, "multiplies", lambda device: True)
            found = _products.product(*arguments)
            monkeypatch.setattr(_formats, "multiplies", lambda device: False)
            near(found, _products.product(*arguments).double(), dtype)
            assert found.shape == (m, n) and found.is_contiguous()
    assert len(seen) == 4
