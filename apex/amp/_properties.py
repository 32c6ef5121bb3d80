"""The options of amp.initialize, each checked against its kind and the level."""

from __future__ import annotations

import math
import numbers

import torch

from apex.amp._amp_state import warn_or_err
from apex.amp._errors import AmpValueError

COMBINING = ("O1", "O2", "O4", "O5")  # levels with an optimizer that updates float32: tensors can be combined
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
            check_floating("cast_model_type", value)
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


def check_floating(name, value):
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise AmpValueError(
            f"{name} is no floating-point dtype", wanted="torch.float16, for example", found=repr(value)
        )


def check_numbers(scaling, verbosity):
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
