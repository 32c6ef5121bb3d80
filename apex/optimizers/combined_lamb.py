from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from apex._flat import gradient_norm
from apex.optimizers._arguments import check_arguments
from apex.optimizers._combined_optimizer import CombinedOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["CombinedLamb"]

DECOUPLED = 1
MAX_PARAM_NORM = 10.0


class CombinedLamb(CombinedOptimizer):
    """LAMB of the paper's third version over combined tensors: no bias correction, norms of parameters up to 10.

    Two launches a group. Gradients hold the updates after a step. Works after amp.initialize (O1, O2, O4, O5).
    apex.optimizers.Lamb is the same without combined tensors and amp; FusedLAMB the LAMB of public apex.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: strength of the decoupled decay.
        adam: leave the ratio of norms out.
        use_global_grad_norm: divide gradients by their norm over all groups where that is more than 1.

    Raises:
        ValueError: lr, eps or weight_decay is negative, a beta is not in [0, 1).
        RuntimeError: step() without amp.initialize; a sparse gradient.

    Source: arXiv:1904.00962v3, algorithm 2.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
    ) -> None:
        check_arguments(type(self).__name__, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.adam = adam
        self.use_global_grad_norm = use_global_grad_norm
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def __getstate__(self):
        return {
            **super().__getstate__(),
            "adam": self.adam,
            "use_global_grad_norm": self.use_global_grad_norm,
        }

    def _states(self, group):
        return ("exp_avg", "exp_avg_sq")

    def _before_groups(self, combined, groups):
        self._norm = None
        if combined.parts and self.use_global_grad_norm:
            self._norm = gradient_norm([part.grad for part in combined.parts])

    def _update(self, group, slices, scaling):
        beta1, beta2 = group["betas"]
        scalars = dict(
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            decay_mode=DECOUPLED,
            bias_correction=False,
            weight_decay=group["weight_decay"],
            **slices.counted(),
            **scaling,
        )
        if self.adam:
            if self._norm is not None:
                scalars["inv_scale"] = torch.where(
                    self._norm > 1.0, 1.0 / self._norm, torch.ones_like(self._norm)
                )
            slices.run("multi_tensor_adam", self._states(group), lr_from=group, **scalars)
            return
        slices.run_by_tensor(
            "multi_tensor_lamb",
            self._states(group),
            group,
            grad_averaging=True,
            global_grad_norm=self._norm,
            max_grad_norm=1.0 if self._norm is not None else 0.0,
            use_nvlamb=True,
            max_param_norm=MAX_PARAM_NORM,
            **scalars,
        )
