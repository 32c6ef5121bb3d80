"""Operations, and te.ops.Sequential, which makes of neighbours what one pass can make.

A norm before a Linear is made in the pass of its cast, where delayed scaling says the scale beforehand. Operations are
modules, and may stand alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import Proxy

from apex import _symbolic as symbolic
from apex._functional import call
from apex.transformer_engine.pytorch import _parameters, module
from apex.transformer_engine.pytorch._parallel import Gather, Scatter, Sum
from apex.transformer_engine.pytorch.module._norm import norm_of_cast

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AddInPlace",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ConstantScale",
    "Dropout",
    "FusibleOperation",
    "Identity",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
]

_activation = torch.ops.apex.bias_activation_forward.default


class FusibleOperation(nn.Module):
    """What all operations are. num_extra_inputs: how many tensors beside the first it takes."""

    num_extra_inputs = 0

    def forward(self, input: torch.Tensor, *extra: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What the operation makes of input [..., columns]."""
        node = symbolic.leaf(self, input, *extra)
        return self._make(input, *extra) if node is None else node

    def _make(self, input, *extra):
        raise NotImplementedError(f"{type(self).__name__} makes nothing")


# ---- products and norms ----------------------------------------------------------------------------------------------


class Linear(module.Linear, FusibleOperation):
    """input weight^T + bias; in FP8 within fp8_autocast.

    Args:
        in_features, out_features: sizes of the last dimension, of input and output.
        bias: False: there is none.
        device, dtype: of the parameters; None: the current GPU (the CPU where there is none), torch's default.
        tensor_parallel_mode, tensor_parallel_group, sequence_parallel: parallel_mode, tp_group and sequence_parallel of
            te.Linear.
        rng_state_tracker_function, accumulate_into_main_grad: get_rng_state_tracker, fuse_wgrad_accumulation of it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            sequence_parallel,
            accumulate_into_main_grad,
            tensor_parallel_group,
            get_rng_state_tracker=rng_state_tracker_function,
            bias=bias,
            params_dtype=dtype,
            parallel_mode=tensor_parallel_mode,
            device=device,
        )


class BasicLinear(Linear):
    """Linear without a bias."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, bias=False, **options)


class _NormOperation(FusibleOperation):
    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: Any = 0,
    ) -> None:
        sizes = [normalized_shape] if isinstance(normalized_shape, int) else [*normalized_shape]
        if len(sizes) != 1:
            raise ValueError(f"{type(self).__name__}: norms are of the last dimension alone, not of {sizes}")
        options = dict(params_dtype=dtype, zero_centered_gamma=zero_centered_gamma, device=device)
        super().__init__(sizes[0], eps, **options)  # type: ignore[call-arg]

    def _in_cast(self, sharing):
        """norm_of_cast of it, before a layer that ranks share so."""
        bias = getattr(self, "bias", None)
        return norm_of_cast(self.kind, self.eps, self.zero_centered_gamma, self.weight, bias, sharing)


class LayerNorm(_NormOperation, module.LayerNorm):
    """te.LayerNorm of the last dimension; normalized_shape: its size. sm_margin is not looked at."""

    forward = module.LayerNorm.forward  # type: ignore[assignment]


class RMSNorm(_NormOperation, module.RMSNorm):
    """te.RMSNorm of the last dimension; normalized_shape: its size. sm_margin is not looked at."""

    forward = module.RMSNorm.forward  # type: ignore[assignment]


class Bias(FusibleOperation):
    """input + bias. bias: [size], 0 at first."""

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        _parameters.add_vector(self, "bias", size, 0.0, dtype, _parameters.device_of(device))

    def _make(self, input):
        return input + self.bias.to(input.dtype)


# ---- activations -----------------------------------------------------------------------------------------------------


class _Activation(FusibleOperation):
    function: str
    gated = False

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        if cache_quantized_input:
            raise NotImplementedError(
                f"{type(self).__name__}: inputs are kept as they are: no cache_quantized_input"
            )

    def _make(self, input):
        return call("bias_activation", _activation, 1, (input, None, self.function, self.gated))


class GELU(_Activation):
    """gelu, in its tanh form."""

    function = "gelu"


class ReLU(_Activation):
    """max(x, 0)"""

    function = "relu"


class SReLU(_Activation):
    """max(x, 0)^2"""

    function = "squared_relu"


class QGELU(_Activation):
    """x sigmoid(1.702 x)"""

    function = "quick_gelu"


class SiLU(_Activation):
    """x sigmoid(x)"""

    function = "silu"


class GEGLU(GELU):
    """gelu of the first half of the columns times the second half."""

    gated = True


class ReGLU(ReLU):
    """relu of the first half of the columns times the second half."""

    gated = True


class SReGLU(SReLU):
    """relu^2 of the first half of the columns times the second half."""

    gated = True


class QGEGLU(QGELU):
    """x sigmoid(1.702 x) of the first half of the columns times the second half."""

    gated = True


class SwiGLU(SiLU):
    """silu of the first half of the columns times the second half."""

    gated = True


class GLU(_Activation):
    """sigmoid of the first half of the columns times the second half."""

    function = "sigmoid"
    gated = True


# ---- others ----------------------------------------------------------------------------------------------------------


class Identity(FusibleOperation):
    """The input."""

    def _make(self, input):
        return input


class ConstantScale(FusibleOperation):
    """The input times a number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def _make(self, input):
        return input * self.scale


class Dropout(FusibleOperation):
    """Zeros with chance p, in training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def _make(self, input):
        return nn.functional.dropout(input, self.p, self.training)


class Reshape(FusibleOperation):
    """Of another shape."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def _make(self, input):
        return input.reshape(self.shape)


class AddExtraInput(FusibleOperation):
    """The sum of the input and of a tensor that Sequential is given behind it."""

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()

    def _make(self, input, other):
        return input + other


class AddInPlace(AddExtraInput):
    """AddExtraInput by the name that it has in 1.x."""

    def __init__(self) -> None:
        super().__init__()


class MakeExtraOutput(FusibleOperation):
    """The input twice; Sequential goes on with one, and returns the other behind its output."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()

    def _make(self, input):
        return input, input


class _Collective(FusibleOperation):
    function: type[torch.autograd.Function]

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.process_group = process_group

    def _make(self, input):
        if not dist.is_available() or not dist.is_initialized():
            return input
        group = self.process_group or dist.group.WORLD
        return input if dist.get_world_size(group) == 1 else self.function.apply(input, group)


class AllReduce(_Collective):
    """The sum of all ranks' inputs; the gradient passes as it is."""

    function = Sum


class AllGather(_Collective):
    """All ranks' inputs, one behind the other along the first dimension."""

    function = Gather


class ReduceScatter(_Collective):
    """This rank's part, along the first dimension, of the sum of all ranks' inputs."""

    function = Scatter


class Sequential(nn.Sequential):
    """One module after the other: operations, and any others.

    Args:
        args: modules, or one dict of them.
    """

    def __init__(self, *args: nn.Module | Mapping[str, nn.Module]) -> None:
        super().__init__()
        named = args[0].items() if len(args) == 1 and isinstance(args[0], Mapping) else None
        for name, made in named or ((str(i), made) for i, made in enumerate(args)):
            self.add_module(name, made)  # type: ignore[arg-type]

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, *extra_inputs: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What the last module gives; behind it, what each MakeExtraOutput was given.

        extra_inputs: of each AddExtraInput, one after the other. Raises ValueError where they are more or fewer.
        """
        node = symbolic.leaf(self, input, *extra_inputs)
        if node is not None:
            return node
        modules, others, returned, place = [*self], list(extra_inputs), [], 0
        wanted = sum(getattr(made, "num_extra_inputs", 0) for made in modules)
        if len(others) != wanted:
            raise ValueError(f"Sequential: its operations take {wanted} extra inputs, not {len(others)}")
        while place < len(modules):
            made = modules[place]
            behind = modules[place + 1] if place + 1 < len(modules) else None
            norm = None if isinstance(input, Proxy) else _fused(made, behind)
            if norm is not None:
                input = behind._share(input, None, norm)  # type: ignore[union-attr]
            else:
                count = getattr(made, "num_extra_inputs", 0)
                input = made(input, *others[:count])
                others = others[count:]
            if isinstance(made, MakeExtraOutput):
                input, extra = input
                returned.append(extra)
            place += 1 if norm is None else 2
        return (input, *returned) if returned else input


def _fused(norm, linear):
    """What makes a norm in the pass of a Linear's cast, or None where they are none, or no pass makes both."""
    if not isinstance(norm, _NormOperation) or not isinstance(linear, Linear) or linear.return_bias:
        return None
    if norm._forward_hooks or norm._forward_pre_hooks or linear._forward_hooks or linear._forward_pre_hooks:
        return None
    return norm._in_cast(linear._sharing)
