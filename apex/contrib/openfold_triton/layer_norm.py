"""Layer norm under the name that OpenFold's scripts call: the same op as apex.normalization's."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from apex._functional import Function, is_autocast_enabled
from apex.normalization import _norm

__all__ = ["LayerNormSmallShapeOptImpl"]


class LayerNormSmallShapeOptImpl(Function):
    """apply(inputs, normalized_shape, weight, bias, eps=1e-05): layer norm over the last dimensions.

    inputs: float16, bfloat16, float32 or float64, any strides. weight, bias: of normalized_shape. The output has the
    inputs' dtype, under autocast, too. Raises ValueError and TypeError as FusedLayerNorm. Beyond public apex: any size,
    any layout.
    """

    @staticmethod
    def forward(ctx, inputs, normalized_shape, weight, bias, eps=1e-05):
        shape = _norm.as_shape(normalized_shape)
        kind = inputs.device.type
        # The op itself has autocast's dtype there.
        plain = torch.autocast(kind, enabled=False) if is_autocast_enabled(kind) else nullcontext()
        with plain:
            return _norm.layer_norm(inputs, shape, weight, bias, eps, False, inputs.dtype)
