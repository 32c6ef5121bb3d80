"""FusedLayerNorm, FusedRMSNorm and their Mixed* forms, with public apex's names and signatures.

Dtypes: the output has the input's dtype, also where a half input meets float32 weights; Mixed* give it the weight's,
whatever both are. Statistics and sums are float32 (float64
for float64). Under autocast the output has autocast's dtype, inputs and weights are read as they are, and
weight gradients have the weight's dtype. CPU tensors take the CPU variant of the same ops. Under torch.jit.script and
torch.jit.trace the modules are PyTorch's own ops; torch.compile and torch.export keep ours.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Proxy
from torch.nn import init

from apex import _symbolic as symbolic
from apex._functional import Function
from apex._legacy import absent
from apex.normalization import _jit, _norm
from apex.normalization._jit import plain_layer_norm, plain_rms_norm

__getattr__ = absent.attributes_of(__name__)
_is_scripting = torch.jit.is_scripting


def manual_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """RMS norm by PyTorch's own ops: statistics in float32 (float64 for float64), the output in the weight's dtype if
    that is half."""
    return _jit.manual_rms_norm(input, list(normalized_shape), weight, eps)


# ---- the functions ------------------------------------------------------------------------------------------


class FusedLayerNormAffineFunction(Function):
    """Layer norm with weight and bias, of the input's dtype."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):
        _norm.check_one_dtype("FusedLayerNorm", input, weight)
        shape = _norm.as_shape(normalized_shape)
        return _norm.layer_norm(input, shape, weight, bias, eps, memory_efficient)


class FusedRMSNormAffineFunction(Function):
    """RMS norm with a weight of the input's dtype."""

    @staticmethod
    def forward(ctx, input, weight, normalized_shape, eps, memory_efficient=False):
        _norm.check_one_dtype("FusedRMSNorm", input, weight)
        return _norm.rms_norm(input, _norm.as_shape(normalized_shape), weight, eps, memory_efficient)


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """Layer norm whose output has the weight's dtype."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):
        shape = _norm.as_shape(normalized_shape)
        return _norm.layer_norm(input, shape, weight, bias, eps, memory_efficient, weight.dtype)


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """RMS norm whose output has the weight's dtype."""

    @staticmethod
    def forward(ctx, input, weight, normalized_shape, eps, memory_efficient=False):
        shape = _norm.as_shape(normalized_shape)
        return _norm.rms_norm(input, shape, weight, eps, memory_efficient, weight.dtype)


class FusedLayerNormFunction(Function):
    """Layer norm without weights."""

    @staticmethod
    def forward(ctx, input, normalized_shape, eps, memory_efficient=False):
        return _norm.layer_norm(input, _norm.as_shape(normalized_shape), None, None, eps, memory_efficient)


class FusedRMSNormFunction(Function):
    """RMS norm without a weight."""

    @staticmethod
    def forward(ctx, input, normalized_shape, eps, memory_efficient=False):
        return _norm.rms_norm(input, _norm.as_shape(normalized_shape), None, eps, memory_efficient)


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer norm of `input` over its last dimensions, which are normalized_shape.

    memory_efficient: autograd keeps the output in place of the input, and divides by the weight in backward;
    weights nearer to 0 than eps count as eps there: see FusedLayerNorm. Raises TypeError where the weight is
    neither float32 nor of the input's dtype outside autocast, ValueError where shapes do not fit.
    """
    return FusedLayerNormAffineFunction.apply(input, weight, bias, normalized_shape, eps, memory_efficient)


def fused_layer_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer norm without weights."""
    return FusedLayerNormFunction.apply(input, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer norm whose output has the weight's dtype."""
    return FusedLayerNormAffineMixedDtypesFunction.apply(
        input, weight, bias, normalized_shape, eps, memory_efficient
    )


def fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS norm of `input` over its last dimensions; see fused_layer_norm_affine."""
    return FusedRMSNormAffineFunction.apply(input, weight, normalized_shape, eps, memory_efficient)


def fused_rms_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS norm without a weight."""
    return FusedRMSNormFunction.apply(input, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS norm whose output has the weight's dtype."""
    return FusedRMSNormAffineMixedDtypesFunction.apply(input, weight, normalized_shape, eps, memory_efficient)


# ---- the modules --------------------------------------------------------------------------------------------


class _Norm(torch.nn.Module):
    has_bias = False

    def __init__(self, normalized_shape, eps, elementwise_affine, memory_efficient):
        super().__init__()
        if isinstance(normalized_shape, numbers.Integral):
            normalized_shape = (normalized_shape,)
        self.normalized_shape = torch.Size(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        names = ("weight", "bias") if self.has_bias else ("weight",)
        for name in names:
            made = torch.nn.Parameter(torch.empty(*normalized_shape)) if elementwise_affine else None
            self.register_parameter(name, made)
        self.reset_parameters()

    def reset_parameters(self):
        """Weight 1, bias 0."""
        if self.elementwise_affine:
            init.ones_(self.weight)
            if self.has_bias:
                init.zeros_(self.bias)

    def _symbolic(self, input):
        node = symbolic.leaf(self, input)
        return self._traced(input) if node is None else node

    def extra_repr(self):
        shape, affine = tuple(self.normalized_shape), self.elementwise_affine
        return f"{shape}, eps={self.eps}, elementwise_affine={affine}"


class FusedLayerNorm(_Norm):
    """Layer norm over the last dimensions, as torch.nn.LayerNorm.

    Args:
        normalized_shape: of the last dimensions; an int is one dimension.
        eps: added to the variance.
        elementwise_affine: with weight and bias.
        memory_efficient: keep the output for backward, not the input. The backward pass then divides by the weight, and
            by eps where the weight is nearer to 0 than that, as public apex does: an element with such a weight gives
            too small a gradient of its weight, and too little to the gradient of the input, by the factor
            weight / eps. Weights that start at 0, or may come near it, want memory_efficient=False.

    Shape:
        input, output: [..., *normalized_shape], any strides; float16, bfloat16, float32 or float64. weight, bias:
        normalized_shape. Statistics are float32 (float64 for float64).

    Raises:
        ValueError: the input does not end in normalized_shape, or lies on another device than the weight.
        TypeError: input and weight differ in dtype, but for a half input with a float32 weight, and under autocast:
            the output then has the input's dtype.
    """

    has_bias = True

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, memory_efficient)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _is_scripting():  # torch.jit.script compiles this branch, and leaves the other one alone
            return plain_layer_norm(
                input, self.normalized_shape, self.weight, self.bias, self.eps, input.dtype
            )
        else:
            if _norm.is_traced():
                return self._traced(input)
            if isinstance(input, Proxy):
                return self._symbolic(input)
            weight, bias = _norm.parameter(self, "weight"), _norm.parameter(self, "bias")
            if weight is not None and weight.dtype != input.dtype:
                _norm.check_one_dtype("FusedLayerNorm", input, weight)
            return _norm.eager_layer_norm(
                input, self.normalized_shape, weight, bias, self.eps, self.memory_efficient
            )

    def _traced(self, input):
        if torch.jit.is_tracing():
            return plain_layer_norm(
                input, self.normalized_shape, self.weight, self.bias, self.eps, input.dtype
            )
        if self.elementwise_affine:
            return fused_layer_norm_affine(
                input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
            )
        return fused_layer_norm(input, self.normalized_shape, self.eps, self.memory_efficient)


class FusedRMSNorm(_Norm):
    """RMS norm over the last dimensions: x / sqrt(mean(x^2) + eps) * weight, without a bias.

    Arguments, shapes, dtypes and errors as FusedLayerNorm's.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, memory_efficient)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _is_scripting():
            return plain_rms_norm(input, self.normalized_shape, self.weight, self.eps, input.dtype)
        else:
            if _norm.is_traced():
                return self._traced(input)
            if isinstance(input, Proxy):
                return self._symbolic(input)
            weight = _norm.parameter(self, "weight")
            if weight is not None and weight.dtype != input.dtype:
                _norm.check_one_dtype("FusedRMSNorm", input, weight)
            return _norm.eager_rms_norm(input, self.normalized_shape, weight, self.eps, self.memory_efficient)

    def _traced(self, input):
        if torch.jit.is_tracing():
            return plain_rms_norm(input, self.normalized_shape, self.weight, self.eps, input.dtype)
        if self.elementwise_affine:
            return fused_rms_norm_affine(
                input, self.weight, self.normalized_shape, self.eps, self.memory_efficient
            )
        return fused_rms_norm(input, self.normalized_shape, self.eps, self.memory_efficient)


def _always_affine(name, keywords):
    if "elementwise_affine" in keywords:
        warnings.warn(f"{name} does not support `elementwise_affine` argument", stacklevel=3)
        if not keywords["elementwise_affine"]:
            raise RuntimeError(f"{name} does not support `elementwise_affine = False`")


class MixedFusedLayerNorm(FusedLayerNorm):
    """FusedLayerNorm whose output has the weight's dtype, whatever the input's. Always with weight and bias.

    Raises:
        RuntimeError: elementwise_affine=False.
        ValueError: shapes or devices, as FusedLayerNorm.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _always_affine("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _is_scripting():
            return plain_layer_norm(
                input, self.normalized_shape, self.weight, self.bias, self.eps, self.weight.dtype
            )
        else:
            if _norm.is_traced():
                return self._traced(input)
            if isinstance(input, Proxy):
                return self._symbolic(input)
            weight, bias = _norm.parameter(self, "weight"), _norm.parameter(self, "bias")
            return _norm.eager_layer_norm(
                input, self.normalized_shape, weight, bias, self.eps, self.memory_efficient, weight.dtype
            )

    def _traced(self, input):
        if torch.jit.is_tracing():
            return plain_layer_norm(
                input, self.normalized_shape, self.weight, self.bias, self.eps, self.weight.dtype
            )
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    """FusedRMSNorm whose output has the weight's dtype, whatever the input's. Always with a weight.

    Raises:
        RuntimeError: elementwise_affine=False.
        ValueError: shapes or devices, as FusedLayerNorm.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _always_affine("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _is_scripting():
            return plain_rms_norm(input, self.normalized_shape, self.weight, self.eps, self.weight.dtype)
        else:
            if _norm.is_traced():
                return self._traced(input)
            if isinstance(input, Proxy):
                return self._symbolic(input)
            weight = _norm.parameter(self, "weight")
            return _norm.eager_rms_norm(
                input, self.normalized_shape, weight, self.eps, self.memory_efficient, weight.dtype
            )

    def _traced(self, input):
        if torch.jit.is_tracing():
            return plain_rms_norm(input, self.normalized_shape, self.weight, self.eps, self.weight.dtype)
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, self.eps, self.memory_efficient
        )
