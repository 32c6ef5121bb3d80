"""The functions of public apex's focal_loss_cuda. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy import _checks
from apex._legacy._raw import raw as _raw
from apex._loader import bindings

bindings.load()
__all__ = ["backward", "forward"]


@_raw
def forward(
    cls_output, cls_targets_at_level, num_positives_sum, num_real_classes, alpha, gamma, smoothing_factor
):
    """[loss, gradient of the sum of the losses before it is divided by num_positives_sum]"""
    arguments = (cls_targets_at_level, num_positives_sum, num_real_classes, alpha, gamma, smoothing_factor)
    loss = torch.ops.apex.focal_loss_forward(cls_output, *arguments)
    one = torch.ones_like(num_positives_sum)
    arguments = (cls_targets_at_level, one, num_real_classes, alpha, gamma, smoothing_factor)
    return [loss, torch.ops.apex.focal_loss_backward(one, cls_output, *arguments)]


@_raw
def backward(grad_output, partial_grad, num_positives_sum):
    """The gradient of the logits: partial_grad, which is overwritten, as in public apex."""
    _checks.floating(
        "focal_loss_cuda.backward",
        grad_output=grad_output,
        partial_grad=partial_grad,
        num_positives_sum=num_positives_sum,
    )
    if not partial_grad.device == grad_output.device == num_positives_sum.device:
        raise ValueError(
            f"focal_loss_cuda.backward: tensors are on {grad_output.device}, {partial_grad.device} and "
            f"{num_positives_sum.device}"
        )
    scale = (grad_output.double() / num_positives_sum.double()).reshape(())
    return partial_grad.copy_(partial_grad.to(torch.promote_types(partial_grad.dtype, torch.float32)) * scale)
