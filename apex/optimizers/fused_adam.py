from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from apex._sharding import local
from apex.optimizers._amp_c import AmpCFunction
from apex.optimizers._arguments import check_arguments, evaluate
from apex.optimizers._capturable import Capturable
from apex.optimizers._fused_optimizer import FusedOptimizer, full_precision
from apex.optimizers._model_copies import ModelCopies
from apex.optimizers._own_steps import OwnSteps
from apex.optimizers._scaling import Scaling

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedAdam"]


class FusedAdam(OwnSteps, Capturable, ModelCopies, FusedOptimizer):
    """Adam and AdamW with every parameter of one dtype updated in a single launch.

    A drop-in for torch.optim.AdamW, or torch.optim.Adam with ``adam_w_mode=False``; the interface is that of
    public apex. Parameters: float16, bfloat16, float32 (states in float32) and float64, mixed at will.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        bias_correction: divide the averages by 1 - beta^step.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the denominator.
        adam_w_mode: decoupled weight decay (AdamW) if True, an L2 penalty (Adam) if False.
        weight_decay: its strength.
        amsgrad: must be False.
        set_grad_none: zero_grad() drops gradients rather than zeroing them.
        capturable: learning rate and step count live on the device as tensors, so that a step can be captured
            in a CUDA graph and replayed; ``group["lr"]`` may be changed in place between replays.
        master_weights: keep float32 copies of the parameters and update those; the parameters are their
            roundings. Saved by state_dict() as ``master_param``.

    Raises:
        RuntimeError: amsgrad, or a sparse gradient.
        TypeError, ValueError: parameters of another dtype, or of CPU and accelerator in one group.

    A group counts its steps, in ``group["step"]``, as in public apex: a group without parameters too, and a
    parameter's bias is corrected by that count whenever its first gradient comes. Checkpoints of public apex and of
    torch.optim.Adam and AdamW are taken, and theirs take this one's: docs/optimizers.md.

    Sources: arXiv:1412.6980, arXiv:1711.05101; numerics and state layout of public apex.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    multi_tensor_adam = AmpCFunction()
    multi_tensor_adam_capturable = AmpCFunction()
    multi_tensor_adam_capturable_master = AmpCFunction()

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        check_arguments("FusedAdam", amsgrad=amsgrad, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        defaults = dict(
            lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay
        )
        super().__init__(params, defaults, set_grad_none)
        if capturable:
            self._step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves scaling to step()

    # ---- master weights ------------------------------------------------------------------------------

    @property
    def param_groups_master(self) -> list[dict[str, Any]]:
        """Groups of master weights, paired with param_groups; None in each place without master_weights."""
        return [
            {"params": [self._master(p) if self.master_weights else None for p in group["params"]]}
            for group in self.param_groups
        ]

    def _master(self, p):
        """What the step updates; a float64 parameter is its own master."""
        state = self.state[p]
        if p.dtype == torch.float64:
            state.pop("master_param", None)  # of a dtype before
            return p
        if "master_param" not in state:
            state["master_param"] = p.detach().clone().to(full_precision(p.dtype))
        return state["master_param"]

    def _lists(self, params, group):
        lists = super()._lists(params, group)
        return [[self._master(p) for p in params], *lists[1:]] if self.master_weights else lists

    def _models(self, params, group):
        if not self.master_weights:
            return super()._models(params, group)
        models = [None if p.dtype == torch.float64 else p for p in params]
        return models if any(model is not None for model in models) else None

    def _float_states(self):
        return (*self.state_names, "master_param")

    # ---- the step --------------------------------------------------------------------------------------

    @torch._disable_dynamo
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """One update of every parameter that has a gradient.

        closure: evaluates the model again and returns the loss, which step() then returns. grad_scaler: with
        capturable, a torch.amp.GradScaler whose scale and overflow flag are applied on the device (the scaler
        passes itself). The other arguments are public apex's deprecated ones and must stay None.
        """
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam.step() takes no gradients, output_params, scale or grad_norms: construct it like "
                "torch.optim.AdamW and call step()"
            )
        loss = evaluate(closure)
        scaling = Scaling(self, grad_scaler if self.capturable else None)
        plans = self._all_plans()
        for index, group in enumerate(self.param_groups):
            if group["params"]:
                self._step_group(plans[index], group, scaling)
            else:
                self._count_without_parameters(group, scaling)
        return loss

    def _step_group(self, plan, group, scaling):
        beta1, beta2 = group["betas"]
        self._run_counted(
            plan,
            "multi_tensor_adam",
            group,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            decay_mode=self.adam_w_mode,
            bias_correction=bool(group["bias_correction"]),
            weight_decay=group["weight_decay"],
            **scaling.unscaling(local(group["params"][0]).device),
        )
