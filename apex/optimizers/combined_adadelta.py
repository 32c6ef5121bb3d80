from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from apex.optimizers._arguments import check_arguments, check_fraction
from apex.optimizers._combined_optimizer import CombinedOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["CombinedAdadelta"]


class CombinedAdadelta(CombinedOptimizer):
    """torch.optim.Adadelta over combined tensors: one launch a group. Works after amp.initialize (O1, O2, O4, O5).

    Args:
        params: parameters, or dicts that define groups.
        lr: factor of what the method proposes.
        rho: decay of the averages of squared gradients and squared updates.
        eps: added to both averages.
        weight_decay: strength of the L2 penalty.

    Raises:
        ValueError: lr, eps or weight_decay is negative, rho is not in [0, 1).
        RuntimeError: step() without amp.initialize; a sparse gradient.

    Source: arXiv:1212.5701, in the form of torch.optim.Adadelta.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
    ) -> None:
        check_arguments(type(self).__name__, lr=lr, eps=eps, weight_decay=weight_decay)
        check_fraction(rho=rho)
        super().__init__(params, dict(lr=lr, rho=rho, eps=eps, weight_decay=weight_decay))

    def _states(self, group):
        return ("square_avg", "acc_delta")

    def _update(self, group, slices, scaling):
        slices.run(
            "multi_tensor_adadelta",
            self._states(group),
            lr_from=group,
            rho=group["rho"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            **scaling,
        )
        slices.count_on_device(scaling)
