from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from apex.optimizers._arguments import check_arguments
from apex.optimizers._combined_optimizer import CombinedOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["CombinedRMSprop", "CombinedRMSpropTF"]


class CombinedRMSprop(CombinedOptimizer):
    """torch.optim.RMSprop over combined tensors: one launch a group. Works after amp.initialize (O1, O2, O4, O5).

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        alpha: decay of the averages.
        eps: added to the root of the average of squares.
        weight_decay: strength of the L2 penalty.
        momentum: factor of the momentum buffer; 0: there is none.
        centered: divide by the gradients' standard deviation.

    Raises:
        ValueError: lr, alpha, eps, weight_decay or momentum is negative.
        RuntimeError: step() without amp.initialize; a sparse gradient.

    Sources: Hinton, lecture 6e (2012); arXiv:1308.0850; in the form of torch.optim.RMSprop.
    """

    _form_defaults: dict = {}  # further options that groups have

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
    ) -> None:
        numbers = dict(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
        check_arguments(type(self).__name__, **numbers)
        super().__init__(params, {**numbers, "centered": centered, **self._form_defaults})

    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:  # of checkpoints from before these options
            group.setdefault("momentum", 0)
            group.setdefault("centered", False)

    def _states(self, group):
        centered = ("grad_avg",) if group["centered"] else ()
        return ("square_avg", *centered, *(("momentum_buffer",) if group["momentum"] > 0 else ()))

    def _form(self, group):
        return {}

    def _update(self, group, slices, scaling):
        slices.run(
            "multi_tensor_rmsprop",
            self._states(group),
            lr_from=group,
            alpha=group["alpha"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            **self._form(group),
            **scaling,
        )
        slices.count_on_device(scaling)


class CombinedRMSpropTF(CombinedRMSprop):
    """RMSprop as TensorFlow has it, over combined tensors: eps is under the root, and the average begins with zero.

    Args:
        params, lr, alpha, weight_decay, momentum, centered: as CombinedRMSprop.
        eps: added to the average of squares, under the root.
        decoupled_decay: parameters lose weight_decay of themselves before the step, whatever the learning rate; else
            an L2 penalty.
        lr_in_momentum: the learning rate multiplies what goes into the momentum buffer, not what comes out.

    Raises:
        ValueError, RuntimeError: as CombinedRMSprop.

    Source: the RMSpropTF of public model collections, with averages that begin with zero as in the Ascend patch.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
    ) -> None:
        self._form_defaults = dict(decoupled_decay=decoupled_decay, lr_in_momentum=lr_in_momentum)
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, centered)

    def _form(self, group):
        return dict(
            eps_inside=True,
            decoupled_decay=bool(group["decoupled_decay"]),
            lr_in_momentum=bool(group["lr_in_momentum"]),
        )
