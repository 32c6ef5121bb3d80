"""The functions of public apex's transducer_loss_cuda, in its argument orders. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy import _checks
from apex._legacy._raw import raw as _raw
from apex._loader import bindings

bindings.load()
__all__ = ["backward", "forward"]


def _whole_and_rest(log_p):
    """As the op takes alpha and beta."""
    whole = log_p.round().masked_fill(~log_p.isfinite(), 0)
    return torch.stack((whole, log_p - whole), -1)


@_raw
def forward(x, label, fLen, yLen, batchOffset, maxFLen, blankIdx, opt, packedInput):
    """[alpha, beta, loss] of logarithms of probabilities: x has been through log_softmax.

    x: [batch, frames, labels + 1, classes], or with packedInput [rows, classes]; batchOffset and maxFLen count then
    alone. opt chooses nothing here. alpha, beta: [batch, frames, labels + 1], float32 (float64 of float64).
    """
    if packedInput:
        _checks.given("transducer_loss_cuda.forward", batchOffset=batchOffset)
    loss, alpha, beta, _ = torch.ops.apex.transducer_loss_forward(
        x, label, fLen, yLen, blankIdx, batchOffset if packedInput else None, maxFLen, True
    )
    return [alpha.sum(-1), beta.sum(-1), loss]


@_raw
def backward(
    x,
    lossGrad,
    alpha,
    beta,
    fLen,
    yLen,
    label,
    batchOffset,
    maxFLen,
    blankIdx,
    opt,
    fuseSoftmaxBackward,
    packedInput,
):
    """The gradient of x, or with fuseSoftmaxBackward that of the logits that log_softmax made x from."""
    if packedInput:
        _checks.given("transducer_loss_cuda.backward", batchOffset=batchOffset)
    return torch.ops.apex.transducer_loss_backward(
        lossGrad,
        x,
        label,
        fLen,
        yLen,
        _whole_and_rest(alpha),
        _whole_and_rest(beta),
        None,
        blankIdx,
        batchOffset if packedInput else None,
        fuseSoftmaxBackward,
    )
