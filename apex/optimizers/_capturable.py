"""Step counts, on the host or (``capturable``) on the device."""

from __future__ import annotations

import torch

from apex._sharding import local
from apex.optimizers._scalars import learning_rate


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

    def _run_counted(self, plan, op, group, **scalars):
        """Runs `op` with the group's learning rate and its next step."""
        device = local(group["params"][0]).device
        counted = group.get("step")
        if not (self.capturable or "found_inf" in scalars or isinstance(counted, torch.Tensor)):
            step = group.get("step", 0) + 1
            plan.run(op, step=step, **learning_rate(group, device), **scalars)
            group["step"] = step
            return
        if not isinstance(counted, torch.Tensor):
            group["step"] = torch.full((1,), counted or 0, dtype=torch.int32, device=device)
        if self.capturable and isinstance(group["lr"], torch.Tensor):
            rate = dict(lr=0.0, lr_tensor=group["lr"])
        else:
            rate = learning_rate(group, device)
        # Shards of parameters: a rank may hold none, and must count all the same.
        advance = not plan.shards
        if not advance:
            found_inf = scalars.get("found_inf")
            group["step"] += 1 if found_inf is None else (found_inf == 0).to(torch.int32).reshape(1)
        if (
            not plan.run(op, step=0, step_tensor=group["step"], advance_step=advance, **rate, **scalars)
            and advance
        ):
            group["step"] += 1  # no launch, so no kernel that advances it
