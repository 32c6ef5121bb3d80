from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from apex._sharding import local, local_gradient
from apex.optimizers._amp_c import AmpCFunction
from apex.optimizers._arguments import check_arguments, evaluate
from apex.optimizers._capturable import Capturable, count_step
from apex.optimizers._fused_optimizer import FusedOptimizer
from apex.optimizers._scaling import Scaling
from apex.optimizers._tensor_norms import sharded_norms

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedNovoGrad"]

_HALVES = (torch.float16, torch.bfloat16)


class FusedNovoGrad(Capturable, FusedOptimizer):
    """NovoGrad in two launches per dtype: the gradients' norms, the update.

    The interface is that of public apex. Parameters: float16, bfloat16, float32 (averages in float32; public
    apex rounds them to the parameter's dtype) and float64, mixed at will, those of a group on one device. The
    averaged norm of each parameter's gradient is a float32 in ``group["exp_avg_sq"]``, as in public apex: a
    tensor for the half-precision parameters that have received a gradient, in order, and one for the others.
    (It is the norm, not its square; negative before the first step, unless init_zero.)

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate; a float32 tensor of one element on the parameters' device may change between
            replays.
        bias_correction: divide the average by 1 - beta1^step, the norm by sqrt(1 - beta2^step).
        betas: decay of the averages of the gradient and of its norm.
        eps: added to the norm.
        weight_decay: its strength.
        amsgrad: must be False.
        reg_inside_moment: average the weight decay with the normalised gradient, as the paper does; if False,
            it is decoupled and the norm divides the average.
        grad_averaging: weigh the gradient by 1 - beta1 in its average.
        norm_type: 2 for the L2 norm, 0 for the largest magnitude.
        init_zero: the averaged norm starts at 0; if False, at the norm of the first gradient.
        set_grad_none: zero_grad() drops gradients rather than zeroing them.
        capturable: learning rate and step count live on the device as tensors, so that a step can be captured
            in a CUDA graph; under torch.amp.GradScaler gradients are unscaled and overflows skipped there.

    Raises:
        RuntimeError: amsgrad, norm_type is neither 0 nor 2, or a sparse gradient.
        ValueError: lr, eps or weight_decay is negative, a beta not in [0, 1); parameters of CPU and
            accelerator in one group; a checkpoint of other parameters.
        TypeError: parameters of another dtype.

    Sources: Ginsburg et al., arXiv:1905.11286; numerics and state layout of public apex.
    """

    state_names = ("exp_avg",)
    multi_tensor_novograd = AmpCFunction()

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
    ) -> None:
        check_arguments(
            "FusedNovoGrad", amsgrad=amsgrad, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )
        if norm_type not in (0, 2):
            raise RuntimeError(
                f"FusedNovoGrad knows norm_type 2 (L2) and 0 (largest magnitude), not {norm_type}"
            )
        self.moment_mode = 0 if reg_inside_moment else 1
        self.capturable = capturable
        self._norms: dict = {}
        defaults = dict(
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            norm_type=norm_type,
            init_zero=init_zero,
        )
        super().__init__(params, defaults, set_grad_none)
        if capturable:
            self._step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves scaling to step()

    # ---- averaged norms: one tensor a group, in the order of its plan ------------------------------------

    def __setstate__(self, state):
        super().__setstate__(state)
        self._norms = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes public apex's layout."""
        super().load_state_dict(state_dict)
        for index, group in enumerate(self.param_groups):
            self._adopt_norms(index, group)

    def _ordered(self, params):
        return sorted(params, key=lambda p: (p.dtype not in _HALVES, str(p.dtype)))

    def _with_state(self, group):
        return self._ordered([p for p in group["params"] if self.state.get(p)])

    def _adopt_norms(self, index, group):
        """Takes over the norms that a checkpoint or a copy left in the group."""
        if not group.get("exp_avg_sq"):
            return
        params = self._with_state(group)
        halves = sum(p.dtype in _HALVES for p in params)
        counts, wanted = [t.numel() for t in group["exp_avg_sq"]], [halves, len(params) - halves]
        if counts != wanted:
            raise ValueError(
                f"FusedNovoGrad: exp_avg_sq of group {index} holds {counts} norms for {wanted} parameters of "
                "half and of full precision that have a state"
            )
        if params:
            device = local(params[0]).device
            norms = torch.cat([t.to(device, torch.float32).reshape(-1) for t in group["exp_avg_sq"]])
            self._keep_norms(index, group, params, norms)

    def _keep_norms(self, index, group, params, norms):
        halves = sum(p.dtype in _HALVES for p in params)
        group["exp_avg_sq"] = [norms[:halves], norms[halves:]]
        self._norms[index] = (params, norms)

    def _check_group(self, index):
        super()._check_group(index)
        if index not in self._norms:
            self._adopt_norms(index, self.param_groups[index])

    def _make_plan(self, index):
        group = self.param_groups[index]
        plan = super()._make_plan(index)
        params = self._with_state(group)
        if params:
            known, old = self._norms.get(index, ([], None))
            first = 0.0 if group["init_zero"] else -1.0
            norms = torch.full((len(params),), first, dtype=torch.float32, device=local(params[0]).device)
            places = {p: i for i, p in enumerate(params)}
            for i, p in enumerate(known):  # few, and seldom: parameters join or leave one by one at most
                if p in places:
                    norms[places[p]] = old[i]
            self._keep_norms(index, group, params, norms)
        return plan

    # ---- the step --------------------------------------------------------------------------------------

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure`, if given, returns."""
        loss = evaluate(closure)
        scaling = Scaling(self)
        plans = self._all_plans()
        for index, group in enumerate(self.param_groups):
            if group["params"]:
                self._step_group(index, plans[index], group, scaling)
            else:
                self._count_without_parameters(group, scaling)
        return loss

    def _step_group(self, index, plan, group, scaling):
        device = local(group["params"][0]).device
        beta1, beta2 = group["betas"]
        options = scaling.unscaling(device)
        if index not in self._norms:  # no parameter has received a gradient yet
            count_step(group, device, options.get("found_inf"), self.capturable)
            return
        if plan.shards:
            self._average_over_ranks([p for p, _ in plan.shards], self._norms[index][1], group, options)
        self._run_counted(
            plan,
            "multi_tensor_novograd",
            group,
            grad_norms=self._norms[index][1],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            bias_correction=bool(group["bias_correction"]),
            weight_decay=group["weight_decay"],
            grad_averaging=bool(group["grad_averaging"]),
            moment_mode=self.moment_mode,
            norm_type=group["norm_type"],
            update_norms=not plan.shards,
            **options,
        )

    @staticmethod
    def _average_over_ranks(params, norms, group, options):
        """Averages norms of gradients that are spread over ranks, as the op does with others."""
        grads = [local_gradient(p) for p in params]
        present = [i for i, grad in enumerate(grads) if grad is not None and params[i].numel()]
        if not present:
            return
        maximum, beta = group["norm_type"] == 0, group["betas"][1]
        new = sharded_norms(
            [params[i] for i in present], [grads[i] for i in present], maximum, 1.0, options.get("inv_scale")
        )
        old = norms[present]
        power = 1 if maximum else 2
        averaged = (beta * old**power + (1 - beta) * new**power) ** (1 / power)
        averaged = torch.where(old < 0, new, averaged)
        if "found_inf" in options:
            averaged = torch.where(options["found_inf"] != 0, old, averaged)
        norms[present] = averaged
