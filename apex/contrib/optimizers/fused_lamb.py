"""FusedLAMB as public apex's contrib has it: apex.optimizers.FusedLAMB with the arguments of old."""

from __future__ import annotations

from typing import TYPE_CHECKING

from apex import optimizers
from apex._legacy import fused_lamb_cuda

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedLAMB"]


class FusedLAMB(optimizers.FusedLAMB):
    """LAMB; the ratio of norms scales a step where weight_decay is not 0. New code: apex.optimizers.FusedLAMB.

    Arguments, what is raised, and the layout of its state are that one's; use_nvlamb is not among them.
    """

    multi_tensor_lamb = staticmethod(fused_lamb_cuda.lamb)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging,
            set_grad_none=set_grad_none,
            max_grad_norm=max_grad_norm,
        )
