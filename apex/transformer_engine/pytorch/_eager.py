"""A product of a layer in eager mode: forward, and by its Node backward, in C++ without a frame of Python.

Its host time is compared with torch.nn.Linear's. What is not taken here goes through _linear.py, which computes the
same and serves compilers, checkpoints, recipes with blocks, and every torch that has no binding of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_variadic

from apex._functional import entry
from apex._loader import library
from apex.transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, QParams
from apex.transformer_engine.pytorch import _formats, _scaling, _switches
from apex.transformer_engine.pytorch._norms import Norm
from apex.transformer_engine.pytorch._state import current

_layer, _Products = entry("fp8_linear_layer"), entry("Fp8Products")
_tracing_state = torch._C._get_tracing_state
_NOT_CACHED = (None,) * 3
# Of each device: what was asked for last, and the products that it became.
_known: dict[torch.device, tuple[Any, Any]] = {}


def linear(
    layer: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_first_microbatch: bool | None,
    gemm: int,
    norm: tuple[Norm, torch.Tensor, torch.Tensor | None] | None = None,
) -> torch.Tensor | None:
    """input weight^T + bias in FP8, as the innermost autocast says; None, where _linear.py must serve.

    norm: (it, gamma, beta), by which the input goes first.
    """
    if (
        _layer is None
        or layer.fuse_wgrad_accumulation
        or current.frame is not None
        or _switches._RANGES
        or is_compiling()
        or _tracing_state() is not None
        or has_torch_function_variadic(input, weight, bias)
    ):
        return None
    first = None
    if norm is not None:
        made, gamma, beta = norm
        if made.group is not None or has_torch_function_variadic(gamma, beta):
            return None
        first = made.centered, made.eps, made.zero_centered_gamma, gamma, beta
    recipe, device = current.recipe, input.device
    products = _products(recipe, device)
    if products is None:
        return None
    cached = _NOT_CACHED
    if is_first_microbatch is not None:
        codes = None if is_first_microbatch else layer._cached.get(gemm)
        if codes is None or codes.row_scale.dim() > 0:
            return None
        cached = codes.rows, codes.row_scale, codes.columns
    forward = backward = None
    records = False
    if isinstance(recipe, DelayedScaling):
        # Scales of graphs are written in place, perhaps before a backward that knows their inverses.
        if layer._state.backward.fixed or _scaling.is_captured(input):
            return None
        state, records = layer._begin_step(recipe, input, False)
        forward, backward = state.forward.whole(), state.backward.whole()
    try:
        return _layer(products, input, weight, bias, cached, forward, backward, gemm, records, first)
    except RuntimeError as error:
        library.raise_stored(error)  # the probe's own exception, if it refused to choose
        raise


def _products(recipe, device):
    """What a recipe asks of products on a device, or None where they are not made here."""
    card = _formats.multiplies(device)
    if isinstance(recipe, DelayedScaling):
        wanted = card, recipe.fp8_format, recipe.override_linear_precision
    elif isinstance(recipe, Float8CurrentScaling):
        wanted = (
            card, recipe.fp8_format, recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad,
            recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad,
        )  # fmt: skip
    else:
        return None
    known = _known.get(device)
    if known is None or known[0] != wanted:
        known = _known[device] = wanted, _made(recipe, device, card, wanted[2:])
    return known[1]


def _made(recipe, device, card, options):
    if not card and device.type != "cpu":  # by halves that are summed in float32
        return None
    if isinstance(recipe, DelayedScaling):
        if options[0][2]:  # the weight's gradient is made without FP8
            return None
        accurate, quantize = (False, True, True), (QParams(),) * 3
    else:
        accurate, quantize = tuple(product.use_split_accumulator for product in options[3:]), options[:3]
    return _Products(
        *_formats.dtypes_of(recipe, device),
        card,
        [not product and torch.version.hip is None for product in accurate],
        [bool(of.power_2_scale) for of in quantize],
        [of.amax_epsilon for of in quantize],
    )
