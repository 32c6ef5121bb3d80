"""te.Float8Tensor: made of codes and of values, seen and written by torch's functions, differentiable."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from te_common import (
    DEVICES,
    RECIPES,
    clean,  # noqa: F401  a fixture
    random,
    train,
)

import apex.transformer_engine.pytorch as te
from apex.reference import fp8 as reference
from apex.transformer_engine.pytorch import _formats, constants

pytestmark = pytest.mark.usefixtures("clean")
F32, BF16 = torch.float32, torch.bfloat16
E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
ON = pytest.mark.parametrize("device", DEVICES)
STEP = {E4M3: 2.0**-3, E5M2: 2.0**-2}
EMPTY = {"scaling_fwd": constants.FP8TensorMeta()}
OF_THREE = {"scaling_fwd": constants.FP8TensorMeta(*[torch.ones(3, dtype=F32, device="cpu")] * 2)}
NO_STATE = {"fp8_meta": {}, "fp8_meta_index": 0}


def number(value, device="cpu"):
    return torch.full((1,), value, dtype=F32, device=device)


@ON
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=lambda d: d.name)
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (31,), (7, 11), (2, 3, 5, 3)], ids=str)
def test_made_of_values(device, kind, dtype, shape):
    x, (amax, inverse) = (
        random(*shape, dtype=dtype, device=device),
        (number(0.25, device), number(0.0, device)),
    )
    made = te.Float8Tensor.to_float8(
        x, fp8_dtype=kind, scale=number(3.5, device), amax=amax, scale_inv=inverse
    )
    of = constants.fp8_dtype(kind, x.device)
    wanted = reference.quantize(x.reshape(-1), number(3.5, device), of)
    assert (
        made.shape == x.shape and made.dtype == dtype and made.device == x.device and made._fp8_dtype == kind
    )
    assert torch.equal(made._data.reshape(-1), wanted.view(torch.uint8)) and made._data.dtype == torch.uint8
    assert (
        amax == x.abs().max().float().clamp_min(0.25)
        and inverse == 1 / number(3.5, device) == made._scale_inv
    )
    for to in (None, F32, BF16):
        back = made.from_float8(to)
        assert type(back) is torch.Tensor and back.dtype == (to or dtype)
        assert torch.equal(back.reshape(-1), reference.dequantize(wanted, inverse, to or dtype))
    assert torch.equal(made.dequantize(dtype=F32), made.from_float8(F32))


@ON
def test_made_of_codes(device):
    codes = torch.arange(24, dtype=torch.uint8, device=device).view(4, 6)
    made = te.Float8Tensor(data=codes, fp8_dtype=E5M2, fp8_scale_inv=0.375, dtype=BF16)
    of = _formats.formats(codes.device)[1]
    assert torch.equal(made.dequantize(), reference.dequantize(codes.view(of), number(0.375, device), BF16))
    assert (
        not made.requires_grad and te.Float8Tensor(codes, fp8_scale_inv=1, requires_grad=True).requires_grad
    )
    same = te.Float8Tensor(codes.view(of), fp8_scale_inv=number(0.375, device), dtype=BF16)
    assert same._fp8_dtype == E5M2 and torch.equal(same.dequantize(), made.dequantize())
    turned = te.Float8Tensor.make_like(made, data=made.transpose_2d())
    assert torch.equal(turned.dequantize(), made.dequantize().t())
    made._data.zero_()  # the codes' own memory
    assert not codes.any() and not made.dequantize().any()
    for error, text, call in (
        (ValueError, "fp8_scale_inv", lambda: te.Float8Tensor(codes)),
        (TypeError, "uint8 or FP8", lambda: te.Float8Tensor(codes.float(), fp8_scale_inv=1)),
        (ValueError, "fp8_meta_index", lambda: te.Float8Tensor(codes, fp8_meta={})),
        (ValueError, 'has no "scaling_fwd"', lambda: te.Float8Tensor(codes, fp8_meta={}, fp8_meta_index=0)),
        (ValueError, 'has no "scaling_bwd"', lambda: te.Float8Tensor(codes, None, EMPTY, False, 0)),
        (ValueError, "is 3, but", lambda: te.Float8Tensor(codes, None, OF_THREE, True, 3)),
        (ValueError, 'has no "scaling_fwd"', lambda: te.Float8Tensor.to_float8(random(3), **NO_STATE)),
        (ValueError, "fp8_attrs", lambda: te.Float8Tensor(codes, fp8_attrs={}, fp8_scale_inv=1)),
        (ValueError, "matrix", lambda: te.Float8Tensor(codes[0], fp8_scale_inv=1).transpose_2d()),
        (TypeError, "FP8 dtypes", lambda: te.Float8Tensor.to_float8(random(3), fp8_dtype=F32)),
    ):
        with pytest.raises(error, match=text):
            call()


@ON
def test_a_meta_without_a_state_serves_where_its_scale_is_not_needed(device):
    """As before the first step of the public engine's layers: the scale that is given is taken."""
    codes, x = torch.arange(24, dtype=torch.uint8, device=device), random(24, device=device)
    for meta in ({}, EMPTY):
        made = te.Float8Tensor(codes.clone(), fp8_meta=meta, fp8_meta_index=0, fp8_scale_inv=0.5)
        assert torch.equal(made.from_float8(), te.Float8Tensor(codes, fp8_scale_inv=0.5).from_float8())
        made.copy_(x)
        assert torch.allclose(made.from_float8(), x, rtol=2.0**-3, atol=2.0**-9)
        cast = te.Float8Tensor.to_float8(x, fp8_meta=meta, fp8_meta_index=0, scale=number(2.0, device))
        assert cast._scale_inv == 0.5


@ON
def test_torch_s_functions(device):
    x, y = (te.Float8Tensor.to_float8(random(23, seed=s, device=device)) for s in (0, 1))
    a, b = x.from_float8(), y.from_float8()
    assert torch.equal(-x, -a) and torch.equal(x.abs(), a.abs()) and torch.equal(torch.sin(x), torch.sin(a))
    assert torch.equal(x + y, a + b) and torch.equal(x * b, a * b) and torch.equal(a - y, a - b)
    assert torch.equal(x.view(23, 1), a.view(23, 1)) and torch.equal(x[3:7], a[3:7])
    assert type(x.detach()) is type(x.clone()) is type(copy.deepcopy(x)) is te.Float8Tensor
    assert type(x + y) is torch.Tensor
    for written in (
        lambda t, o: t.add_(o),
        lambda t, o: t.sub_(o),
        lambda t, o: t.mul_(o),
        lambda t, o: t.copy_(o),
    ):
        wanted = written(x.from_float8(), b)
        written(x, y)
        assert type(x) is te.Float8Tensor and torch.allclose(
            x.from_float8(), wanted, rtol=2.0**-3, atol=2.0**-9
        )
    assert x.quantize_(a) is x and torch.allclose(x.from_float8(), a, rtol=2.0**-3, atol=2.0**-9)


@ON
@pytest.mark.parametrize("kinds", [("kFloat8E4M3", "kFloat8E4M3"), ("kFloat8E5M2", "kFloat8E4M3")])
def test_a_copy_of_another_one_is_not_rounded_again(device, kinds):
    """Of the same format: the codes and the scale go over; of another, the values are cast."""
    target, source = (
        te.Float8Tensor.to_float8(
            random(7, 5, seed=s, device=device), fp8_dtype=getattr(te.DType, kind), scale=number(1.3, device)
        )
        for s, kind in enumerate(kinds)
    )
    assert target.copy_(source) is target and target._fp8_dtype == getattr(te.DType, kinds[0])
    same = kinds[0] == kinds[1]
    assert torch.equal(target.from_float8(), source.from_float8()) == same
    assert torch.allclose(target.from_float8(), source.from_float8(), rtol=2.0**-2, atol=2.0**-9)
    source.zero_()
    assert target.from_float8().abs().max() > 0  # memory of its own


@ON
def test_a_copy_into_a_layer_s_weight_takes_the_state_s_scale(device):
    made = te.Linear(32, 32, device=device)
    meta = {"scaling_fwd": made._state.forward}
    target = te.Float8Tensor.to_float8(random(8, device=device), fp8_meta=meta, fp8_meta_index=1)
    source = te.Float8Tensor.to_float8(random(8, seed=1, device=device) * 8, scale=number(2.0, device))
    target.copy_(source)
    assert (
        target._scale_inv == 1 and made._state.forward.amax_history[0, 1] == source.from_float8().abs().max()
    )


@ON
def test_by_a_layer_s_state(device):
    """In-place writes take the scale that stands there then, and record the magnitude."""
    made, x = te.Linear(32, 32, device=device), random(23, device=device)
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        made(random(8, 32, device=device))
    scaling = made.fp8_meta["scaling_fwd"]
    made_of = te.Float8Tensor.to_float8(
        x, fp8_meta=made.fp8_meta, fp8_meta_index=constants.FP8FwdTensors.GEMM1_WEIGHT
    )
    assert made_of._scale_inv == 1 and scaling.amax_history[0, 1] >= x.abs().max()
    for scale in (2.0, 4.0):
        scaling.scale[1] = scale
        target = made_of if scale == 2 else made_of.detach()
        target.add_(0)
        assert made_of._scale_inv == 1 / scale and torch.allclose(
            made_of.from_float8(), x, rtol=2.0**-3, atol=2.0**-8
        )
    made_of.mul_(100)
    assert scaling.amax_history[0, 1] >= 90 * x.abs().max()
    codes = made_of._data.clone()
    of_meta = te.Float8Tensor(codes, fp8_meta=made.fp8_meta, fp8_meta_index=1)
    assert of_meta._scale_inv == scaling.scale_inv[1]


@ON
def test_gradients_go_through_casts(device):
    x, grad = random(7, 11, device=device, grad=True), random(7, 11, seed=1, device=device)
    made = te.Float8Tensor.to_float8(x, scale=number(2.0, device))
    assert made.requires_grad
    (made * 3).backward(grad)
    assert torch.equal(x.grad, 3 * grad)
    leaf = te.Float8Tensor.to_float8(x.detach()).requires_grad_()
    leaf.from_float8(BF16).backward(grad.to(BF16))
    assert torch.equal(leaf.grad, grad.to(BF16).float())


@ON
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_layers_of_fp8_weights_train_within_and_outside_of_autocast(device, enabled, kind):
    """Weights have gradients either way; outside, the very ones of the values."""
    with te.fp8_model_init():
        made = getattr(te, kind)(32, 48, device=device)
    weights = {n: p for n, p in made.named_parameters() if isinstance(p, te.Float8Tensor)}
    assert len(weights) == (2 if kind == "LayerNormMLP" else 1)
    x = random(8, 32, device=device, grad=True)
    grad = random(8, 48 if kind != "LayerNormMLP" else 32, seed=1, device=device)
    if enabled:
        train(made, RECIPES["current"], x, grad)
    else:
        made(x).backward(grad)
        plain = getattr(te, kind)(32, 48, device=device)
        plain.load_state_dict(made.state_dict())
        plain(x.detach()).backward(grad)
        for name, weight in weights.items():
            assert torch.equal(weight.grad, plain.get_parameter(name).grad), name
    assert all(weight.grad is not None and weight.grad.any() for weight in weights.values())


@ON
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_gradients_of_fp8_weights_are_added_within_and_outside_of_autocast(device, enabled, kind):
    sums, x = [], random(8, 32, device=device)
    grad = random(8, 48 if kind != "LayerNormMLP" else 32, seed=1, device=device)
    for fuses in (False, True):
        torch.manual_seed(1)
        with te.fp8_model_init(recipe=RECIPES["current"]):
            made = getattr(te, kind)(32, 48, device=device, fuse_wgrad_accumulation=fuses)
        weights = [p for p in made.parameters() if isinstance(p, te.Float8Tensor)]
        for weight in weights if fuses else ():
            weight.main_grad = torch.ones(weight.shape, dtype=F32, device=device)
        with te.fp8_autocast(enabled=enabled, fp8_recipe=RECIPES["current"]):
            y = made(x)
        y.backward(grad)
        assert not fuses or all(weight.grad is None for weight in weights)
        sums.append([weight.main_grad - 1 if fuses else weight.grad for weight in weights])
    for plain, added in zip(*sums, strict=True):
        assert plain.any() and torch.allclose(added, plain, rtol=1e-4, atol=1e-5)


@ON
def test_files(device):
    scale = torch.full((1,), 2, dtype=torch.int64, device=device)  # of any dtype
    made, file = te.Float8Tensor.to_float8(random(2, 3, 5, device=device), scale=scale), io.BytesIO()
    torch.save(made, file)
    wanted = made.from_float8()
    made._data.zero_()
    for only in (True, False):
        found = torch.load(io.BytesIO(file.getvalue()), weights_only=only)
        assert type(found) is te.Float8Tensor and torch.equal(found.from_float8(), wanted)
        assert found._scale_inv == 0.5 and found.dtype == made.dtype


WRITES = {
    "foreach_add_": lambda w: torch._foreach_add_([w], 1.0),
    "out=": lambda w: torch.add(w.dequantize(), 1.0, out=w),
    "SGD": lambda w: torch.optim.SGD([w], lr=1.0, foreach=True).step(),
    "AdamW": lambda w: torch.optim.AdamW([w], lr=1.0, eps=0.0, weight_decay=0.0, foreach=True).step(),
    "fused": lambda w: torch.optim.Adam([w], lr=1.0, eps=0.0, fused=True).step(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_of_lists_and_of_out_are_kept(name):
    values = 4 * random(16, 16)
    weight = te.Float8Tensor.to_float8(values).detach().requires_grad_()
    before = weight.dequantize().detach().clone()
    weight.grad = -torch.ones(16, 16, dtype=F32, device="cpu")
    with torch.no_grad():
        WRITES[name](weight)
    assert (weight.dequantize() - (before + 1)).abs().max() <= (before + 1).abs().max() * STEP[E4M3] / 2
    assert (weight.dequantize() - before).mean() > 0.9


def test_dtypes_that_hold_no_such_numbers_are_plain():
    made = te.Float8Tensor.to_float8(torch.tensor([0.0, 1.0, -2.0], dtype=F32, device="cpu"))
    for dtype in (torch.int32, torch.bool, torch.complex64):
        assert type(made.to(dtype)) is torch.Tensor
        assert torch.equal(made.to(dtype), made.dequantize().to(dtype))
    wide = made.double()
    assert torch.equal(wide + 1, made.dequantize().double() + 1) and (wide + 1).dtype == torch.float64
    assert torch.equal(wide.mul_(2.0).dequantize(), made.dequantize().double() * 2)


def test_copies_share_no_main_gradient():
    with te.fp8_model_init():
        layer = te.Linear(16, 16, device="cpu")
    layer.weight.main_grad = torch.zeros(16, 16, dtype=F32, device="cpu")
    other = copy.deepcopy(layer)
    other.weight.main_grad.add_(1.0)
    assert not layer.weight.main_grad.any()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (dict(scale=2.0), TypeError, "scale must be a float32 tensor"),
        (dict(scale=torch.ones(3, dtype=F32, device="cpu")), ValueError, "scale must have one element"),
        (
            dict(scale_inv=torch.ones(3, dtype=F32, device="cpu")),
            ValueError,
            "scale_inv must have one element",
        ),
    ],
)
def test_scales_that_are_no_number(given, error, words):
    with pytest.raises(error, match=words):
        te.Float8Tensor.to_float8(random(4, 4), **given)
    with pytest.raises(ValueError, match="fp8_scale_inv must have one element"):
        codes = torch.zeros(4, dtype=torch.uint8, device="cpu")
        te.Float8Tensor(codes, fp8_scale_inv=torch.ones(2, dtype=F32, device="cpu"))
    for wrong in (None, random(4).int(), random(4).double()):
        with pytest.raises(TypeError, match="to_float8 takes"):
            te.Float8Tensor.to_float8(wrong)
