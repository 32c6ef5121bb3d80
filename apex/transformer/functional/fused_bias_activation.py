"""Bias and activation in one pass over memory, gated or not. Public apex has the kernel of the first alone.

With u = input + bias (bias may be None), over the last dimension:

    fused_bias_swiglu          silu(u1) * u2 of the two halves of u
    fused_bias_geglu           gelu(u1) * u2
    fused_bias_quick_geglu     quick_gelu(u1) * u2
    fused_bias_gelu            gelu(u)
    fused_bias_quick_gelu      quick_gelu(u) = u * sigmoid(1.702 u)
    fused_bias_squared_relu    max(u, 0)^2

gelu is the tanh form, as in Megatron-LM: torch's gelu(approximate="tanh"). Sources: N. Shazeer, "GLU Variants Improve
Transformer", arXiv:2002.05202; D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415; D. So et
al., "Primer", arXiv:2109.08668.

Every function takes an input [..., n] of float16, bfloat16, float32 or float64 (n even where it is halved) and a bias
[n] or None, whose dtype may differ (but float64 goes with float64 alone). The output has the input's dtype, also under
autocast; u and sums are float32 (float64). Gradients of the bias are summed without atomics, in a fixed order: same
input, same bits. Differentiable any number of times. Raises ValueError where shapes, TypeError where dtypes do not fit.
"""

from __future__ import annotations

import torch

from apex._functional import call

_op = torch.ops.apex.bias_activation_forward.default


def _activate(input, bias, activation, gated):
    return call("bias_activation", _op, 1, (input, bias, activation, gated))


def fused_bias_swiglu(input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(u1) * u2 of the two halves of u = input + bias; [..., n / 2]."""
    return _activate(input, bias, "silu", True)


def fused_bias_geglu(input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(u1) * u2 of the two halves of u = input + bias; [..., n / 2]."""
    return _activate(input, bias, "gelu", True)


def fused_bias_quick_geglu(input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """quick_gelu(u1) * u2 of the two halves of u = input + bias; [..., n / 2]."""
    return _activate(input, bias, "quick_gelu", True)


def fused_bias_gelu(input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(input + bias), the tanh form."""
    return _activate(input, bias, "gelu", False)


def fused_bias_quick_gelu(input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """u * sigmoid(1.702 u) of u = input + bias."""
    return _activate(input, bias, "quick_gelu", False)


def fused_bias_squared_relu(input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """max(input + bias, 0)^2."""
    return _activate(input, bias, "squared_relu", False)
