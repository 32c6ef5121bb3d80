"""FastLayerNorm under its public name: the same op as apex.normalization's."""

from __future__ import annotations

import torch
from torch.fx import Proxy
from torch.nn import init

from apex import _symbolic as symbolic
from apex._functional import Function
from apex.normalization import _norm
from apex.normalization._jit import plain_layer_norm


class FastLayerNormFN(Function):
    """Layer norm over the last dimension; gamma, beta and the output have one dtype (under autocast, autocast's)."""

    @staticmethod
    def forward(ctx, x, gamma, beta, epsilon, memory_efficient=False):
        shape = _norm.as_shape(gamma.shape)
        return _norm.layer_norm(x, shape, gamma, beta, epsilon, memory_efficient, gamma.dtype)


class FastLayerNorm(torch.nn.Module):
    """Layer norm over the last dimension, of `hidden_size` elements, with weight and bias.

    Args:
        hidden_size: of the last dimension, any number.
        eps: added to the variance.
        memory_efficient: see FusedLayerNorm.

    Shape:
        input, output: [..., hidden_size], any strides; float16, bfloat16, float32 or float64. The output has the
        weight's dtype.

    Raises:
        ValueError: the last dimension is not hidden_size, or the input lies on another device than the weight.
        TypeError: one of input and weight is float64.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0."""
        init.ones_(self.weight)
        init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_scripting():
            return plain_layer_norm(
                x, self.weight.shape, self.weight, self.bias, self.epsilon, self.weight.dtype
            )
        else:
            return self._forward(x)

    def _forward(self, x):
        node = symbolic.leaf(self, x) if isinstance(x, Proxy) else None
        if node is not None:
            return node
        if not _norm.is_traced():
            weight, bias = _norm.parameter(self, "weight"), _norm.parameter(self, "bias")
            return _norm.eager_layer_norm(
                x, weight.shape, weight, bias, self.epsilon, self.memory_efficient, weight.dtype
            )
        return FastLayerNormFN.apply(x, self.weight, self.bias, self.epsilon, self.memory_efficient)
