"""What the tests of apex.transformer_engine share: random tensors, recipes, and the layers' formulas in float64."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
import torch_defaults

import apex.transformer_engine.pytorch as te
from apex.reference import fp8
from apex.transformer_engine.common import recipe
from apex.transformer_engine.pytorch import _formats, _state

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=3),
    "delayed-e4m3": recipe.DelayedScaling(
        amax_history_len=2, fp8_format=recipe.Format.E4M3, amax_compute_algo="most_recent", margin=1
    ),
    "delayed-wide-wgrad": recipe.DelayedScaling(
        amax_history_len=1, override_linear_precision=(False, False, True)
    ),
    "current": recipe.Float8CurrentScaling(),
    "blocks": recipe.Float8BlockScaling(),
}
ALL_RECIPES = pytest.mark.parametrize("of", RECIPES.values(), ids=RECIPES)
# Of the activations of transformer_engine_extensions.
FORMULAS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "srelu": lambda x: F.relu(x).square(),
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "reglu": lambda x: F.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Hopper's tensor cores add FP8 products to 14 bits of the largest; on an H200 sums of 260 were off by 2^-13.5 of the
# largest sum.
TENSOR_CORES = 2.0**-12


def random(*shape, seed=0, dtype=torch.float32, device="cpu", grad=False):
    generator = torch.Generator(device="cpu").manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return values.to(device, dtype).requires_grad_(grad)


@pytest.fixture
def clean():
    """No state of another test is there, or stays; parameters are float32 on the CPU."""
    _state.forget()
    torch.manual_seed(0)
    with torch_defaults.set_to(torch.float32, "cpu" if torch_defaults.DEVICE else None):
        yield
    assert not _state.current.enabled and not _state.current.calibrating and _state.current.depth == 0
    _state.forget()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # it counts the compilations of a layer's code over all tests, and stops at eight


def layer(inputs=32, outputs=48, dtype=torch.float32, device="cpu", **options):
    """A te.Linear whose bias is not 0."""
    torch.manual_seed(3)
    made = te.Linear(inputs, outputs, params_dtype=dtype, device=device, **options)
    if made.bias is not None:
        torch.nn.init.normal_(made.bias)
    return made


def values(x, dtype, scale=None, block=None):
    """What a cast keeps of a matrix, in float64. scale: of it; None: of its own. block: a scale for each instead."""
    x = x.detach()
    if block is not None:
        q, inverse = fp8.quantize_blocks(x, dtype, block)
        return fp8.dequantize_blocks(q, inverse, torch.float32, block).double()
    if scale is None:
        scale = fp8.current_scale(fp8.largest_magnitude(x), torch.finfo(dtype).max)
    q = fp8.from_codes(fp8.quantize(x, scale, dtype).view(torch.uint8), dtype)
    return q.double() / scale.double()


def wanted(of, x, weight, bias, grad, scales):
    """(output, gradients of input, weight, bias) of one product in float64. scales: of x, weight, grad, or None."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    backward = e5m2 if of.fp8_format is recipe.Format.HYBRID else e4m3
    if of.float8_block_scaling():
        row, square = (1, 128), (128, 128)
        xq, wq, gq = (
            values(x, e4m3, block=row),
            values(weight, e4m3, block=square),
            values(grad, backward, block=row),
        )
        xt, gt = (
            values(x.t().contiguous(), e4m3, block=row).t(),
            values(grad.t().contiguous(), backward, block=row),
        )
    else:
        xq, wq, gq = (
            values(t, d, s) for t, d, s in zip((x, weight, grad), (e4m3, e4m3, backward), scales, strict=True)
        )
        xt, gt = xq, gq.t()
    if of.delayed() and of.override_linear_precision[2]:
        xt, gt = x.detach().double(), grad.double().t()
    y = xq @ wq.t()
    return y if bias is None else y + bias.detach().double(), gq @ wq, gt @ xt, grad.double().sum(0)


def near(found, expected, dtype, units=4):
    """Within some roundings to dtype, of the largest number; or to what FP8 products of a card keep of theirs."""
    unit = units * max(EPSILON[dtype], EPSILON[found.dtype])
    if _formats.multiplies(found.device):
        unit = max(unit, TENSOR_CORES)
    scale = max(expected.abs().max().item(), 1e-6) if expected.numel() else 1.0
    torch.testing.assert_close(found.detach().double(), expected, rtol=unit, atol=unit * scale)


def train(module, of, x, grad=None, steps=1, **options):
    """The output of the last step."""
    for step in range(steps):
        module.zero_grad(set_to_none=True)
        x.grad = None
        with te.fp8_autocast(enabled=of is not None, fp8_recipe=of):
            y = module(x, **options)
        y.backward(random(*y.shape, seed=7 + step, dtype=y.dtype, device=y.device) if grad is None else grad)
    return y
