"""The functions of public apex's xentropy_cuda. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy import _checks
from apex._legacy._raw import raw as _raw
from apex._loader import bindings, layout

bindings.load()
__all__ = ["__version__", "backward", "forward"]
__version__ = layout.version()


@_raw
def forward(input, labels, smoothing, half_to_float):
    """[losses, log of the sum of exp(logits)], one element a row; the second is float32 (float64 for float64).

    input: [rows, classes]. labels: [rows], int64 or int32; rows labelled -100 have loss 0. losses: of the
    input's dtype, or float32 with half_to_float.
    """
    losses, normalizers = torch.ops.apex.xentropy_forward(input, labels, smoothing, None, half_to_float)
    largest, total = normalizers.unbind(-1)
    return [losses, largest + total.log()]


@_raw
def backward(grad_loss, logits, max_log_sum_exp, labels, smoothing):
    """The gradient of the logits; max_log_sum_exp: of the forward, in any floating-point dtype."""
    _checks.floating("xentropy_cuda.backward", max_log_sum_exp=max_log_sum_exp)
    largest = max_log_sum_exp.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    normalizers = torch.stack((largest, torch.ones_like(largest)), -1)
    return torch.ops.apex.xentropy_backward(grad_loss, logits, labels, normalizers, smoothing)
