"""te.optimizers.FusedAdam."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from apex import optimizers
from apex.transformer_engine.pytorch.float8_tensor import Float8Tensor

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedAdam"]


class FusedAdam(optimizers.FusedAdam):
    """apex.optimizers.FusedAdam, which also updates weights that are kept in FP8 alone, with the public engine's names.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad: as of apex.optimizers.FusedAdam.
        bias_correction, adam_w_mode, capturable, set_grad_none: as of apex.optimizers.FusedAdam.
        master_weights: weights in FP8 (fp8_model_init) need it: they are the masters' casts. A master begins as the
            value that fp8_model_init preserved, if it did.
        master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype: float32 alone.
        store_param_remainders: accepted: masters are whole float32 numbers, which the public engine then keeps in two
            halves.
        use_decoupled_grad: False alone.

    Raises:
        NotImplementedError: other dtypes of states, use_decoupled_grad, masters of one's own.
        TypeError: from step: weights in FP8 without master_weights. The others as apex.optimizers.FusedAdam.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        kinds = {"master_weight_dtype": master_weight_dtype, "exp_avg_dtype": exp_avg_dtype}
        for name, dtype in (kinds | {"exp_avg_sq_dtype": exp_avg_sq_dtype}).items():
            if dtype != torch.float32:
                raise NotImplementedError(
                    f"FusedAdam: {name} must be torch.float32, not {dtype}: states are float32"
                )
        if use_decoupled_grad:
            raise NotImplementedError(
                "FusedAdam: gradients are read from .grad: leave use_decoupled_grad False"
            )
        if not isinstance(master_weights, bool):
            raise NotImplementedError(
                f"FusedAdam: master_weights is True or False, not {type(master_weights).__name__}: masters are the "
                "optimizer's own, in state[parameter]['master_param'] (the public engine's 1.x took a list of them)"
            )
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            adam_w_mode,
            weight_decay,
            amsgrad,
            True if set_grad_none is None else set_grad_none,
            capturable,
            master_weights,
        )

    def _step_group(self, plan, group, scaling):
        super()._step_group(plan, group, scaling)
        for p in group["params"]:
            if isinstance(p, Float8Tensor) and p.grad is not None:
                p.copy_(self.state[p]["master_param"])

    def _check_parameters(self, index, params):
        super()._check_parameters(index, params)
        for i, p in enumerate(params):
            if isinstance(p, Float8Tensor) and not self.master_weights:
                where = self._parameter(index).format(i)
                raise TypeError(f"{where} is a weight in FP8 alone: give FusedAdam master_weights=True")

    def _master(self, p):
        state = self.state[p]
        if isinstance(p, Float8Tensor) and "master_param" not in state:
            values = p.get_high_precision_init_val()
            values = p.dequantize(dtype=torch.float32) if values is None else values
            state["master_param"] = values.detach().to(p.device, torch.float32, copy=True)
        return super()._master(p)

    def _models(self, params, group):
        models = super()._models(params, group)
        if models is None or not any(isinstance(model, Float8Tensor) for model in models):
            return models
        models = [None if isinstance(model, Float8Tensor) else model for model in models]
        return models if any(model is not None for model in models) else None
