"""Adam, copies of the parameters for the model, and their moving average, as OpenFold trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, unique
from typing import Any

import torch

from apex.optimizers._arguments import check_arguments, check_fraction, evaluate

__all__ = ["AdamMathType", "FusedAdamSWA"]


@unique
class AdamMathType(Enum):
    """Where weight decay enters: the gradient (ApexAdam, PyTorchAdam) or the update (ApexAdamW).

    Public apex's ApexAdam and PyTorchAdam round in another order; here they are one.
    """

    ApexAdam = 0
    ApexAdamW = 1
    PyTorchAdam = 2


class FusedAdamSWA(torch.optim.Optimizer):
    """Adam over `params`, whose roundings go to `compute_params` and whose moving average to `swa_params`.

    Gradients are those of compute_params. One launch for parameters and copies of one pair of dtypes; the average
    takes torch's foreach functions.

    Args:
        params: what is trained, float32 or float64, contiguous, in one group.
        compute_params: the model's, of the same shapes; float16, bfloat16 or the dtype of params.
        swa_params: averages, of the shapes and dtypes of params.
        swa_decay_rate: of the average, in [0, 1); the first step copies the parameters.
        lr, bias_correction, betas, eps, weight_decay: as in apex.optimizers.FusedAdam.
        adam_math_mode: an AdamMathType.
        set_grad_none: zero_grad() drops gradients rather than zeroing them.
        amsgrad, capturable, master_weights: must be False.

    Attributes:
        compute_param_groups: one dict, with the model's parameters.
        swa_param_groups: one dict, with the averages; its "n_averaged" counts steps, and state_dict() keeps it (public
            apex loses it).

    Raises:
        ValueError: lists of different lengths, shapes or dtypes; numbers out of bounds.
        TypeError: another dtype.
        NotImplementedError: amsgrad, capturable, master_weights.

    Sources: arXiv:1412.6980, arXiv:1803.05407; interface of public apex.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        compute_params: Iterable[torch.Tensor],
        swa_params: Iterable[torch.Tensor],
        swa_decay_rate: float,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_math_mode: AdamMathType = AdamMathType.PyTorchAdam,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        refused = {"amsgrad": amsgrad, "capturable": capturable, "master_weights": master_weights}
        for name in (name for name, value in refused.items() if value):
            raise NotImplementedError(f"FusedAdamSWA does not support {name}: leave it out")
        if not isinstance(adam_math_mode, AdamMathType):
            raise ValueError(f"FusedAdamSWA: adam_math_mode is one of AdamMathType, not {adam_math_mode!r}")
        check_arguments("FusedAdamSWA", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        check_fraction(swa_decay_rate=swa_decay_rate)
        params, copies, averages = list(params), list(compute_params), list(swa_params)
        _check(params, copies, averages)
        defaults = dict(
            lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay
        )
        super().__init__(params, defaults)
        self.adam_math_mode = adam_math_mode
        self.set_grad_none = set_grad_none
        self.compute_param_groups: list[dict[str, Any]] = [{"params": copies}]
        self.swa_param_groups: list[dict[str, Any]] = [{"params": averages, "n_averaged": 0}]
        self.swa_decay_rate = swa_decay_rate

    @classmethod
    def from_optim(
        cls,
        adam_optimizer: torch.optim.Adam,
        fp32_params: Iterable[torch.Tensor],
        bf16_params: Iterable[torch.Tensor],
        swa_params: Iterable[torch.Tensor],
        swa_decay_rate: float,
    ) -> FusedAdamSWA:
        """Goes on from torch's Adam: its options, its averages and its step (0 before the first; public apex: 1).

        Raises ValueError for several groups, maximize, decoupled weight decay, or parameters of different steps.
        """
        if len(adam_optimizer.param_groups) != 1:
            raise ValueError(
                f"FusedAdamSWA takes one group of parameters, not {len(adam_optimizer.param_groups)}"
            )
        group = adam_optimizer.param_groups[0]
        for name in ("maximize", "decoupled_weight_decay"):
            if group.get(name):
                raise ValueError(f"FusedAdamSWA.from_optim: {name} has no counterpart here")
        names = ("lr", "betas", "eps", "weight_decay", "amsgrad")
        found = cls(
            fp32_params, bf16_params, swa_params, swa_decay_rate, **{name: group[name] for name in names}
        )
        saved = adam_optimizer.state_dict()
        steps = {int(state["step"]) for state in saved["state"].values()} or {0}
        if len(steps) > 1:
            raise ValueError(
                f"FusedAdamSWA: all parameters have one step; those of the optimizer have {sorted(steps)}"
            )
        options = {**saved["param_groups"][0], "bias_correction": True, "step": steps.pop()}
        found.load_state_dict({"state": saved["state"], "param_groups": [options]})
        return found

    # ---- the step --------------------------------------------------------------------------------------

    @torch._disable_dynamo
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grad_clip_scale: torch.Tensor | float | None = None,
    ) -> Any:
        """One update of every parameter whose copy has a gradient; returns what `closure`, if given, returns.

        grad_clip_scale: gradients are multiplied by it, a number or a tensor of one element. Raises RuntimeError for
        several groups and for a sparse gradient.
        """
        loss = evaluate(closure)
        if len(self.param_groups) > 1:
            raise RuntimeError("FusedAdamSWA does not support multiple param groups: put all into one")
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        for rows in self._rows(group["params"]).values():
            self._adam(group, rows, grad_clip_scale)
        self._average(group["params"])
        return loss

    def _rows(self, params):
        """(dtypes, device) -> [(parameter, its copy)], of those that have a gradient."""
        found: dict[Any, list] = {}
        for p, copy in zip(params, self.compute_param_groups[0]["params"], strict=True):
            if copy.grad is None:
                continue
            if copy.grad.layout != torch.strided:
                raise RuntimeError(
                    "FusedAdamSWA does not support sparse gradients: use torch.optim.SparseAdam instead"
                )
            found.setdefault((p.dtype, copy.dtype, p.device), []).append((p, copy))
        return found

    def _adam(self, group, rows, clip):
        params, copies = (list(tensors) for tensors in zip(*rows, strict=True))
        states = [self._state(p) for p in params]
        beta1, beta2 = group["betas"]
        scale = None
        if clip is not None:
            device = params[0].device
            scale = torch.as_tensor(clip, dtype=torch.float32, device=device).reshape(1)
        torch.ops.apex.multi_tensor_adam(
            [copy.grad for copy in copies],
            params,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            copies if copies[0].dtype != torch.float64 else [],
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            step=group["step"],
            decay_mode=int(self.adam_math_mode is AdamMathType.ApexAdamW),
            bias_correction=bool(group["bias_correction"]),
            weight_decay=group["weight_decay"],
            inv_scale=scale,
        )
        if copies[0].dtype == torch.float64:
            torch._foreach_copy_(copies, params)

    def _state(self, p):
        state = self.state[p]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(p.detach())
        return state

    def _average(self, params):
        group = self.swa_param_groups[0]
        if group["n_averaged"]:
            torch._foreach_lerp_(group["params"], params, 1.0 - self.swa_decay_rate)
        else:
            torch._foreach_copy_(group["params"], params)
        group["n_averaged"] += 1

    # ---- what scripts call beside it -------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Of the model's parameters and of `params`; set_to_none: drop gradients, by default as set_grad_none says."""
        drop = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(drop)
        for copy in self.compute_param_groups[0]["params"]:
            if drop:
                copy.grad = None
            elif copy.grad is not None:
                copy.grad.detach_().zero_()

    def state_dict(self) -> dict[str, Any]:
        """torch's, and the number of averaged steps in the group."""
        found = super().state_dict()
        found["param_groups"][0]["n_averaged"] = self.swa_param_groups[0]["n_averaged"]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of this class, of public apex's, or a torch.optim.Adam's group to which "step" was added."""
        super().load_state_dict(state_dict)
        averaged = self.param_groups[0].pop("n_averaged", None)
        if averaged is not None:
            self.swa_param_groups[0]["n_averaged"] = averaged


def _check(params, copies, averages):
    """Raises ValueError, TypeError for lists that do not go together."""
    if not copies or not averages:
        raise ValueError("FusedAdamSWA needs compute_params, which have the gradients, and swa_params")
    if not len(params) == len(copies) == len(averages):
        raise ValueError(
            f"FusedAdamSWA: params, compute_params and swa_params are lists of one length, not of {len(params)}, "
            f"{len(copies)} and {len(averages)}"
        )
    for number, (p, copy, average) in enumerate(zip(params, copies, averages, strict=True)):
        if not p.shape == copy.shape == average.shape:
            shapes = [list(t.shape) for t in (p, copy, average)]
            raise ValueError(f"FusedAdamSWA: parameter {number} and its copies have shapes {shapes}")
        if not p.device == copy.device == average.device:
            raise ValueError(f"FusedAdamSWA: parameter {number} and its copies lie on several devices")
        if p.dtype != average.dtype:
            raise ValueError(
                f"FusedAdamSWA: parameter {number} is {p.dtype}, its average {average.dtype}: they have one dtype"
            )
        _check_dtypes(number, p.dtype, copy.dtype)
        if not all(t.is_contiguous() for t in (p, copy, average)):
            raise ValueError(f"FusedAdamSWA: parameter {number} or a copy is not contiguous")


def _check_dtypes(number, dtype, copied):
    halves = (torch.float16, torch.bfloat16)
    if not (dtype == copied == torch.float64 or (dtype == torch.float32 and copied in (*halves, dtype))):
        raise TypeError(
            f"FusedAdamSWA: parameter {number} is {dtype} and its copy {copied}: parameters are float32, with copies "
            "in float16, bfloat16 or float32, or both are float64"
        )
