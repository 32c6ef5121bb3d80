from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import required

from apex._sharding import local
from apex.optimizers._amp_c import AmpCFunction
from apex.optimizers._arguments import check_arguments, evaluate
from apex.optimizers._fused_optimizer import FusedOptimizer
from apex.optimizers._model_copies import ModelCopies
from apex.optimizers._scalars import learning_rate
from apex.optimizers._scaling import Scaling

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedSGD"]


class FusedSGD(ModelCopies, FusedOptimizer):
    """Stochastic gradient descent with every parameter of one dtype updated in a single launch.

    A drop-in for torch.optim.SGD; the interface is that of public apex. Parameters: float16, bfloat16,
    float32 and float64, mixed at will. Momentum buffers have the parameter's dtype, as in both; under amp's
    master weights they are float32. Without momentum there are none. A step asks nothing of the host: it can
    be captured in a CUDA graph, and under torch.amp.GradScaler gradients are unscaled and overflows skipped on
    the device.

    A parameter's first step sets its momentum buffer to its gradient, as torch does, whenever that step comes
    (public apex decides once for all parameters of a group). Elements that never took a step are -0.0.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate; a float32 tensor of one element on the parameters' device may change between
            replays.
        momentum: factor of the buffer.
        dampening: the gradient enters the buffer times 1 - dampening.
        weight_decay: strength of the L2 penalty.
        nesterov: look ahead by one more step of the buffer.
        wd_after_momentum: weight decay joins what comes out of the buffer, not what goes in.
        materialize_master_grads: under amp's master weights, read the masters' gradients; if False, those of
            the model's parameters, scaled as they are.
        set_grad_none: zero_grad() drops gradients rather than zeroing them.

    Raises:
        ValueError: lr, momentum or weight_decay is negative; nesterov without momentum or with dampening;
            parameters of CPU and accelerator in one group.
        TypeError: parameters of another dtype.
        RuntimeError: a sparse gradient.

    Sources: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013;
    numerics of torch.optim.SGD and public apex.
    """

    state_names = ("momentum_buffer",)
    multi_tensor_sgd = AmpCFunction()

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = required,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        given = {} if lr is required else {"lr": lr}
        check_arguments("FusedSGD", **given, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        # amp's, which scales gradients that it leaves to step().
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        defaults = dict(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
        super().__init__(params, defaults, set_grad_none)
        self._step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves scaling to step()

    # ---- momentum buffers ------------------------------------------------------------------------------

    def _states(self, group):
        return self.state_names if group["momentum"] != 0 else ()

    def _plan_key(self, index):
        return index, self.param_groups[index]["momentum"] != 0, self.materialize_master_grads

    def _state_dtype(self, p):
        return p.dtype

    def _new_state(self, p):
        return super()._new_state(p).neg_()  # -0.0: never took a step

    def get_momentums(self, params: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor | None], bool]:
        """Momentum buffers of these parameters, made where there is none, and whether all are new."""
        first_run = all("momentum_buffer" not in self.state[p] for p in params)
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = self._new_state(p)
        return [self.state[p]["momentum_buffer"] for p in params], first_run

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the layouts of public apex and of torch.optim.SGD."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if state.get("momentum_buffer", self) is None:  # torch's, without momentum
                del state["momentum_buffer"]
            elif "momentum_buffer" in state:
                buffer = local(state["momentum_buffer"])
                if buffer.any():
                    buffer.add_(0.0)  # others may store -0.0, which here means that no step was taken

    # ---- amp's master weights --------------------------------------------------------------------------

    def _gradient_owners(self, params):
        if self.materialize_master_grads:
            return params
        return [p if model is None else model for p, model in zip(params, self._behind(params), strict=True)]

    def _models(self, params, group):
        # Without momentum the op has no such list: amp copies then.
        return super()._models(params, group) if group["momentum"] != 0 else None

    # ---- the step --------------------------------------------------------------------------------------

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure`, if given, returns."""
        loss = evaluate(closure)
        scaling = Scaling(self)
        for index, plan in self._all_plans().items():
            self._run(plan, self.param_groups[index], scaling)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        return loss

    def _run(self, plan, group, scaling):
        device = local(group["params"][0]).device
        plan.run(
            "multi_tensor_sgd",
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=bool(group["nesterov"]),
            first_run=False,
            wd_after_momentum=self.wd_after_momentum,
            scale=1.0 / self.most_recent_scale,
            marked_first_run=True,
            **learning_rate(group, device),
            **scaling.unscaling(device),
        )
