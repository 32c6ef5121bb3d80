"""Step counts, on the host or (``capturable``) on the device."""

from __future__ import annotations

import torch

from apex._sharding import local
from apex.optimizers._scalars import learning_rate


def count_step(group, device, found_inf=None, on_device=False):
    """Counts a step of a group: on the host, or in a tensor on `device` where that, or found_inf, is there."""
    counted = group.get("step", 0)
    if not (on_device or found_inf is not None or isinstance(counted, torch.Tensor)):
        group["step"] = counted + 1
        return
    count_on(group, device).add_(counted_by(found_inf))


def count_on(group, device):
    """group["step"], int32 of one element on `device`; another number or tensor there is replaced by such a one."""
    counted = group.get("step")
    if not isinstance(counted, torch.Tensor):
        counted = torch.full((1,), counted or 0, dtype=torch.int32, device=device)
    elif counted.device != device or counted.dtype != torch.int32 or counted.dim() != 1:
        counted = counted.to(device, torch.int32).reshape(1)
    group["step"] = counted
    return counted


def counted_by(found_inf):
    """What a step that found_inf may skip adds to a count on the device."""
    return 1 if found_inf is None else (found_inf == 0).to(torch.int32).reshape(1)


class Capturable:
    """Mixin of optimizers that count steps, before FusedOptimizer.

    With ``self.capturable`` a group's learning rate and step count are tensors on the device, so that a step
    can be captured in a CUDA graph and replayed. The count alone moves there once a step is given
    ``found_inf``: whether that step counts is then known to the device only.
    """

    capturable = False

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        if self.capturable:
            self._move_scalars_to_device(self.param_groups[-1])

    def _move_scalars_to_device(self, group):
        if not group["params"]:
            return
        device = local(group["params"][0]).device
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        if "step" in group:
            group["step"] = (
                torch.as_tensor(group["step"], dtype=torch.int32, device=device).reshape(1).clone()
            )

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if self.capturable:
                self._move_scalars_to_device(group)
            else:
                group.update({k: v.item() for k, v in group.items() if isinstance(v, torch.Tensor)})

    def _count_without_parameters(self, group, scaling):
        """A step of a group that has none: those that come later are corrected by what all groups count."""
        device = next((local(p).device for g in self.param_groups for p in g["params"]), torch.device("cpu"))
        count_step(group, device, scaling.on(device).get("found_inf"), self.capturable)

    def _run_counted(self, plan, op, group, **scalars):
        """Runs `op` with the group's learning rate and its next step."""
        device = local(group["params"][0]).device
        counted = group.get("step")
        if not (self.capturable or "found_inf" in scalars or isinstance(counted, torch.Tensor)):
            step = group.get("step", 0) + 1
            plan.run(op, step=step, **learning_rate(group, device), **scalars)
            group["step"] = step
            return
        counted = count_on(group, device)
        rate = learning_rate(group, device, kept_there=self.capturable)
        found_inf = scalars.get("found_inf")
        if plan.shards:  # a rank may hold none, and must count all the same
            step = counted + counted_by(found_inf)
            plan.run(op, step=0, step_tensor=step, advance_step=False, **rate, **scalars)
            counted.copy_(step)
        elif not plan.run(op, step=0, step_tensor=counted, advance_step=True, **rate, **scalars):
            count_step(group, device, found_inf)  # no launch, so no kernel that does
