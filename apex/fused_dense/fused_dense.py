"""FusedDense and FusedDenseGeluDense, and the functions behind them, with public apex's names.

Products of float16 and bfloat16 on NVIDIA GPUs are cublasLt's, with the bias, GELU and their gradients done on the way;
all others are torch's. GELU is its tanh form, torch's gelu(approximate="tanh"), as in public apex, where it is
cublasLt's. Source: D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.

Tensors are float16, bfloat16, float32 or float64, all of one dtype; under torch.autocast, and amp's O1, they are cast
to its dtype. Functions are differentiable any number of times. They raise TypeError where dtypes, ValueError where
shapes or devices do not fit.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_variadic

from apex import _symbolic as symbolic
from apex import amp
from apex._functional import Function, call, entry
from apex._loader import library
from apex.amp._amp_state import _amp_state
from apex.fused_dense import _main_grad

_entry = entry("dense")
_tracing_state = torch._C._get_tracing_state
_dense = torch.ops.apex.dense_forward.default
_dense_gelu_dense = torch.ops.apex.dense_gelu_dense_forward.default


class FusedDenseFunc(Function):
    """FusedDenseFunc.apply(input, weight, bias): input weight^T + bias."""

    @staticmethod
    def forward(ctx, input, weight, bias):
        return call("dense", _dense, 1, (input, weight, bias, "none"))


class DenseNoBiasFunc(Function):
    """DenseNoBiasFunc.apply(input, weight): input weight^T."""

    @staticmethod
    def forward(ctx, input, weight):
        return call("dense", _dense, 1, (input, weight, None, "none"))


class FusedDenseGeluDenseFunc(Function):
    """FusedDenseGeluDenseFunc.apply(input, weight1, bias1, weight2, bias2)."""

    @staticmethod
    def forward(ctx, input, weight1, bias1, weight2, bias2):
        return call("dense_gelu_dense", _dense_gelu_dense, 1, (input, weight1, bias1, weight2, bias2))


@amp.half_function
def _cast_dense(input, weight, bias):
    """As fused_dense_function, where amp may cast, or something looks at Python."""
    return FusedDenseFunc.apply(input, weight, bias)


def fused_dense_function(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """input weight^T + bias.

    Args:
        input: [..., inputs].
        weight: [outputs, inputs].
        bias: [outputs], or None.

    Returns:
        [..., outputs], contiguous.
    """
    # In one frame, as its host time is compared with that of torch's products: a frame is 5 % of it.
    if (
        is_compiling()
        or _tracing_state() is not None
        or _entry is None
        or _amp_state.handle is not _amp_state.no_handle
        or has_torch_function_variadic(input, weight, bias)
    ):
        return _cast_dense(input, weight, bias)
    try:
        return _entry(input, weight, bias, "none")
    except RuntimeError as error:
        library.raise_stored(error)  # the probe's own exception, if it refused to choose
        raise


def dense_no_bias_function(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """input weight^T: [..., outputs] of input [..., inputs] and weight [outputs, inputs]."""
    return fused_dense_function(input, weight, None)


@amp.half_function
def fused_dense_gelu_dense_function(
    input: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor,
    bias2: torch.Tensor | None,
) -> torch.Tensor:
    """gelu(input weight1^T + bias1) weight2^T + bias2.

    Args:
        input: [..., inputs].
        weight1: [intermediates, inputs].
        bias1: [intermediates], or None.
        weight2: [outputs, intermediates].
        bias2: [outputs], or None.

    Returns:
        [..., outputs], contiguous.
    """
    return FusedDenseGeluDenseFunc.apply(input, weight1, bias1, weight2, bias2)


@amp.half_function
def _dense_gelu_dense_layers(input, weight1, bias1, weight2, bias2):
    """(what the layers give, the GELU between them, what it was taken of)"""
    return torch.ops.apex.dense_gelu_dense_forward(input, weight1, bias1, weight2, bias2)


def _layer(outputs, inputs, bias, device, dtype):
    """(weight, bias or None), without values."""
    weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
    return weight, nn.Parameter(torch.empty(outputs, device=device, dtype=dtype)) if bias else None


def _reset(weight, bias):
    """As torch.nn.Linear does: uniform within 1 / sqrt(inputs)."""
    limit = weight.shape[1] ** -0.5 if weight.shape[1] else 0.0
    for parameter in (weight, bias):
        if parameter is not None:
            nn.init.uniform_(parameter, -limit, limit)


class FusedDense(nn.Module):
    """torch.nn.Linear by `fused_dense_function`.

    Args:
        in_features: size of the input's last dimension.
        out_features: of the output's.
        bias: False: there is none.
        device, dtype: of the parameters; None: torch's defaults.
        main_grad: True: the backward adds the weight's gradient to `weight.main_grad` (docs/dense.md).

    Attributes:
        weight: [out_features, in_features], initialized as torch.nn.Linear's.
        bias: [out_features], or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        main_grad: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.main_grad = in_features, out_features, main_grad
        self.weight, self.bias = _layer(out_features, in_features, bias, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives the parameters new random values."""
        _reset(self.weight, self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of input [..., in_features]."""
        node = symbolic.leaf(self, input)
        if node is not None:
            return node
        if self.main_grad and _main_grad.is_wanted(self.weight):
            return _main_grad.Dense.apply(fused_dense_function, input, self.weight, self.bias)
        if self.bias is None:
            return dense_no_bias_function(input, self.weight)
        return fused_dense_function(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{_main_grad.shown(self)}"
        )


class FusedDenseGeluDense(nn.Module):
    """Two linear layers with GELU (its tanh form) between them, by `fused_dense_gelu_dense_function`.

    Args:
        in_features: size of the input's last dimension.
        intermediate_features: of the hidden layer.
        out_features: of the output's last dimension.
        bias: False: there are none.
        device, dtype: of the parameters; None: torch's defaults.
        main_grad: True: the backward adds the weights' gradients to their `main_grad` (docs/dense.md).

    Attributes:
        weight1, weight2: [intermediate_features, in_features] and [out_features, intermediate_features],
            initialized as torch.nn.Linear's.
        bias1, bias2: [intermediate_features] and [out_features], or None.
    """

    def __init__(
        self,
        in_features: int,
        intermediate_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        main_grad: bool = False,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        self.main_grad = main_grad
        self.weight1, self.bias1 = _layer(intermediate_features, in_features, bias, device, dtype)
        self.weight2, self.bias2 = _layer(out_features, intermediate_features, bias, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives the parameters new random values."""
        _reset(self.weight1, self.bias1)
        _reset(self.weight2, self.bias2)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of input [..., in_features]."""
        node = symbolic.leaf(self, input)
        if node is not None:
            return node
        arguments = (input, self.weight1, self.bias1, self.weight2, self.bias2)
        if self.main_grad and _main_grad.is_wanted(self.weight1, self.weight2):
            return _main_grad.DenseGeluDense.apply(_dense_gelu_dense_layers, *arguments)
        return fused_dense_gelu_dense_function(*arguments)

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.intermediate_features}, {self.out_features}"
        return f"{sizes}, bias={self.bias1 is not None}{_main_grad.shown(self)}"
