"""Adam, copies of the parameters for the model, and their moving average, as OpenFold trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from copy import deepcopy
from enum import Enum, unique
from typing import Any

import torch

from apex._plain import range_of
from apex.optimizers._arguments import check_arguments, check_fraction, evaluate
from apex.optimizers._kept_options import KeptOptions

__all__ = ["AdamMathType", "FusedAdamSWA"]

_STATES = ("exp_avg", "exp_avg_sq")


@unique
class AdamMathType(Enum):
    """Where weight decay enters: the gradient (ApexAdam, PyTorchAdam) or the update (ApexAdamW).

    Public apex's ApexAdam and PyTorchAdam round in another order; here they are one.
    """

    ApexAdam = 0
    ApexAdamW = 1
    PyTorchAdam = 2


class FusedAdamSWA(KeptOptions, torch.optim.Optimizer):
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
        ValueError: lists of different lengths, shapes or dtypes; tensors that share memory, but a parameter with its
            own copy; numbers out of bounds.
        TypeError: another dtype; groups, names or a single tensor in the place of a list of tensors.
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
        given = {"params": params, "compute_params": compute_params, "swa_params": swa_params}
        params, copies, averages = (_list_of(name, tensors) for name, tensors in given.items())
        _check(params, copies, averages)
        _refuse_shared(params, copies, averages)
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

        The two share no tensor but parameters. fp32_params: of the shapes of the Adam's parameters, in their order.

        Raises ValueError for several groups, maximize, decoupled weight decay, parameters of other shapes or of
        different steps; TypeError for what is no Adam.
        """
        names = ("lr", "betas", "eps", "weight_decay", "amsgrad")
        groups = getattr(adam_optimizer, "param_groups", [{}])
        if any(name not in group for name in names for group in groups):
            kind = type(adam_optimizer).__name__
            raise TypeError(f"FusedAdamSWA.from_optim goes on from a torch.optim.Adam, not from {kind}")
        if len(adam_optimizer.param_groups) != 1:
            raise ValueError(
                f"FusedAdamSWA takes one group of parameters, not {len(adam_optimizer.param_groups)}"
            )
        group = adam_optimizer.param_groups[0]
        for name in ("maximize", "decoupled_weight_decay"):
            if group.get(name):
                raise ValueError(f"FusedAdamSWA.from_optim: {name} has no counterpart here")
        saved = deepcopy(adam_optimizer.state_dict())  # which goes on, perhaps, and shares nothing
        fp32_params = _list_of("fp32_params", fp32_params)
        shapes = [[list(p.shape) for p in params] for params in (group["params"], fp32_params)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"FusedAdamSWA.from_optim: the optimizer's parameters have shapes {shapes[0]}, fp32_params "
                f"{shapes[1]}: pass them in the optimizer's order"
            )
        options = {name: saved["param_groups"][0][name] for name in names}
        found = cls(fp32_params, bf16_params, swa_params, swa_decay_rate, **options)
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

        grad_clip_scale: gradients are multiplied by it, a number or a tensor of one element. Before anything is
        changed, raises RuntimeError for several groups and for a sparse gradient; ValueError and TypeError for
        another grad_clip_scale and for tensors that were replaced by such as do not fit.
        """
        loss = evaluate(closure)
        if len(self.param_groups) > 1:
            raise RuntimeError("FusedAdamSWA does not support multiple param groups: put all into one")
        group = self.param_groups[0]
        params, copies = group["params"], self.compute_param_groups[0]["params"]
        _check(params, copies, self.swa_param_groups[0]["params"])
        kinds, options = self._rows(params, copies), self._options(group)
        scale = _scale_of(grad_clip_scale)
        # Nothing is refused from here on.
        for (_, copied, device), rows in kinds.items():
            grads, here, models, states = map(list, zip(*rows, strict=True))
            self.state.update(zip(here, states, strict=True))
            torch.ops.apex.multi_tensor_adam(
                grads,
                here,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                models if copied != torch.float64 else [],
                **options,
                inv_scale=None if scale is None else scale.to(device),
            )
            if copied == torch.float64:
                torch._foreach_copy_(models, here)
        group["step"] = options["step"]
        self._average(params)
        return loss

    def _options(self, group):
        beta1, beta2 = map(float, group["betas"])
        return dict(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            step=group.get("step", 0) + 1,
            decay_mode=int(self.adam_math_mode is AdamMathType.ApexAdamW),
            bias_correction=bool(group["bias_correction"]),
            weight_decay=float(group["weight_decay"]),
        )

    def _rows(self, params, copies):
        """(dtypes, device) -> [(gradient, parameter, its copy, its state)], of those that have a gradient."""
        found: dict[Any, list] = {}
        for number, (p, model) in enumerate(zip(params, copies, strict=True)):
            grad = model.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(
                    "FusedAdamSWA does not support sparse gradients: use torch.optim.SparseAdam instead"
                )
            if grad.shape != p.shape or grad.dtype != model.dtype:
                raise ValueError(
                    f"FusedAdamSWA: the gradient of parameter {number} is {grad.dtype}, of {list(grad.shape)}, its "
                    f"copy {model.dtype}, of {list(p.shape)}: call zero_grad() after a copy was replaced"
                )
            row = grad, p, model, self._state(number, p)
            found.setdefault((p.dtype, model.dtype, p.device), []).append(row)
        return found

    def _state(self, number, p):
        """A parameter's state, which may be a new one: it is kept when nothing was refused."""
        state = self.state.get(p, {})
        missing = [name for name in _STATES if name not in state]
        for value in (state[name] for name in _STATES if name in state):
            if value.shape != p.shape or value.dtype != p.dtype or value.device != p.device:
                raise ValueError(
                    f"FusedAdamSWA: parameter {number} is {p.dtype}, of shape {list(p.shape)} on {p.device}, a state "
                    f"of it {value.dtype}, of {list(value.shape)} on {value.device}: load a state_dict() of these "
                    "parameters"
                )
        return {**state, **{name: torch.zeros_like(p.detach()) for name in missing}} if missing else state

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
        for model in self.compute_param_groups[0]["params"]:
            if drop:
                model.grad = None
            elif model.grad is not None:
                model.grad.detach_().zero_()

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


def _list_of(name, tensors):
    """The tensors, in a list; TypeError for what is none."""
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if isinstance(tensors, torch.Tensor) or not all(isinstance(t, torch.Tensor) for t in found):
        kinds = type(tensors).__name__, ", ".join(sorted({type(t).__name__ for t in found}))
        raise TypeError(
            f"FusedAdamSWA: {name} is a list of tensors, as model.parameters() gives them, not {kinds[0]} of {kinds[1]}"
        )
    return found


def _scale_of(clip):
    """grad_clip_scale as a float32 tensor of one element, or None."""
    if clip is None:
        return None
    try:
        scale = torch.as_tensor(clip, dtype=torch.float32, device=getattr(clip, "device", "cpu"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"FusedAdamSWA: grad_clip_scale is a number or a tensor, not {type(clip).__name__}"
        ) from error
    if scale.numel() != 1:
        raise ValueError(f"FusedAdamSWA: grad_clip_scale has one element, not {scale.numel()}")
    return scale.reshape(1)


def _range(tensor):
    """Where the tensor lies: (its storage, begin, end); None where it lies nowhere."""
    if not (tensor.numel() and torch._C._has_storage(tensor)):
        return None
    return (tensor.untyped_storage()._cdata, *range_of(tensor))


def _refuse_shared(params, copies, averages):
    """Raises ValueError where two of the tensors share memory; a parameter may be its own copy."""
    ranges = []
    for p, model, average in zip(params, copies, averages, strict=True):
        own, copied = _range(p), _range(model)
        ranges += [own, _range(average), *([copied] if copied != own else [])]
    ranges = sorted(filter(None, ranges))
    for (storage, _, end), (other, begin, _) in itertools.pairwise(ranges):
        if storage == other and begin < end:
            raise ValueError(
                "FusedAdamSWA: two of params, compute_params and swa_params share memory, so that one would overwrite "
                "the other: pass copies, as [p.detach().clone() for p in params]"
            )


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
