"""SoftmaxCrossEntropyLoss, with public apex's name and signature."""

from __future__ import annotations

import torch

from apex._functional import call


class SoftmaxCrossEntropyLoss:
    """Softmax cross entropy of each row, with label smoothing: SoftmaxCrossEntropyLoss.apply(logits, labels, ...).

    Has the face of an autograd.Function, `apply` and `forward`; the op behind is differentiable by itself, twice,
    and torch.compile traces it. (No subclass: torch.compile would trace a backward that is not there.)
    """

    @classmethod
    def apply(
        cls,
        logits: torch.Tensor,
        labels: torch.Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> torch.Tensor:
        """The losses of torch.nn.functional.cross_entropy with reduction="none" and label_smoothing=smoothing.

        Args:
            logits: [..., classes], float16, bfloat16, float32 or float64, of any strides. Neither forward nor
                backward writes to it.
            labels: [...], int64 or int32. Rows labelled padding_idx or -100 have loss 0 and gradient 0. Any other
                label outside [0, classes) raises IndexError on a CPU; on a GPU, where looking would make the host
                wait, its loss and its row's gradient are nan, and no memory outside the row is read.
            smoothing: from 0 to 1; the target is 1 - smoothing on the label, and smoothing over all classes.
            padding_idx: the label of rows that do not count, or None.
            half_to_float: losses of half logits are float32. Without it, and outside autocast, they have the
                logits' dtype.

        Returns:
            [...] losses. Arithmetic is float32 (float64 for float64) throughout.

        Raises:
            TypeError, ValueError: dtypes, shapes, devices or smoothing that do not fit.
        """
        return cls.forward(None, logits, labels, smoothing, padding_idx, half_to_float)

    @staticmethod
    def forward(ctx, logits, labels, smoothing=0.0, padding_idx=0, half_to_float=False):
        return call(
            "xentropy",
            torch.ops.apex.xentropy_forward.default,
            1,
            (logits, labels, smoothing, padding_idx, half_to_float),
        )
