"""CPU variants of tensors larger than caches: outputs written past these, rows asked for ahead, the same bits."""

from __future__ import annotations

import pytest
import torch
import torch_defaults

from apex.contrib.group_norm import GroupNorm
from apex.contrib.index_mul_2d import index_mul_2d
from apex.normalization.fused_add_norm import fused_add_layer_norm, fused_add_rms_norm
from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
from apex.parallel import SyncBatchNorm
from apex.transformer.functional import fused_bias_squared_relu, fused_bias_swiglu, fused_softmax

BYTES = 18 << 20  # more than are kept; those of a quarter are not
# Rows whose ends are those of cache lines, and rows whose are not.
WIDTHS = 2048, 2046


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, device="cpu")


def layer_norm(width, dtype):
    w, b = numbers(width, dtype=dtype), numbers(width, dtype=dtype)
    return 1, lambda x: fused_layer_norm_affine(x, w, b, (width,))


def rms_norm(width, dtype):
    w = numbers(width, dtype=dtype)
    return 1, lambda x: fused_rms_norm_affine(x, w, (width,), 1e-5)


def add_layer_norm(width, dtype):
    w, b = numbers(width, dtype=dtype), numbers(width, dtype=dtype)
    return 2, lambda x, r: torch.cat(fused_add_layer_norm(x, r, w, b), -1)


def add_rms_norm(width, dtype):
    w = numbers(width, dtype=dtype)
    return 2, lambda x, r: torch.cat(fused_add_rms_norm(x, r, w), -1)


def swiglu(width, dtype):
    b = numbers(width, dtype=dtype)
    return 1, lambda x: fused_bias_swiglu(torch.cat((x, x.flip(-1)), -1), torch.cat((b, b)))


def squared_relu(width, dtype):
    return 1, fused_bias_squared_relu


def softmax(width, dtype):
    return 1, lambda x: fused_softmax.ScaledSoftmax.apply(x[:, None, None], 0.5).flatten(1)


def group_norm(width, dtype):
    layer = GroupNorm(2, 22, dtype=dtype, device="cpu")

    def run(x):
        images = x.view(len(x) // 11, 22, width // 2, 1)
        return layer(images).view_as(x)

    return 1, run


def batch_norm(width, dtype):
    with torch_defaults.set_to(torch.float32, "cpu"):
        layer = SyncBatchNorm(width).eval()
    layer.running_mean.normal_(), layer.running_var.uniform_(0.5, 2)
    return 1, lambda x: layer(x[:, :, None, None].to(memory_format=torch.channels_last))[:, :, 0, 0]


def products(width, dtype):
    table, index = numbers(64, width, dtype=dtype), torch.arange(11, dtype=torch.int64, device="cpu") * 5
    return 1, lambda x: index_mul_2d(table, x, index.repeat(len(x) // 11))


MAKERS = (
    layer_norm, rms_norm, add_layer_norm, add_rms_norm, swiglu, squared_relu, softmax, group_norm, batch_norm, products
)  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_parts_of_a_large_tensor_have_its_bits(make, width, dtype):
    torch.manual_seed(0)
    quarter = BYTES // dtype.itemsize // width // 44 * 11  # images have 11 rows
    count, function = make(width, dtype)
    inputs = [numbers(4 * quarter, width).to(dtype).requires_grad_() for _ in range(count)]
    whole = function(*inputs)
    gradient = numbers(*whole.shape).to(whole.dtype)
    assert whole.numel() * whole.element_size() >= 16 << 20
    whole_grads = torch.autograd.grad(whole, inputs, gradient)
    for rows in torch.arange(4 * quarter, dtype=torch.int64, device="cpu").split(quarter):
        parts = [x.detach()[rows].requires_grad_() for x in inputs]
        part = function(*parts)
        assert torch.equal(part, whole[rows])
        for grad, of_whole in zip(torch.autograd.grad(part, parts, gradient[rows]), whole_grads, strict=True):
            assert torch.equal(grad, of_whole[rows])
