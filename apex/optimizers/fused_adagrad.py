from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from apex._sharding import local
from apex.optimizers._amp_c import AmpCFunction
from apex.optimizers._arguments import check_arguments, evaluate
from apex.optimizers._fused_optimizer import FusedOptimizer
from apex.optimizers._scalars import learning_rate
from apex.optimizers._scaling import Scaling

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedAdagrad"]


class FusedAdagrad(FusedOptimizer):
    """Adagrad with every parameter of one dtype updated in a single launch.

    A drop-in for torch.optim.Adagrad without lr_decay; the interface is that of public apex. Parameters:
    float16, bfloat16, float32 (sums of squares in float32; public apex rounds them to the parameter's dtype)
    and float64, mixed at will. A step asks nothing of the host: it can be captured in a CUDA graph, and under
    torch.amp.GradScaler gradients are unscaled and overflows skipped on the device.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate; a float32 tensor of one element on the parameters' device may change between
            replays.
        eps: added to the denominator.
        weight_decay: its strength.
        set_grad_none: zero_grad() drops gradients rather than zeroing them.
        adagrad_w_mode: decoupled weight decay, as AdamW has it, if True; an L2 penalty if False.

    Raises:
        ValueError: lr, eps or weight_decay is negative; parameters of CPU and accelerator in one group; a
            checkpoint with lr_decay.
        TypeError: parameters of another dtype.
        RuntimeError: a sparse gradient.

    Sources: Duchi, Hazan & Singer, JMLR 12 (2011); numerics and state layout of public apex.
    """

    state_names = ("sum",)
    multi_tensor_adagrad = AmpCFunction()

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        check_arguments("FusedAdagrad", lr=lr, eps=eps, weight_decay=weight_decay)
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        super().__init__(params, dict(lr=lr, eps=eps, weight_decay=weight_decay), set_grad_none)
        self._step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves scaling to step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the layouts of public apex and of torch.optim.Adagrad."""
        if any(group.get("lr_decay") for group in state_dict["param_groups"]):
            raise ValueError("FusedAdagrad cannot continue a checkpoint with lr_decay: use a scheduler")
        super().load_state_dict(state_dict)

    def _load_step(self, index, group):
        for p in group["params"]:
            self.state.get(p, {}).pop("step", None)  # torch's; nothing here depends on it

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what `closure`, if given, returns."""
        loss = evaluate(closure)
        scaling = Scaling(self)
        for index, plan in self._all_plans().items():
            group = self.param_groups[index]
            device = local(group["params"][0]).device
            plan.run(
                "multi_tensor_adagrad",
                eps=group["eps"],
                decay_mode=self.adagrad_w_mode,
                weight_decay=group["weight_decay"],
                **learning_rate(group, device),
                **scaling.unscaling(device),
            )
        return loss
