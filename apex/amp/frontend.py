"""`amp.initialize`, its options and levels, and amp's own state dict."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from apex.amp._amp_state import _amp_state, maybe_print, warn_or_err
from apex.amp._errors import AmpTypeError, AmpUsageError, AmpValueError, AmpWarning
from apex.amp.handle import INITIALIZE

COMBINING = ("O1", "O2", "O4", "O5")  # levels at which tensors can be combined
PATCHED = ("O1", "O4")  # levels that cast around functions and leave weights float32


class Properties:
    """The options in force, as attributes; setting one checks that it goes with the others.

    `options` is the plain dict.
    """

    def __init__(self):
        vars(self)["options"] = {
            "enabled": False,
            "opt_level": None,
            "cast_model_type": None,
            "patch_torch_functions": False,
            "patch_torch_functions_type": None,
            "keep_batchnorm_fp32": None,
            "master_weights": None,
            "loss_scale": 1.0,
            "user_cast_preferred": None,
            "combine_grad": None,
            "combine_ddp": None,
            "ddp_replica_count": 4,
            "check_combined_tensors": None,
        }

    def _update_options_dict(self, new_options):
        """Sets several options unchecked: a dict, or (name, value) pairs."""
        for name, value in dict(new_options).items():
            if name not in self.options:
                raise ValueError(f"amp has no option {name}")
            self.options[name] = value

    def __getattr__(self, name):
        options = vars(self).get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name, value):
        if name not in self.options:
            super().__setattr__(name, value)
            return
        check = getattr(type(self), f"_checked_{name}", None)
        self.options[name] = value if check is None else check(self, value)

    def _checked_cast_model_type(self, value):
        if value is not False:
            _check_floating("cast_model_type", value)
        if self.opt_level in PATCHED and value not in (None, False, torch.float32):
            warn_or_err(
                f"{self.opt_level} leaves weights float32 and casts around functions, so "
                f"cast_model_type={value} does not go with it",
                remedy='opt_level="O2" (or "O5") casts the model',
            )
        return value

    def _checked_patch_torch_functions(self, value):
        _check_truth("patch_torch_functions", value)
        if value and self.opt_level not in PATCHED:
            warn_or_err(
                f"patch_torch_functions=True does not go with {self.opt_level}",
                remedy='opt_level="O1" or "O4"',
            )
        return value

    def _checked_patch_torch_functions_type(self, value):
        if self.opt_level not in PATCHED:
            if value is not None:
                warn_or_err(
                    f"patch_torch_functions_type={value} does not go with {self.opt_level}",
                    remedy='opt_level="O1" patches to float16, "O4" to bfloat16',
                )
            return self.patch_torch_functions_type if value is not None else None
        wanted = torch.float16 if self.opt_level == "O1" else torch.bfloat16
        if value != wanted:
            warn_or_err(
                f"{self.opt_level} patches to {wanted}, not {value}",
                remedy='opt_level="O1" patches to float16, "O4" to bfloat16',
            )
            return self.patch_torch_functions_type
        return value

    def _checked_keep_batchnorm_fp32(self, value):
        if self.opt_level in PATCHED and value is not None:
            warn_or_err(
                f"under {self.opt_level} batch norms stay float32 anyway, so keep_batchnorm_fp32={value} "
                "does not go with it",
                remedy="leave keep_batchnorm_fp32 out",
            )
        value = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
        _check_truth("keep_batchnorm_fp32", value, 'True, False, "True", "False" or None')
        return value

    def _checked_master_weights(self, value):
        _check_truth("master_weights", value)
        if self.opt_level in PATCHED and value is not None:
            warn_or_err(
                f"under {self.opt_level} weights are float32 themselves, so master_weights={value} does not "
                "go with it",
                remedy="leave master_weights out",
            )
        return value

    def _checked_loss_scale(self, value):
        if value == "dynamic":
            return value
        try:
            scale = float(value)
        except (TypeError, ValueError):
            scale = math.nan
        if not 0.0 < scale < math.inf:
            raise AmpValueError(
                "loss_scale is no scale", wanted='a number above 0, or "dynamic"', found=repr(value)
            )
        return scale

    def _checked_user_cast_preferred(self, value):
        _check_truth("user_cast_preferred", value)
        if value and self.opt_level not in PATCHED:
            warn_or_err(
                f"user_cast_preferred=True does not go with {self.opt_level}, which patches nothing",
                remedy='opt_level="O1" or "O4"',
            )
        return value

    def _checked_combine_grad(self, value):
        return self._checked_combining("combine_grad", value)

    def _checked_check_combined_tensors(self, value):
        return self._checked_combining("check_combined_tensors", value)

    def _checked_combining(self, name, value):
        _check_truth(name, value)
        if value and self.opt_level not in COMBINING:
            warn_or_err(
                f"{name}=True does not go with {self.opt_level}",
                remedy='opt_level="O1" or "O2" (bfloat16: "O4" or "O5")',
            )
        return value

    def _checked_combine_ddp(self, value):
        _check_truth("combine_ddp", value)
        if value and not self.combine_grad:
            warn_or_err(
                "combine_ddp=True averages combined gradients, and combine_grad is not True",
                remedy="amp.initialize(..., combine_grad=True, combine_ddp=True)",
            )
        return value

    def _checked_ddp_replica_count(self, value):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise AmpValueError(f"ddp_replica_count must be a whole number from 1 on, not {value!r}")
        return value


def _check_truth(name, value, wanted="True, False or None"):
    """A string of an argument parser, "False" for one, would count as true."""
    if value not in (True, False, None):
        raise AmpValueError(f"{name} is not a truth value", wanted=wanted, found=repr(value))


def _check_floating(name, value):
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise AmpValueError(
            f"{name} is no floating-point dtype", wanted="torch.float16, for example", found=repr(value)
        )


def _check_numbers(scaling, verbosity):
    """Bounds and factors of a dynamic loss scale, by the names of amp.initialize; and verbosity."""
    bounds = {
        "dynamic_init_scale": (lambda x: 0.0 < x < math.inf, "a number above 0"),
        "max_loss_scale": (lambda x: x > 0.0, "a number above 0"),
        "min_loss_scale": (
            lambda x: 0.0 <= x <= scaling["max_loss_scale"],
            "None, or from 0 to max_loss_scale",
        ),
        "scale_growth_factor": (lambda x: 1.0 <= x < math.inf, "a number from 1 on"),
        "scale_backoff_factor": (lambda x: 0.0 < x < 1.0, "a number between 0 and 1"),
        "scale_window": (lambda x: x >= 1 and x % 1 == 0, "a whole number from 1 on"),
        "verbosity": (lambda x: True, "0, 1 or 2"),
    }
    for name, (fits, wanted) in bounds.items():
        value = verbosity if name == "verbosity" else scaling[name]
        if value is None and name == "min_loss_scale":
            continue
        if not (isinstance(value, numbers.Real) and fits(value)):
            raise AmpValueError(f"{name} is out of bounds", wanted=wanted, found=repr(value))


# ---- levels ----------------------------------------------------------------------------------------------


class _Level:
    """Sets the options of one level: `O1()(Properties())`."""

    brief = more = ""
    options: dict = {}

    def __call__(self, properties):
        properties._update_options_dict(
            {
                "enabled": True,
                "opt_level": type(self).__name__,
                "patch_torch_functions": False,
                "patch_torch_functions_type": None,
                "keep_batchnorm_fp32": None,
                **self.options,
            }
        )
        return properties


class O0(_Level):
    brief = "O0: float32."
    more = "Weights and inputs are cast to float32; nothing else changes. The baseline."
    options = {"cast_model_type": torch.float32, "master_weights": False, "loss_scale": 1.0}


class O1(_Level):
    brief = "O1: float16 around functions."
    more = (
        "Weights stay float32. torch's functions are patched: products and convolutions cast to float16,\n"
        "exponentials, sums, norms and losses to float32. The level to begin with."
    )
    options = {
        "cast_model_type": None,
        "patch_torch_functions": True,
        "patch_torch_functions_type": torch.float16,
        "master_weights": None,
        "loss_scale": "dynamic",
    }


class O2(_Level):
    brief = "O2: float16 model, float32 master weights."
    more = (
        "The model is cast to float16, but for batch norms and losses; so are inputs; outputs are float32\n"
        "again. The optimizer updates float32 masters, of which the model's weights are the roundings."
    )
    options = {
        "cast_model_type": torch.float16,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "dynamic",
    }


class O3(_Level):
    brief = "O3: float16."
    more = "The whole model is cast to float16, without master weights. How fast it could be."
    options = {
        "cast_model_type": torch.float16,
        "keep_batchnorm_fp32": False,
        "master_weights": False,
        "loss_scale": 1.0,
    }


class O4(_Level):
    brief = "O4: bfloat16 around functions."
    more = "O1 with bfloat16, which has the range of float32 and needs no loss scale."
    options = {**O1.options, "patch_torch_functions_type": torch.bfloat16, "loss_scale": 1.0}


class O5(_Level):
    brief = "O5: bfloat16 model, float32 master weights."
    more = "O2 with bfloat16, which has the range of float32 and needs no loss scale."
    options = {**O2.options, "cast_model_type": torch.bfloat16, "loss_scale": 1.0}


opt_levels = {level.__name__: level() for level in (O0, O1, O2, O3, O4, O5)}


# ---- positional order ------------------------------------------------------------------------------------

_AMBIGUOUS = 6  # patch_torch_functions_type here and in ROCm's apex, keep_batchnorm_fp32 in NVIDIA's


def _takes_nvidia_order(function):
    """Positional arguments in NVIDIA's order, which lacks patch_torch_functions_type, are understood."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def initialize(*args, **kwargs):
        if len(args) > _AMBIGUOUS and _is_nvidia_order(args):
            warnings.warn(
                "amp.initialize: its seventh positional argument is patch_torch_functions_type (ROCm's), "
                f"but {args[_AMBIGUOUS]!r} is understood as keep_batchnorm_fp32 (NVIDIA's order) and what "
                "follows accordingly; pass these by name",
                AmpWarning,
                stacklevel=2,
            )
            args = (*args[:_AMBIGUOUS], None, *args[_AMBIGUOUS:])
        elif (
            len(args) > _AMBIGUOUS + 1 and args[_AMBIGUOUS] is None and isinstance(args[_AMBIGUOUS + 1], bool)
        ):
            warnings.warn(
                f"amp.initialize: its eighth positional argument, {args[_AMBIGUOUS + 1]}, is taken as "
                f"{names[_AMBIGUOUS + 1]} (ROCm's order); in NVIDIA's it is {names[_AMBIGUOUS + 2]}; "
                "pass it by name",
                AmpWarning,
                stacklevel=2,
            )
        return function(*args, **kwargs)

    return initialize


def _is_nvidia_order(args):
    """Whether the arguments from the seventh on are keep_batchnorm_fp32, master_weights, loss_scale, ..."""
    first, rest = args[_AMBIGUOUS], args[_AMBIGUOUS + 1 :]
    if isinstance(first, (bool, str)):
        return True
    if first is not None:
        return False
    # None may be either: look at what only one of the orders could have in the places that follow.
    third = rest[1] if len(rest) > 1 else None  # master_weights here, NVIDIA's loss_scale
    fourth = rest[2] if len(rest) > 2 else None  # loss_scale here, NVIDIA's cast_model_outputs
    fifth = rest[3] if len(rest) > 3 else None  # cast_model_outputs here, NVIDIA's num_losses
    is_number = isinstance(third, (int, float, str)) and not isinstance(third, bool)
    return is_number or isinstance(fourth, torch.dtype) or isinstance(fifth, int)


@_takes_nvidia_order
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
        from apex.amp._initialize import disable

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
    _check_numbers(scaling, verbosity)
    if cast_model_outputs is not None:
        _check_floating("cast_model_outputs", cast_model_outputs)
    scaling["init_scale"] = scaling.pop("dynamic_init_scale")
    scaling["scale_window"] = int(scale_window)
    properties = opt_levels[opt_level](properties)
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, value)

    from apex.amp._initialize import _initialize

    returned = _initialize(models, optimizers, properties, num_losses, cast_model_outputs, scaling, verbosity)
    maybe_print(f"apex.amp {opt_levels[opt_level].brief}", True)
    for name, value in properties.options.items():
        changed = "  (overridden)" if overrides.get(name) is not None else ""
        maybe_print(f"    {name:27}: {value}{changed}", True)
    os.environ["APEX_AMP_ENABLED"] = "1"  # ROCm's apex sets it
    return returned


# ---- state -----------------------------------------------------------------------------------------------


def _scalers():
    if not hasattr(_amp_state, "loss_scalers"):
        raise AmpUsageError("amp has no state before amp.initialize", remedy=INITIALIZE)
    return _amp_state.loss_scalers


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}; empty while amp is disabled.

    Waits for the device. destination: a dict to put it into.
    """
    destination = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_scalers()):
        destination[f"loss_scaler{index}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Restores what `state_dict` saved; call it after amp.initialize.

    Other loss scalers than here's are warned of. Raises AmpUsageError for what is no state of amp, before anything
    changes.
    """
    scalers = _scalers()
    states = {_number_of_scaler(key): _checked_state(key, saved) for key, saved in _items(state_dict)}
    if set(states) != set(range(len(scalers))):
        why = f"num_losses={len(scalers)}" if scalers else "amp is disabled"
        taken = sorted(set(states) & set(range(len(scalers))))
        warnings.warn(
            f"amp's state dict holds {len(states)} loss scalers, but {why}: taken are {taken or 'none'}",
            AmpWarning,
            stacklevel=2,
        )
    for number, scaler in enumerate(scalers):
        if number in states:
            scaler._loss_scale, scaler._unskipped = states[number]


_LOAD = 'amp.load_state_dict(checkpoint["amp"]), of what amp.state_dict() returned'


def _items(state_dict):
    if not isinstance(state_dict, Mapping):
        raise AmpTypeError(f"amp's state dict is no dict, but {type(state_dict).__name__}", remedy=_LOAD)
    return state_dict.items()


def _number_of_scaler(key):
    number = key.removeprefix("loss_scaler") if isinstance(key, str) and key.startswith("loss_scaler") else ""
    if not number.isdecimal():
        raise AmpUsageError(f"amp's state dict holds an unexpected key: {key!r}", remedy=_LOAD)
    return int(number)


def _checked_state(key, saved):
    """(loss scale, updates since the last overflow)"""
    try:
        scale, unskipped = float(saved["loss_scale"]), int(saved["unskipped"])
    except (KeyError, TypeError, ValueError, IndexError):
        scale, unskipped = math.nan, 0
    if not (0.0 < scale < math.inf and unskipped >= 0):
        raise AmpValueError(
            f"{key} of amp's state dict is no loss scaler's",
            wanted='{"loss_scale": a number above 0, "unskipped": a number from 0 on}',
            found=repr(saved),
            remedy=_LOAD,
        )
    return scale, unskipped
