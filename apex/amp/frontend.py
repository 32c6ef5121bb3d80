"""`amp.initialize`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from apex.amp._amp_state import maybe_print
from apex.amp._checkpoint import load_state_dict, state_dict
from apex.amp._errors import AmpUsageError, AmpValueError
from apex.amp._initialize import _initialize, disable
from apex.amp._levels import O0, O1, O2, O3, O4, O5, opt_levels
from apex.amp._positional import takes_nvidia_order
from apex.amp._properties import Properties, check_floating, check_numbers

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "O4",
    "O5",
    "Properties",
    "initialize",
    "load_state_dict",
    "opt_levels",
    "state_dict",
]


@takes_nvidia_order
def initialize(
    models: nn.Module | Sequence[nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    patch_torch_functions_type: torch.dtype | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    dynamic_init_scale: float = 2.0**16,
    scale_growth_factor: float = 2.0,
    scale_backoff_factor: float = 0.5,
    scale_window: int = 2000,
    combine_grad: bool | None = None,
    combine_ddp: bool | None = None,
    ddp_replica_count: int = 4,
    user_cast_preferred: bool | None = None,
    check_combined_tensors: bool | None = None,
) -> Any:
    """Fits models and optimizers to a level of mixed precision, in place, and returns them in the form given.

    Call it once for all models and optimizers, when they are complete and on their device, and before
    DistributedDataParallel wraps them. Whatever option is not None replaces that of the level.

    Args:
        models: a module or a list of modules; torch.compile may have wrapped them, or may do so afterwards.
        optimizers: an optimizer, a list of them, or None for inference.
        enabled: False makes every call of amp do nothing.
        opt_level: "O0" to "O5", see docs/amp.md.
        cast_model_type: dtype of weights and inputs.
        patch_torch_functions: cast around torch's functions.
        patch_torch_functions_type: to which dtype: torch.float16 (O1) or torch.bfloat16 (O4).
        keep_batchnorm_fp32: batch norms stay float32 where the model is cast; also "True" or "False".
        master_weights: the optimizer updates float32 copies of half-precision weights.
        loss_scale: a number, a string of one, or "dynamic".
        cast_model_outputs: dtype of outputs; by default float32 where the model is cast.
        num_losses: loss scalers; amp.scale_loss takes one by loss_id.
        verbosity: 0 silent, 1 informs, 2 prints each cast.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale. None: 2**-24 (an AmpWarning says once that the scale
            is there), and no ceiling.
        dynamic_init_scale: where it starts.
        scale_growth_factor, scale_backoff_factor: what it is multiplied by after scale_window updates without
            overflow, and after one with.
        combine_grad: gradients lie in flat buffers, so that unscaling and zeroing are one launch a buffer; see
            docs/combined_tensors.md. O1, O2, O4, O5.
        combine_ddp: gradients are averaged over the ranks of torch.distributed, in slices of those buffers, in the
            place of DistributedDataParallel; parameters and buffers become rank 0's. Needs combine_grad.
        ddp_replica_count: how many slices of a buffer that makes, about.
        user_cast_preferred: functions that the user registered are left out of amp's own lists.
        check_combined_tensors: whatever uses combined tensors looks first whether each still lies in its buffer.

    Returns:
        models, or (models, optimizers).

    Raises:
        AmpUsageError (a RuntimeError): an unknown level, options that do not go together, models that are
            half precision or wrapped for data parallelism already, models or optimizers that went through it
            before, optimizers that hold no parameter of the models.
        AmpTypeError, AmpValueError: an argument is of a wrong type or value.

    Where NVIDIA's apex has keep_batchnorm_fp32 as its seventh positional argument, that order is understood,
    with a warning.
    """
    if isinstance(enabled, str):
        raise AmpValueError(
            f"the third positional argument, enabled, is {enabled!r}",
            wanted="True or False",
            remedy=f'amp.initialize(model, optimizer, opt_level="{enabled}")',
        )
    properties = Properties()
    if not enabled:
        disable(properties, verbosity)
        return models if optimizers is None else (models, optimizers)

    if not isinstance(opt_level, str) or opt_level not in opt_levels:
        raise AmpUsageError(
            f"there is no opt_level {opt_level!r}",
            available=sorted(opt_levels),
            remedy='opt_level="O1": the letter O and a digit',
        )
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "patch_torch_functions_type": patch_torch_functions_type,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "combine_grad": combine_grad,
        "combine_ddp": combine_ddp,
        "ddp_replica_count": None if ddp_replica_count == 4 else ddp_replica_count,
        "user_cast_preferred": user_cast_preferred,
        "check_combined_tensors": check_combined_tensors,
    }
    scaling = {
        "dynamic_init_scale": dynamic_init_scale,
        "scale_growth_factor": scale_growth_factor,
        "scale_backoff_factor": scale_backoff_factor,
        "scale_window": scale_window,
        "min_loss_scale": min_loss_scale,
        "max_loss_scale": math.inf if max_loss_scale is None else max_loss_scale,
    }
    check_numbers(scaling, verbosity)
    if cast_model_outputs is not None:
        check_floating("cast_model_outputs", cast_model_outputs)
    scaling["init_scale"] = scaling.pop("dynamic_init_scale")
    scaling["scale_window"] = int(scale_window)
    properties = opt_levels[opt_level](properties)
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, value)

    returned = _initialize(models, optimizers, properties, num_losses, cast_model_outputs, scaling, verbosity)
    maybe_print(f"apex.amp {opt_levels[opt_level].brief}", True)
    for name, value in properties.options.items():
        changed = "  (overridden)" if overrides.get(name) is not None else ""
        maybe_print(f"    {name:27}: {value}{changed}", True)
    os.environ["APEX_AMP_ENABLED"] = "1"  # ROCm's apex sets it
    return returned
