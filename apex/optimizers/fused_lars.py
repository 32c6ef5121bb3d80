from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import required

from apex._sharding import local, local_gradient
from apex.optimizers._amp_c import AmpCFunction
from apex.optimizers._arguments import check_arguments, evaluate
from apex.optimizers._fused_optimizer import FusedOptimizer
from apex.optimizers._model_copies import ModelCopies
from apex.optimizers._scalars import learning_rate
from apex.optimizers._scaling import Scaling
from apex.optimizers._tensor_norms import sharded_norms

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedLARS"]


class FusedLARS(ModelCopies, FusedOptimizer):
    """LARS in two launches per dtype: the norms of gradients and parameters, the update.

    The interface is that of public apex. Parameters: float16, bfloat16, float32 and float64, mixed at will;
    momentum buffers have the parameter's dtype, float32 under amp's master weights, as in public apex. A step
    asks nothing of the host: it can be captured in a CUDA graph, and under torch.amp.GradScaler gradients are
    unscaled and overflows skipped on the device. A group with ``is_skipped=True`` (biases, say) takes ``lr`` as it is.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate; a float32 tensor of one element on the parameters' device may change between
            replays. A parameter p with gradient g takes lr * trust_coefficient * |p| / (|g| + weight_decay *
            |p| + eps), or lr where a norm is 0.
        momentum: factor of the buffer, which gathers steps.
        dampening: only checked against nesterov, as in public apex.
        weight_decay: strength of the L2 penalty.
        trust_coefficient: see lr.
        eps: see lr.
        nesterov: look ahead by one more step of the buffer.
        wd_after_momentum, materialize_master_grads: without effect, as in public apex.
        set_grad_none: zero_grad() drops gradients rather than zeroing them.

    Raises:
        ValueError: lr, momentum, weight_decay, trust_coefficient or eps is negative; nesterov without momentum
            or with dampening; parameters of CPU and accelerator in one group.
        TypeError: parameters of another dtype.
        RuntimeError: a sparse gradient.

    Sources: You, Gitman & Ginsburg, arXiv:1708.03888; numerics and state layout of public apex.
    """

    state_names = ("momentum_buffer",)
    multi_tensor_l2norm = AmpCFunction()
    multi_tensor_lars = AmpCFunction()

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = required,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        bounds = dict(
            momentum=momentum, weight_decay=weight_decay, trust_coefficient=trust_coefficient, eps=eps
        )
        check_arguments("FusedLARS", **bounds, **({} if lr is required else {"lr": lr}))
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        # amp's, which scales gradients that it leaves to step().
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        defaults = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            trust_coefficient=trust_coefficient,
            eps=eps,
            is_skipped=False,
        )
        super().__init__(params, defaults, set_grad_none)
        self._step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves scaling to step()

    def _state_dtype(self, p):
        return p.dtype

    def get_momentums(self, params: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor | None], bool]:
        """Momentum buffers of the parameters that have a gradient, and whether all are new."""
        params = [p for p in params if p.grad is not None]
        first_run = all("momentum_buffer" not in self.state[p] for p in params)
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = self._new_state(p)
        return [self.state[p]["momentum_buffer"] for p in params], first_run

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure`, if given, returns."""
        loss = evaluate(closure)
        scaling = Scaling(self)
        for index, plan in self._all_plans().items():
            self._step_group(plan, self.param_groups[index], scaling)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        return loss

    def _step_group(self, plan, group, scaling):
        device = local(group["params"][0]).device
        scale = 1.0 / self.most_recent_scale
        norms = {}
        if plan.shards and not group["is_skipped"]:
            norms = _norms_over_ranks([p for p, _ in plan.shards], scale, scaling.on(device).get("inv_scale"))
        plan.run(
            "multi_tensor_lars",
            trust_coefficient=group["trust_coefficient"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=bool(group["nesterov"]),
            is_skipped=bool(group["is_skipped"]),
            scale=scale,
            **norms,
            **learning_rate(group, device),
            **scaling.unscaling(device),
        )


def _norms_over_ranks(params, scale, inv_scale):
    """grad_norms and param_norms of parameters that are spread over ranks."""
    grads = [local_gradient(p) for p in params]
    present = [i for i, grad in enumerate(grads) if grad is not None]
    if not present:
        return {}
    parts = [local(p).detach() for p in params]
    of_params = sharded_norms(params, parts)
    of_grads = torch.zeros_like(of_params)
    of_grads[present] = sharded_norms(
        [params[i] for i in present], [grads[i] for i in present], scale=scale, inv_scale=inv_scale
    )
    return dict(grad_norms=of_grads, param_norms=of_params)
