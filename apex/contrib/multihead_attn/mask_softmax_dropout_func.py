"""The softmax of attention's scores with mask and dropout, as public apex's function of that name."""

from __future__ import annotations

from typing import Any

import torch

from apex._functional import call
from apex._random import new_seed
from apex.contrib.multihead_attn import _core

_softmax = torch.ops.apex.masked_softmax_dropout_forward.default


class MaskSoftmaxDropout:
    """Has the face of an autograd.Function; the op behind is differentiable by itself, and torch.compile traces it."""

    @staticmethod
    def apply(
        is_training: bool,
        heads: int,
        inputs: torch.Tensor,
        pad_mask: torch.Tensor | None,
        mask_additive: bool,
        dropout_prob: float,
    ) -> torch.Tensor:
        """dropout(softmax(inputs + mask)), [B * heads, Sq, Sk] as the inputs.

        pad_mask: [B, Sk], not 0 where a key is left out, or with mask_additive numbers that are added, -inf to leave
        a key out; or None. A row whose keys are all left out is zeros. dropout_prob: where is_training.

        Raises:
            ValueError: inputs have not three dimensions, or no batch of `heads`; or the mask does not fit.
            TypeError: a mask that is to be added has no floating-point numbers.
        """
        if inputs.dim() != 3 or heads < 1 or inputs.shape[0] % heads:
            raise ValueError(
                f"multihead_attn: scores are [batch * heads, queries, keys], not {list(inputs.shape)} of {heads} heads"
            )
        mask = _core.mask_of_scores(pad_mask, False, mask_additive, inputs.dtype)
        dropout = float(dropout_prob) if is_training else 0.0
        seed = new_seed(inputs.device) if dropout > 0 else None
        scores = inputs.unflatten(0, (-1, heads)) if inputs.shape[0] else inputs.unsqueeze(1)
        output = call("masked_softmax_dropout", _softmax, 1, (scores, mask, dropout, seed, False))
        return output.view(inputs.shape)

    @staticmethod
    def forward(ctx, *arguments: Any) -> torch.Tensor:
        """As `apply`."""
        return MaskSoftmaxDropout.apply(*arguments)


fast_mask_softmax_dropout_func = MaskSoftmaxDropout.apply
