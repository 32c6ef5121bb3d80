"""The L2 norm of all gradients of an optimizer, on the device, without a host synchronisation."""

from __future__ import annotations

import operator

import torch

from apex._sharding import combine_norm, local, local_gradient, shard_groups
from apex.optimizers._plan import make_plan


class GradientNorm:
    """Measures the gradients of a changing list of parameters, by one plan for each device and sharding."""

    def __init__(self):
        self._params = []
        self._parts = []

    def measure(self, params, **scalars):
        """Dict device -> float32 tensor of one element: the norm of all gradients of `params`, on each device.

        scalars: of the op multi_tensor_l2norm (noop_flag, check_noop, inv_scale).
        """
        if len(params) != len(self._params) or not all(map(operator.is_, params, self._params)):
            self._make_parts(params)
        norms = {}
        for device, groups, part, plan in self._parts:
            total = torch.zeros(1, dtype=torch.float32, device=device)
            plan.set_gradients([local_gradient(p) for p in part] if groups else None)
            plan.run("multi_tensor_l2norm", total=total, **scalars)
            norms.setdefault(device, []).append(combine_norm(total, groups))
        parts = [norm for of_device in norms.values() for norm in of_device]
        if len(parts) == 1:
            return {device: parts[0] for device in norms}
        first = parts[0].device
        total = torch.linalg.vector_norm(torch.cat([part.to(first) for part in parts])).reshape(1)
        return {device: total.to(device) for device in norms}

    def _make_parts(self, params):
        by_key = {}
        for p in params:
            by_key.setdefault((local(p).device, shard_groups(p)), []).append(p)
        self._parts = [
            (device, groups, part, make_plan(["gradient of parameter"], 0, [], part))
            for (device, groups), part in by_key.items()
        ]
        self._params = list(params)
