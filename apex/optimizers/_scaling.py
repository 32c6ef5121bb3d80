"""Loss scaling that an optimizer undoes by itself, on the device: torch.amp.GradScaler's side of it."""

from __future__ import annotations

import torch
from torch.amp.grad_scaler import OptState

from apex._gradients import separate_gradients


class Scaling:
    """What is in force at one step.

    torch's GradScaler hands itself to step(), or, as torch announces, sets `grad_scale` and `found_inf` on
    the optimizer. Gradients that unscale_() went over are not unscaled again.
    """

    def __init__(self, optimizer, grad_scaler=None):
        found, self._scale = (), None
        if grad_scaler is None:
            self._scale = getattr(optimizer, "grad_scale", None)
            found = [getattr(optimizer, "found_inf", None)]
        elif grad_scaler.is_enabled():
            state = grad_scaler._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.UNSCALED:
                found = state["found_inf_per_device"].values()
            else:
                found = grad_scaler._check_inf_per_device(optimizer).values()
                self._scale = grad_scaler._get_scale_async()
        if self._scale is not None:
            separate_gradients([p for group in optimizer.param_groups for p in group["params"]])
        # The number 0 is what torch makes of an optimizer without gradients: nothing was found.
        self._found = [flag for flag in found if isinstance(flag, torch.Tensor)]
        self._on = {}

    def on(self, device):
        """Keywords for an op there: found_inf (an overflow on any device), inv_scale; each may lack."""
        if device not in self._on:
            self._on[device] = options = {}
            if self._found:
                first, *others = (flag.to(device, torch.float32) for flag in self._found)
                options["found_inf"] = sum(others, first)
            if self._scale is not None:
                options["inv_scale"] = self._scale.to(device, torch.float32).reciprocal()
        return self._on[device]

    def unscaling(self, device):
        """The same for an op that also leaves gradients unscaled, as torch's optimizers do."""
        options = self.on(device)
        return {**options, "unscale_grads": True} if "inv_scale" in options else options
