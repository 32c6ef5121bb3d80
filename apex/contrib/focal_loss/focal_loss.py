"""FocalLoss and focal_loss, with public apex's names and signatures."""

from __future__ import annotations

import torch

from apex._functional import call

_op = torch.ops.apex.focal_loss_forward.default


class FocalLoss:
    """Sigmoid focal loss: FocalLoss.apply(...), which takes what `focal_loss` takes.

    Has the face of an autograd.Function, `apply` and `forward`; the op behind is differentiable by itself. (No
    subclass: torch.compile would trace a backward that is not there.)
    """

    @classmethod
    def apply(cls, *arguments, **keywords):
        return cls.forward(None, *arguments, **keywords)

    @staticmethod
    def forward(
        ctx,
        cls_output,
        cls_targets_at_level,
        num_positives_sum,
        num_real_classes,
        alpha,
        gamma,
        label_smoothing=0.0,
    ):
        return call(
            "focal_loss",
            _op,
            1,
            (
                cls_output,
                cls_targets_at_level,
                num_positives_sum,
                num_real_classes,
                alpha,
                gamma,
                label_smoothing,
            ),
        )


def focal_loss(
    cls_output: torch.Tensor,
    cls_targets_at_level: torch.Tensor,
    num_positive_sum: torch.Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The sigmoid focal loss, summed and divided by the number of positives; one float32 (float64 for float64).

    Args:
        cls_output: [..., classes] logits, float16, bfloat16, float32 or float64; any number of classes.
        cls_targets_at_level: [...], int64 or int32: a class, -1 (or any number that is no class) for background,
            -2 for examples that do not count.
        num_positive_sum: a tensor of one element, which stays on the device and gets no gradient.
        num_real_classes: classes from here on are padding: no loss, gradient 0.
        alpha, gamma: weight of positives (negatives have 1 - alpha), and exponent of the modulating factor.
        label_smoothing: targets are 1 - label_smoothing / 2 and label_smoothing / 2.

    Neither forward nor backward writes to the logits, and the same input gives the same bits. Source: Lin et al.,
    Focal Loss for Dense Object Detection, 2017.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices that do not fit.
        NotImplementedError: forward mode, and the gradient of the gradient.
    """
    return FocalLoss.apply(
        cls_output,
        cls_targets_at_level,
        num_positive_sum,
        num_real_classes,
        alpha,
        gamma,
        label_smoothing,
    )
