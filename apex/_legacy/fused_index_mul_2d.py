"""The functions of public apex's fused_index_mul_2d: they write to the caller's tensors and record no gradients.

float_* and half_* are the same functions; they take float32, float16, bfloat16 and float64. Tensors that are written
must have the dtype, shape and device of what they hold: TypeError or ValueError, before anything is.
"""

from __future__ import annotations

import torch

from apex._legacy import _checks
from apex._legacy._raw import raw as _raw
from apex._loader import bindings

bindings.load()
_ops = torch.ops.apex

__all__ = [
    "float_backward",
    "float_backward_backward",
    "float_forward",
    "half_backward",
    "half_backward_backward",
    "half_forward",
]


@_raw
def float_forward(out, in1, in2, idx1):
    """out = in1[idx1] * in2"""
    _checks.written("fused_index_mul_2d.forward", out=(out, in2))
    out.copy_(_ops.index_mul_2d_forward(in1, in2, idx1))


@_raw
def float_backward(grad_in1, grad_in2, grad_out, in1, in2, idx1):
    """Adds in1's gradient to grad_in1, which callers zero, and writes in2's to grad_in2."""
    _checks.written("fused_index_mul_2d.backward", grad_in1=(grad_in1, in1), grad_in2=(grad_in2, in2))
    first, second = _ops.index_mul_2d_backward(grad_out, in1, in2, idx1)
    grad_in1.add_(first)
    grad_in2.copy_(second)


@_raw
def float_backward_backward(
    grad_grad_out, grad_in1, grad_in2, grad_out, grad_grad_in1, grad_grad_in2, in1, in2, idx1
):
    """The gradients of float_backward's inputs: adds to grad_in1, writes grad_in2 and grad_grad_out."""
    _checks.written(
        "fused_index_mul_2d.backward_backward",
        grad_grad_out=(grad_grad_out, grad_out),
        grad_in1=(grad_in1, in1),
        grad_in2=(grad_in2, in2),
    )
    product = _ops.index_mul_2d_forward
    grad_grad_out.copy_(product(grad_grad_in1, in2, idx1) + product(in1, grad_grad_in2, idx1))
    grad_in1.add_(_ops.index_mul_2d_backward(grad_out, in1, grad_grad_in2, idx1, True, False)[0])
    grad_in2.copy_(product(grad_grad_in1, grad_out, idx1))


half_forward, half_backward, half_backward_backward = float_forward, float_backward, float_backward_backward
