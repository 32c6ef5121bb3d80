from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import required

from apex._flat import gradient_norm
from apex.optimizers._arguments import check_arguments
from apex.optimizers._combined_optimizer import CombinedOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["SCHEDULES", "CombinedBertAdam"]

DECOUPLED = 1


def _warm(x, warmup, later):
    """x / warmup while x < warmup, then `later`; x is a tensor."""
    return torch.where(x < warmup, x / warmup, later) if warmup > 0 else later


def warmup_cosine(x, warmup=0.002):
    """Up to 1 at x = warmup, then half a cosine of x."""
    return _warm(x, warmup, 0.5 * (1.0 + torch.cos(math.pi * x)))


def warmup_constant(x, warmup=0.002):
    """Up to 1 at x = warmup, then 1."""
    return _warm(x, warmup, torch.ones_like(x))


def warmup_linear(x, warmup=0.002):
    """Up to 1 at x = warmup, then down to 0 at x = 1."""
    return _warm(x, warmup, ((x - 1.0) / (warmup - 1.0)).clamp(min=0.0))


def warmup_poly(x, warmup=0.002, degree=0.5):
    """Up to 1 at x = warmup, then (1 - x) to the power of `degree`, 0 from x = 1 on."""
    return _warm(x, warmup, (1.0 - x).clamp(min=0.0) ** degree)


SCHEDULES = {f.__name__: f for f in (warmup_cosine, warmup_constant, warmup_linear, warmup_poly)}


class CombinedBertAdam(CombinedOptimizer):
    """The Adam that BERT was trained with, over combined tensors: no bias correction, decoupled weight decay, and a
    schedule of the learning rate. One launch a group. Works after amp.initialize (O1, O2, O4, O5).

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        warmup: part of t_total in which the learning rate rises from 0; -1: none.
        t_total: steps of the whole schedule; -1: the learning rate is constant.
        schedule: "warmup_linear", "warmup_cosine", "warmup_constant" or "warmup_poly".
        b1, b2: decay of the averages of the gradient and of its square.
        e: added to the denominator.
        weight_decay: strength of the decoupled decay.
        max_grad_norm: if above 0, gradients are divided by their norm over all groups where that is finite and more
            than 1. The limit is 1 whatever the number, as in the Ascend patch.

    With warmup=-1 and a t_total, warmup_linear begins at half the learning rate: (x - 1) / (warmup - 1).

    Raises:
        ValueError: lr, e or weight_decay is negative, b1 or b2 is not in [0, 1), warmup is neither -1 nor in [0, 1),
            or there is no such schedule.
        RuntimeError: step() without amp.initialize; a sparse gradient.

    Source: arXiv:1810.04805, appendix A.2, and its published code.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = required,
        warmup: float = -1,
        t_total: int = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.99,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = -1,
    ) -> None:
        given = {} if lr is required else {"lr": lr}
        check_arguments(type(self).__name__, **given, betas=(b1, b2), e=e, weight_decay=weight_decay)
        if schedule not in SCHEDULES:
            raise ValueError(f"there is no schedule {schedule!r}; there are {', '.join(sorted(SCHEDULES))}")
        if warmup != -1 and not 0.0 <= warmup < 1.0:
            raise ValueError(f"warmup must be -1, or lie in [0, 1): {warmup}")
        defaults = dict(
            lr=lr,
            schedule=schedule,
            warmup=warmup,
            t_total=t_total,
            b1=b1,
            b2=b2,
            e=e,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )
        super().__init__(params, defaults)

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter's next step, as floats; [0] before the first. Waits for the device."""
        rates = []
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p)
                if not state:
                    return [0]
                step = torch.as_tensor(state["step"], dtype=torch.int32, device=p.device)
                rates.append(float(_rate(group, step)))
        return rates

    def _states(self, group):
        return ("exp_avg", "exp_avg_sq")

    def _before_groups(self, combined, groups):
        self._inv_norm = None
        if combined.parts and any(group["max_grad_norm"] > 0 for group in self.param_groups):
            norm = gradient_norm([part.grad for part in combined.parts])
            self._inv_norm = torch.where(
                torch.isfinite(norm) & (norm > 1.0), 1.0 / norm, torch.ones_like(norm)
            )

    def _update(self, group, slices, scaling):
        if group["max_grad_norm"] > 0:
            scaling = {**scaling, "inv_scale": self._inv_norm}
        rate = _rate(group, slices.step)
        rate = dict(lr=0.0, lr_tensor=rate) if isinstance(rate, torch.Tensor) else dict(lr=rate)
        slices.run(
            "multi_tensor_adam",
            self._states(group),
            beta1=group["b1"],
            beta2=group["b2"],
            eps=group["e"],
            decay_mode=DECOUPLED,
            bias_correction=False,
            weight_decay=group["weight_decay"],
            **rate,
            **slices.counted(),
            **scaling,
        )


def _rate(group, step):
    """The learning rate after `step` steps (an int32 tensor): a float, or a float32 tensor where a schedule counts."""
    if group["t_total"] == -1:
        return float(group["lr"])
    x = step.to(torch.float32) / group["t_total"]
    return (group["lr"] * SCHEDULES[group["schedule"]](x, group["warmup"])).reshape(1).to(torch.float32)
