"""What layers with FP8 products have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apex.fused_dense import _main_grad, fused_dense_function
from apex.transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling
from apex.transformer_engine.pytorch import (
    _casts,
    _eager,
    _extra_state,
    _formats,
    _linear,
    _parameters,
    _quantizers,
    _scaling,
)
from apex.transformer_engine.pytorch._norms import Norm
from apex.transformer_engine.pytorch._parallel import Sharing
from apex.transformer_engine.pytorch._quantizers import Quantized
from apex.transformer_engine.pytorch._state import LayerState, current
from apex.transformer_engine.pytorch.float8_tensor import Float8Tensor


class TransformerEngineBaseModule(nn.Module):
    """A layer of one product or more.

    Attributes:
        fp8_meta: what delayed scaling knows, by the public engine's names: "scaling_fwd", "scaling_bwd" (each with
            scale, scale_inv, amax_history) and "recipe".
        tp_size, parallel_mode, sequence_parallel: how ranks share the layer. Megatron-LM's layers write the first, too.
    """

    def __init__(
        self, gemms: int, device: torch.device | None, sharing: Sharing, fuse_wgrad_accumulation: bool
    ) -> None:
        super().__init__()
        self._sharing, self.fuse_wgrad_accumulation = sharing, fuse_wgrad_accumulation
        self.tp_size, self.parallel_mode, self.sequence_parallel = (
            sharing.size,
            sharing.mode,
            sharing.sequence,
        )
        if device is not None:
            _formats.look_up(device)
        on_device = device is not None and device.type != "meta"
        self._state = LayerState(gemms, device if on_device else torch.device("cpu"))
        self._cached: dict[int, Quantized] = {}

    @property
    def fp8_meta(self) -> dict[str, Any]:
        state = self._state
        return {"scaling_fwd": state.forward, "scaling_bwd": state.backward, "recipe": state.recipe}

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this layer."""
        return self._sharing.group

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Says which ranks share this layer, where it was made with tp_size alone."""
        self._sharing.group = tp_group

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Parameters are drawn anew, by init_method; those on the meta device are made on the current GPU, or the CPU.

        As FSDP wants it for layers that were made with device="meta". Scales and magnitudes stay. Raises RuntimeError
        for a layer that was pickled with an init_method that pickle cannot name.
        """
        _parameters.reset(self)
        self._cached.clear()

    def fast_set(self, name: str, value: Any) -> None:
        """setattr, by the public engine's name."""
        setattr(self, name, value)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> TransformerEngineBaseModule:
        found = super()._apply(fn, recurse)
        self._cached.clear()
        device = next(self.parameters()).device
        _formats.look_up(device)
        for scaling in (self._state.forward, self._state.backward):
            scaling.move(device)
        return found

    def get_extra_state(self) -> bytes:
        """Scales and histories, once FP8 or calibration ran; read without pickle's code (docs)."""
        return _extra_state.write(self._state)

    def set_extra_state(self, state: Any) -> None:
        """Takes what get_extra_state gave, of this or of the public engine."""
        _extra_state.read(state, self._state)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        """Weights that are kept in FP8 are saved as values, which any layer loads."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parameter in self._parameters.items():
            if isinstance(parameter, Float8Tensor) and not keep_vars:
                destination[prefix + name] = parameter.dequantize().detach()

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        """A checkpoint of layers without FP8 has no extra state, and lacks nothing."""
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._cached.clear()
        key = prefix + "_extra_state"
        if key in missing:
            missing.remove(key)

    def _multiply(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        is_first_microbatch: bool | None,
        gemm: int = 0,
        norm: tuple[Norm, torch.Tensor, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """input weight^T + bias, as the innermost autocast says.

        norm: (it, gamma, beta), by which the input goes first; in FP8 alone.
        """
        if current.exporting:
            return torch.nn.functional.linear(input, weight, bias)
        if current.enabled:
            found = _eager.linear(self, input, weight, bias, is_first_microbatch, gemm, norm)
            if found is not None:
                return found
            made, gamma, beta = norm or (None, None, None)
            plan = self._plan(input, weight, gemm, is_first_microbatch, made)
            return _linear.Linear.apply(input, gamma, beta, weight, bias, plan)
        self._begin(weight, is_first_microbatch)
        if current.calibrating:
            self._calibrate(input, weight, gemm)
        if self._adds(weight):
            return _main_grad.Dense.apply(_dense_of_values, input, weight, bias)
        return _dense_of_values(input, weight, bias)

    def _begin(self, weight, is_first_microbatch):
        """main_grad begins at 0 with the first microbatch."""
        again = current.frame is not None and current.frame.again
        if is_first_microbatch and self._adds(weight) and not again:
            _main_grad.main_grad_of(weight).zero_()

    def _adds(self, weight):
        """Whether the weight's gradient goes to its main_grad."""
        return self.fuse_wgrad_accumulation and torch.is_grad_enabled() and weight.requires_grad

    def _records(self):
        """Whether magnitudes of this call count for the next scales."""
        frame = current.frame
        return self.training and (not frame.again if frame is not None else torch.is_grad_enabled())

    def _calibrate(self, input, weight, gemm):
        recipe = current.recipe
        if not isinstance(recipe, DelayedScaling):
            return
        self._state.prepare(recipe, input.device)
        self._state.note(_scaling.is_captured(input))
        row = self._state.forward.amax_history[0]
        with torch.no_grad():
            _casts.record(row[3 * gemm], input.detach())
            _casts.record(row[3 * gemm + 1], weight.detach())

    def _plan(self, input, weight, gemm, is_first_microbatch, norm=None):
        self._begin(weight, is_first_microbatch)
        recipe: Any = current.recipe
        device, delayed = input.device, isinstance(recipe, DelayedScaling)
        make = self._delayed if delayed else _of_values
        quantizers = make(recipe, *_formats.dtypes_of(recipe, device), input, gemm)
        if isinstance(weight, Float8Tensor):
            cached = weight.quantized()
        else:
            cached = self._cached_weight(quantizers[1], weight, gemm, is_first_microbatch)
        dtype, adds = _linear.output_dtype(input), self._adds(weight)
        if delayed:
            accurate, wide_wgrad = (False, True, True), recipe.override_linear_precision[2]
        else:
            products = recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad
            accurate, wide_wgrad = tuple([product.use_split_accumulator for product in products]), False
        return _linear.Plan(*quantizers, cached, dtype, accurate, wide_wgrad, adds, norm)

    def _delayed(self, recipe, forward, backward, input, gemm):
        """Quantizers of input, weight and gradient."""
        state, records = self._begin_step(recipe, input, _scaling.is_captured(input))
        scales = state.forward.scale, state.backward.scale
        if current.frame is not None:
            scales = current.frame.scales(scales, state)
        make, known = _quantizers.Delayed, state.forward.scalars(scales[0])
        return (
            make(forward, scales[0], state.forward, 3 * gemm, records, known),
            make(forward, scales[0], state.forward, 3 * gemm + 1, records, known),
            make(backward, scales[1], state.backward, 2 * gemm, True),
        )

    def _begin_step(self, recipe, input, captured):
        """(what delayed scaling knows, whether magnitudes of input and weight go into it)"""
        state, records = self._state, self._records()
        state.prepare(recipe, input.device)
        if records:
            state.note(captured)
        return state, records

    def _cached_weight(self, quantizer, weight, gemm, is_first_microbatch):
        """The weight in FP8, of the first microbatch; None where nobody said which microbatch it is."""
        if is_first_microbatch is None:
            return None
        if is_first_microbatch or gemm not in self._cached:
            with torch.no_grad():
                self._cached[gemm] = quantizer.quantize(weight.detach(), True, True)
        return self._cached[gemm]


def _of_values(recipe, forward, backward, input, gemm):
    """Quantizers of recipes without a state."""
    options = recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad
    dtypes = forward, forward, backward
    if isinstance(recipe, Float8BlockScaling):
        dimensions = recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim
        return tuple(map(_quantizers.Blocks, dtypes, options, dimensions))
    return tuple(map(_quantizers.Current, dtypes, options))


def _dense_of_values(input, weight, bias):
    """fused_dense_function; a weight that is kept in FP8 counts with its values, and keeps its main_grad outside."""
    values = weight.dequantize() if isinstance(weight, Float8Tensor) else weight
    return fused_dense_function(input, values, bias)
