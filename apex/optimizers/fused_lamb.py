from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from apex._gradients import separate_gradients
from apex._sharding import local
from apex.optimizers._amp_c import AmpCFunction
from apex.optimizers._arguments import check_arguments, evaluate
from apex.optimizers._fused_optimizer import FusedOptimizer
from apex.optimizers._gradient_norm import GradientNorm
from apex.optimizers._model_copies import ModelCopies
from apex.optimizers._tensor_norms import sharded_norms

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedLAMB"]


class FusedLAMB(ModelCopies, FusedOptimizer):
    """LAMB in three launches per dtype: the global gradient norm, the moments, the scaled update.

    The interface is that of public apex. Parameters: float16, bfloat16, float32 (moments in float32) and
    float64, mixed at will. Gradients are used up: step() leaves each parameter's update in its gradient.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        bias_correction: divide the averages by 1 - beta^step.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: its strength.
        amsgrad: must be False.
        adam_w_mode: decoupled weight decay if True, an L2 penalty if False.
        grad_averaging: weigh the gradient by 1 - beta1 in its average.
        set_grad_none: zero_grad() drops gradients rather than zeroing them.
        max_grad_norm: all gradients of all groups are scaled down together to this norm; 0 or None: never.
        use_nvlamb: scale by the ratio of norms also where weight_decay is 0.

    Raises:
        RuntimeError: amsgrad, or a sparse gradient.
        TypeError: parameters of another dtype.
        ValueError: a number out of its bounds; parameters of CPU and accelerator in one group.

    Source: arXiv:1904.00962; numerics and state layout of public apex.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    multi_tensor_l2norm = AmpCFunction()
    multi_tensor_lamb = AmpCFunction()
    reads_found_inf = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        bounds = dict(lr=lr, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm or 0.0)
        check_arguments("FusedLAMB", amsgrad=amsgrad, betas=betas, **bounds)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self._gradient_norm = GradientNorm()
        defaults = dict(
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
        )
        super().__init__(params, defaults, set_grad_none)

    def __setstate__(self, state):
        super().__setstate__(state)
        self._gradient_norm = GradientNorm()

    def _written(self, group):
        return super()._written(group) | 1  # gradients hold the updates between the two launches

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure`, if given, returns."""
        loss = evaluate(closure)
        params = [p for group in self.param_groups for p in group["params"]]
        separate_gradients(params)  # the update is left in them
        plans = self._all_plans(first=False)
        norms = self._gradient_norm.measure(params)
        for index, group in enumerate(self.param_groups):
            step = group.get("step", 0) + 1
            if group["params"]:
                self._step_group(plans[index], group, step, norms)
            group["step"] = step
        return loss

    def _step_group(self, plan, group, step, norms):
        beta1, beta2 = group["betas"]
        # Where tensors are spread over ranks, their norms are too: the parameters wait for those.
        lr = 0.0 if plan.shards else float(group["lr"])
        plan.run(
            "multi_tensor_lamb",
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            step=step,
            bias_correction=bool(group["bias_correction"]),
            weight_decay=group["weight_decay"],
            grad_averaging=bool(group["grad_averaging"]),
            decay_mode=self.adam_w_mode,
            global_grad_norm=norms[local(group["params"][0]).device],
            max_grad_norm=self.defaults["max_grad_norm"] or 0.0,
            use_nvlamb=self.use_nvlamb,
        )
        if plan.shards:
            self._apply_over_ranks(plan, group)

    def _apply_over_ranks(self, plan, group):
        """The second half of the step for DTensors, whose gradients hold the updates by now."""
        rows = [
            (p, shard, update)
            for (p, shard), update in zip(plan.shards, plan.gradients, strict=True)
            if update is not None
        ]
        if not rows:
            return
        params, shards, updates = map(list, zip(*rows, strict=True))
        norms = [sharded_norms(params, parts) for parts in (shards, updates)]
        rate, decay = float(group["lr"]), group["weight_decay"]
        torch.ops.apex.multi_tensor_lamb_stage2(shards, updates, [], *norms, rate, decay, self.use_nvlamb)
