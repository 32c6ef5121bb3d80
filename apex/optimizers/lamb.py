from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from apex.optimizers._arguments import check_arguments, check_numbers, evaluate

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["Lamb"]

MAX_PARAM_NORM = 10.0


class Lamb(torch.optim.Optimizer):
    """LAMB of the paper's third version, in plain torch: no bias correction, norms of parameters up to 10.

    CombinedLamb is the same over combined tensors; FusedLAMB is the LAMB of public apex.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: strength of the decoupled decay.
        adam: leave the ratio of norms out.

    Its states hold step, exp_avg, exp_avg_sq, and of the last step weight_norm, adam_norm and trust_ratio (tensors
    without dimensions).

    Raises:
        ValueError: lr, eps or weight_decay is negative, a beta is not in [0, 1).
        RuntimeError: a sparse gradient.

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
    ) -> None:
        check_arguments("Lamb", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.adam = adam
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def __getstate__(self):
        return {**super().__getstate__(), "adam": self.adam}

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure`, if given, returns."""
        loss = evaluate(closure)
        for index, group in enumerate(self.param_groups):
            check_numbers("Lamb", index, group)
            if any(p.grad is not None and p.grad.layout != torch.strided for p in group["params"]):
                raise RuntimeError("Lamb does not support sparse gradients, consider SparseAdam instead")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)
        return loss

    def _step(self, p, grad, group):
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = exp_avg / exp_avg_sq.sqrt().add_(group["eps"])
        if group["weight_decay"] != 0:
            update.add_(p, alpha=group["weight_decay"])
        weight_norm = torch.linalg.vector_norm(p).clamp(max=MAX_PARAM_NORM)
        adam_norm = torch.linalg.vector_norm(update)
        known = (weight_norm != 0) & (adam_norm != 0)
        trust_ratio = torch.where(known, weight_norm / adam_norm, torch.ones_like(weight_norm))
        state.update(weight_norm=weight_norm, adam_norm=adam_norm, trust_ratio=trust_ratio)
        if not self.adam:
            update.mul_(trust_ratio)
        p.sub_(update.mul_(group["lr"]))
