from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from apex._gradients import separate_gradients
from apex._sharding import is_sharded, local
from apex.optimizers._amp_c import AmpCFunction
from apex.optimizers._arguments import check_arguments, evaluate
from apex.optimizers._capturable import count_on, count_step
from apex.optimizers._fused_optimizer import FusedOptimizer, full_precision
from apex.optimizers._gradient_norm import GradientNorm
from apex.optimizers._model_copies import ModelCopies
from apex.optimizers._scalars import learning_rate
from apex.optimizers._scaling import Scaling

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedMixedPrecisionLamb"]


class FusedMixedPrecisionLamb(ModelCopies, FusedOptimizer):
    """LAMB for reduced-precision models, with everything on the device so that a step can be captured.

    Learning rate and step count are tensors; an overflow found by a torch.amp.GradScaler leaves parameters,
    moments and step count as they are, without a host synchronisation. The interface is that of public apex.

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate, kept as a float32 tensor in ``group["lr"]``; change it in place.
        step: number of steps already made, kept as an int32 tensor in ``group["step"]``.
        reduced_precision_dtype: parameters of this dtype get float32 masters at the first step, and are their
            roundings from then on; state_dict() saves the masters as ``master_param``.
        bias_correction, betas, eps, weight_decay, amsgrad: as in FusedLAMB.
        adam_w_mode, grad_averaging, max_grad_norm, use_nvlamb: as in FusedLAMB.

    Raises:
        RuntimeError, ValueError: as FusedLAMB.
        TypeError: as FusedLAMB; the parameters of a group differ in dtype.
        NotImplementedError: parameters that are spread over ranks.

    Source: arXiv:1904.00962; numerics and state layout of public apex.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    multi_tensor_l2norm = AmpCFunction("multi_tensor_l2norm_mp")
    multi_tensor_lamb = AmpCFunction("multi_tensor_lamb_mp")

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        bounds = dict(lr=lr, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm or 0.0)
        check_arguments("FusedMixedPrecisionLamb", amsgrad=amsgrad, betas=betas, **bounds)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self.reduced_precision_dtype = reduced_precision_dtype
        self._gradient_norm = GradientNorm()
        self._step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves scaling to step()
        defaults = dict(
            lr=torch.as_tensor(lr, dtype=torch.float32, device="cpu"),
            step=torch.tensor([step], dtype=torch.int32, device="cpu"),
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
        )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._move_scalars_to_device(self.param_groups[-1])

    def _move_scalars_to_device(self, group):
        # Clones: groups must not share the tensors of the defaults.
        device = local(group["params"][0]).device if group["params"] else "cpu"
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
        group["step"] = torch.as_tensor(group["step"], dtype=torch.int32, device=device).reshape(1).clone()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            self._move_scalars_to_device(group)

    def __setstate__(self, state):
        super().__setstate__(state)
        self._gradient_norm = GradientNorm()

    # ---- master weights ------------------------------------------------------------------------------

    @property
    def param_groups_full_precision(self) -> list[dict[str, Any]]:
        """Groups of master weights, paired with param_groups; None for parameters that need none."""
        return [
            {"params": [self.state.get(p, {}).get("master_param") for p in group["params"]]}
            for group in self.param_groups
        ]

    def _has_masters(self, p):
        return self.reduced_precision_dtype is not None and p.dtype == self.reduced_precision_dtype

    def _init_state(self, p, group):
        if not self._has_masters(p):
            self.state[p].pop("master_param", None)  # of a dtype before: it would come back with old values
        super()._init_state(p, group)
        if self._has_masters(p) and "master_param" not in self.state[p]:
            self.state[p]["master_param"] = p.detach().clone().to(full_precision(p.dtype))

    def _lists(self, params, group):
        lists = super()._lists(params, group)
        if params and self._has_masters(params[0]):
            return [[self.state[p]["master_param"] for p in params], *lists[1:]]
        return lists

    def _models(self, params, group):
        return params if params and self._has_masters(params[0]) else super()._models(params, group)

    def _written(self, group):
        return super()._written(group) | 1  # gradients hold the updates between the two launches

    def _float_states(self):
        return (*self.state_names, "master_param")

    def _check_parameters(self, index, params):
        super()._check_parameters(index, params)
        for i, p in enumerate(params):
            if is_sharded(p):
                raise NotImplementedError(
                    f"FusedMixedPrecisionLamb: parameter {i} of group {index} is spread over ranks, where the norm "
                    "of a tensor is not at hand within the step; use FusedLAMB, which measures it over the ranks"
                )
            if p.dtype != params[0].dtype:
                raise TypeError(
                    f"FusedMixedPrecisionLamb: parameter {i} of group {index} is {p.dtype} but parameter 0 is "
                    f"{params[0].dtype}: put them into separate groups"
                )

    # ---- the step --------------------------------------------------------------------------------------

    @torch._disable_dynamo
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, grad_scaler: torch.amp.GradScaler | None = None
    ) -> Any:
        """One update of every parameter that has a gradient; returns what `closure`, if given, returns.

        grad_scaler: a torch.amp.GradScaler whose scale and overflow flag are applied on the device (the scaler
        passes itself).
        """
        loss = evaluate(closure)
        scaling = Scaling(self, grad_scaler)
        params = [p for group in self.param_groups for p in group["params"]]
        separate_gradients(params)  # the update is left in them
        plans = self._all_plans(first=False)
        norms = self._gradient_norm.measure(params)
        for index, group in enumerate(self.param_groups):
            if group["params"]:
                self._step_group(plans[index], group, norms, scaling)
            else:  # parameters that come later are corrected by what all groups count
                device = getattr(group["step"], "device", torch.device("cpu"))
                count_step(group, device, scaling.on(device).get("found_inf"), on_device=True)
        return loss

    def _step_group(self, plan, group, norms, scaling):
        device = local(group["params"][0]).device
        if not isinstance(group["step"], torch.Tensor) or group["step"].device != device:
            self._move_scalars_to_device(group)  # the group had no parameters when it came
        counted = count_on(group, device)
        beta1, beta2 = group["betas"]
        limit = group.get("max_grad_norm", self.defaults["max_grad_norm"]) or 0.0
        scalars = dict(max_grad_norm=limit) | scaling.on(device)
        if "inv_scale" in scalars:  # the norm is of scaled gradients, so is the limit
            scalars |= dict(max_grad_norm=0.0, max_grad_norm_tensor=limit / scalars["inv_scale"])
        launches = plan.run(
            "multi_tensor_lamb",
            **learning_rate(group, device, kept_there=True),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            step=0,
            step_tensor=counted,
            advance_step=True,
            bias_correction=bool(group["bias_correction"]),
            weight_decay=group["weight_decay"],
            grad_averaging=bool(group["grad_averaging"]),
            decay_mode=self.adam_w_mode,
            global_grad_norm=norms[device],
            use_nvlamb=self.use_nvlamb,
            **scalars,
        )
        if not launches:
            count_step(group, device, scalars.get("found_inf"))
