from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import required

from apex.optimizers._arguments import check_arguments
from apex.optimizers._combined_optimizer import CombinedOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["CombinedSGD"]


class CombinedSGD(CombinedOptimizer):
    """torch.optim.SGD over combined tensors: one launch a group. Works after amp.initialize (O1, O2, O4, O5).

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        momentum: factor of the momentum buffer; 0: there is none.
        dampening: gradients enter the buffer times 1 - dampening, but for a parameter's first.
        weight_decay: strength of the L2 penalty.
        nesterov: look ahead by one more step of the buffer.

    Raises:
        ValueError: lr, momentum or weight_decay is negative; nesterov without momentum or with dampening.
        RuntimeError: step() without amp.initialize; a sparse gradient.

    Source: Sutskever et al., ICML 2013, in the form of torch.optim.SGD.
    """

    counts = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        given = {} if lr is required else {"lr": lr}
        check_arguments(type(self).__name__, **given, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = dict(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
        super().__init__(params, defaults)

    def _states(self, group):
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _new_state(self, like):
        return super()._new_state(like).neg_()  # -0.0: never took a step

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            buffer = state.get("momentum_buffer")
            if buffer is not None and buffer.any():
                buffer.add_(0.0)  # others may store -0.0, which here means that no step was taken

    def _update(self, group, slices, scaling):
        slices.run(
            "multi_tensor_sgd",
            self._states(group),
            lr_from=group,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=bool(group["nesterov"]),
            first_run=False,
            wd_after_momentum=False,
            scale=1.0,
            marked_first_run=True,
            **scaling,
        )
