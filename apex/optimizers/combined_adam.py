from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from apex.optimizers._arguments import check_arguments
from apex.optimizers._combined_optimizer import CombinedOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["CombinedAdam", "CombinedAdamW"]

L2, DECOUPLED = 0, 1


class CombinedAdam(CombinedOptimizer):
    """torch.optim.Adam over combined tensors: one launch a group. Works after amp.initialize (O1, O2, O4, O5).

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: strength of the L2 penalty (CombinedAdamW: of the decoupled decay).
        amsgrad: divide by the largest second moment so far.

    Raises:
        ValueError: lr, eps or weight_decay is negative, a beta is not in [0, 1).
        RuntimeError: step() without amp.initialize; a sparse gradient.

    Sources: arXiv:1412.6980, arXiv:1711.05101, arXiv:1904.09237, in the form of torch.optim.Adam.
    """

    decay_mode = L2

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
    ) -> None:
        check_arguments(type(self).__name__, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        super().__init__(params, defaults)

    def _states(self, group):
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _update(self, group, slices, scaling):
        beta1, beta2 = group["betas"]
        slices.run(
            "multi_tensor_amsgrad" if group["amsgrad"] else "multi_tensor_adam",
            self._states(group),
            lr_from=group,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            decay_mode=self.decay_mode,
            bias_correction=True,
            weight_decay=group["weight_decay"],
            **slices.counted(),
            **scaling,
        )


class CombinedAdamW(CombinedAdam):
    """torch.optim.AdamW over combined tensors: CombinedAdam with decoupled weight decay, 0.01 by default."""

    decay_mode = DECOUPLED

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad)
