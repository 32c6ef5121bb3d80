"""The functions of public apex's transducer_joint_cuda, in its argument orders. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy import _checks
from apex._legacy._raw import raw as _raw
from apex._loader import bindings
from apex._random import new_seed
from apex.contrib.transducer._mask import mask_of
from apex.reference import _masks

bindings.load()
__all__ = ["backward", "forward"]


@_raw
def forward(
    f, g, fLen, gLen, batchOffset, packedBatch, opt, packOutput, relu, dropout, dropoutProb, tileSize
):
    """[output], or [output, mask] with relu or dropout: mask is uint8 of the output's shape, 1 where a value passed.

    f: [batch, frames, hidden]. g: [batch, labels, hidden]. fLen, gLen: [batch], int32 or int64. batchOffset and
    packedBatch count with packOutput alone. opt and tileSize choose nothing here.
    """
    if packOutput:
        _checks.given("transducer_joint_cuda.forward", batchOffset=batchOffset)
    probability = float(dropoutProb) if dropout else 0.0
    output, bits = torch.ops.apex.transducer_joint_forward(
        f,
        g,
        fLen,
        gLen,
        batchOffset if packOutput else None,
        int(packedBatch) if packOutput else 0,
        relu,
        probability,
        new_seed(f.device) if probability else None,
    )
    if not relu and not dropout:
        return [output]
    return [output, mask_of(output, bits, relu)]


@_raw
def backward(inputs, fLen, gLen, batchOffset, maxFLen, maxGLen, packOutput, scale):
    """[gradient of f, of g]; inputs: [gradient of the output], or with forward's mask behind it."""
    if packOutput:
        _checks.given("transducer_joint_cuda.backward", batchOffset=batchOffset)
    mask = None
    if len(inputs) > 1:
        if inputs[1].shape != inputs[0].shape:
            raise ValueError(
                f"transducer_joint_cuda.backward: the mask's shape {list(inputs[1].shape)} is not the gradient's, "
                f"{list(inputs[0].shape)}"
            )
        mask = _masks.pack(inputs[1])
    return list(
        torch.ops.apex.transducer_joint_backward(
            inputs[0],
            None,
            None,
            mask,
            fLen,
            gLen,
            batchOffset if packOutput else None,
            maxFLen,
            maxGLen,
            scale,
        )
    )
