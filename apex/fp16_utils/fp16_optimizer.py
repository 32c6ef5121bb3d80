"""FP16_Optimizer: master weights and loss scaling around an optimizer, for a model that is in half precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from apex._gradients import separate_gradients, writable_gradients
from apex.amp._convert import HALVES
from apex.amp._policies.gradients import FULL, dense_gradient, laid_out_as
from apex.amp._policies.gradients import copy as copy_tensors
from apex.amp.scaler import LossScaler
from apex.fp16_utils._master_optimizer import MasterOptimizer
from apex.fp16_utils.fp16util import clip_grad_norm

# What a state dict holds, here and in public apex.
_STATE = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "first_closure_call_this_step",
    "optimizer_state_dict",
    "fp32_from_fp16",
)


class FP16_Optimizer(MasterOptimizer):
    """Keeps float32 master weights of an optimizer's float16 and bfloat16 parameters, and scales losses.

        model = network_to_half(Net())
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        for images, labels in data:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            optimizer.backward(loss)                # in the place of loss.backward()
            optimizer.step()

    The masters stand in the optimizer's groups from now on. New code: apex.amp with opt_level="O2", or
    FusedAdam(..., master_weights=True) with torch.amp.GradScaler.

    Args:
        init_optimizer: an optimizer over parameters in float16 or bfloat16 (these get masters), float32 or
            float64 (these do not).
        static_loss_scale: the scale.
        dynamic_loss_scale: adapt the scale in its place: a step whose gradients overflowed is skipped.
        dynamic_loss_args: keywords of apex.amp.scaler.LossScaler: init_scale, scale_factor, scale_window, ...
        verbose: print which parameters were found.

    Attributes:
        overflow: the gradients at hand hold inf or nan; step() skips.
        loss_scale: the scale, to be read and set.
        optimizer, state, param_groups: the wrapped optimizer and its own.

    Raises:
        TypeError: a parameter of another dtype; no optimizer; one that is wrapped already.
        ValueError: static_loss_scale is not above 0.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__(
            init_optimizer,
            static_loss_scale,
            dynamic_loss_scale,
            verbose,
            'apex.amp with opt_level="O2", or torch.amp',
        )
        self.fp16_groups: list[list] = []
        self.fp32_from_fp16_groups: list[list] = []
        self.fp32_from_fp32_groups: list[list] = []
        self._take_masters()
        self.all_fp16_params: list = sum(self.fp16_groups, [])
        self.all_fp32_from_fp16_params: list = sum(self.fp32_from_fp16_groups, [])
        self.all_fp32_from_fp32_params: list = sum(self.fp32_from_fp32_groups, [])
        if dynamic_loss_scale:
            self.loss_scaler = LossScaler("dynamic", **(dynamic_loss_args or {}))
        else:
            self.loss_scaler = LossScaler(static_loss_scale)
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm
        self._begin_anew()

    def _adopt(self, index, group):
        halves, masters, full = [], [], []
        params = group["params"]
        for i, param in enumerate(params):
            if not param.requires_grad:
                continue
            if param.dtype in HALVES:
                params[i] = self._master_of(param)
                halves.append(param)
                masters.append(params[i])
            elif param.dtype in FULL:
                full.append(param)
            else:
                raise TypeError(
                    f"FP16_Optimizer: parameter {i} of group {index} is {param.dtype}; float16, bfloat16, "
                    "float32 or float64 is required"
                )
        self.maybe_print(
            f"FP16_Optimizer: group {index} has {len(halves)} parameters with master weights, {len(full)} without"
        )
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(full)

    def maybe_print(self, msg: str) -> None:
        if self.verbose:
            print(msg)

    def __getstate__(self):
        raise RuntimeError("FP16_Optimizer cannot be pickled: save optimizer.state_dict()")

    def __setstate__(self, state):
        raise RuntimeError("FP16_Optimizer cannot be unpickled: use optimizer.load_state_dict(saved)")

    @property
    def loss_scale(self) -> Any:
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> Any:
        self.loss_scaler._loss_scale = value

    # ---- gradients ---------------------------------------------------------------------------------------

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Zeroes the gradients of model and masters, or drops them."""
        masters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for param in (*masters, *self.all_fp16_params):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad = param.grad.detach().zero_()
        self._begin_anew()

    def _begin_anew(self):
        self._stale = True  # whether an overflow that was found belongs to gradients that are gone
        self._held_scale = None  # by which the model's gradients are scaled
        self._stash = None  # gradients of full-precision parameters from before the passes under way

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Backward pass of the scaled loss, added to what the gradients hold.

        Only the masters' gradients are to be read afterwards (see inspect_master_grad_data): those of the
        model are scaled.

        Args:
            loss: tensor of one element.
            update_master_grads: unscale and hand the gradients to the masters. False, for all but the last of
                several passes, saves work; then update_master_grads() must come before step().
            retain_graph: as for torch.Tensor.backward.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"backward() takes the loss itself, a tensor, not {type(loss).__name__}")
        first, held_scale = self._stash is None, self._held_scale
        self._set_aside()
        self._keep_one_scale()
        params = [*self.all_fp16_params, *self.all_fp32_from_fp32_params]
        before = [param.grad for param in params]
        for param in params:
            param.grad = None
        try:
            self.loss_scaler.scaled(loss).backward(retain_graph=retain_graph)
        except BaseException:
            self._restore(params, before, first, held_scale)
            raise
        _add(params, before)
        if update_master_grads:
            self.update_master_grads()

    def _restore(self, params, before, first, held_scale):
        """Gradients are what they were before a pass that raised."""
        for param, grad in zip(params, before, strict=True):
            param.grad = grad
        if first:
            for param, grad in zip(self.all_fp32_from_fp32_params, self._stash, strict=True):
                param.grad = grad
            self._stash = None
        self._held_scale = None if held_scale is None else self.loss_scaler.loss_scale()

    def _set_aside(self):
        """Full-precision parameters are their own masters: their scaled gradients go apart from unscaled."""
        if self._stash is None:
            self._stash = [param.grad for param in self.all_fp32_from_fp32_params]
            for param in self.all_fp32_from_fp32_params:
                param.grad = None

    def _keep_one_scale(self):
        """Gradients to which a pass with another scale comes are rescaled."""
        scale = self.loss_scaler.loss_scale()
        held = self._held_scale
        if held is not None and held != scale:
            pending = [*self.all_fp16_params, *self.all_fp32_from_fp32_params]
            grads = writable_gradients(pending)
            if grads:
                torch._foreach_mul_(grads, scale / held)
        self._held_scale = scale

    def update_master_grads(self) -> None:
        """Hands the model's gradients, unscaled, to the masters, and looks for an overflow."""
        scaler = self.loss_scaler
        scaler.clear_overflow_state()
        with torch.no_grad():
            grads, targets = [], []
            for param, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True):
                if param.grad is None:
                    master.grad = None
                    continue
                if master.grad is None:
                    master.grad = torch.empty_like(master)
                grads.append(param.grad)
                targets.append(master.grad)
            scaler.unscale(grads, targets, scaler.loss_scale())
            self._unscale_full_precision()
        found = scaler.update_scale()
        self.overflow = found or (self.overflow and not self._stale)
        self._stale = False

    def _unscale_full_precision(self):
        if self._stash is None:  # nothing new
            return
        separate_gradients(self.all_fp32_from_fp32_params)
        fresh, sums, stashed = [], [], []
        for param, before in zip(self.all_fp32_from_fp32_params, self._stash, strict=True):
            grad = dense_gradient(param)
            if grad is None:
                param.grad = before
            elif before is None:
                fresh.append(grad)
            else:
                sums.append(grad)
                stashed.append(laid_out_as(grad, before))
        self._stash = None
        self.loss_scaler.unscale(fresh, fresh, self.loss_scaler.loss_scale())
        self.loss_scaler.unscale_with_stashed(sums, stashed, sums)

    def inspect_master_grad_data(self) -> Any:
        """The masters' gradients: a list for each group, with None where there is none.

        None, with a warning, after an overflow.
        """
        if self.overflow:
            warnings.warn("after an overflow there are no valid gradients to inspect", stacklevel=2)
            return None
        return [
            [None if p.grad is None else p.grad.detach() for p in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clips the masters' gradients together; returns their norm before, or -1 after an overflow."""
        if self.overflow:
            return -1
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        return self.clip_grad_norm(params, max_norm, norm_type)

    # ---- steps -------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the masters and then the model; does nothing after an overflow.

        closure: calls zero_grad() and backward(loss) of this object and returns the loss. It is called again,
        with a smaller scale, until nothing overflows. Returns what the optimizer's step returns.
        """
        self._stale = True
        if self.overflow and closure is None:
            self.maybe_print(
                f"Gradient overflow: step skipped, the loss scale is reduced to {self.loss_scaler.loss_scale()}"
            )
            return None
        if closure is not None:
            returned = self._step_with_closure(closure)
        else:
            returned = self.optimizer.step()
        self._master_params_to_model_params()
        return returned

    def _step_with_closure(self, closure):
        def wrapped():
            if self.first_closure_call_this_step:
                self.first_closure_call_this_step = False
            else:  # the optimizer has moved the masters meanwhile
                self._master_params_to_model_params()
            scale = None
            while scale != self.loss_scale:  # until it is at its floor
                scale = self.loss_scale
                loss = closure()
                if not self.overflow:
                    return loss
            raise RuntimeError("gradients hold inf or nan at every loss scale: the loss itself overflows")

        self.first_closure_call_this_step = True
        return self.optimizer.step(wrapped)

    def _master_params_to_model_params(self):
        if self.all_fp16_params:
            with torch.no_grad():
                copy_tensors(self.all_fp32_from_fp16_params, self.all_fp16_params)

    # ---- checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to go on, beside the model's state dict."""
        scaler = self.loss_scaler
        return {
            "loss_scaler": {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped},
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[p.detach() for p in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() gave, public apex's too. Load the model's state dict first.

        Raises ValueError, before anything changes, if it is another's, or the masters are not of the same number and
        shapes.
        """
        self._check_saved(state_dict, _STATE, "fp32_from_fp16", self.fp32_from_fp16_groups)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        scaler = state_dict["loss_scaler"]
        if not isinstance(scaler, dict):  # public apex saves the object
            scaler = {"loss_scale": vars(scaler)["_loss_scale"], "unskipped": vars(scaler)["_unskipped"]}
        self.loss_scaler.dynamic = self.dynamic_loss_scale
        self.loss_scaler._loss_scale = scaler["loss_scale"]
        self.loss_scaler._unskipped = scaler["unskipped"]
        self._load_masters(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"])


@torch.no_grad()
def _add(params, before):
    """What a pass gave on top of the gradients from before it, into these."""
    added, new = [], []
    for param, old in zip(params, before, strict=True):
        grad = param.grad
        if old is None:
            continue
        param.grad = old
        if grad is None:
            continue
        if old.layout != torch.strided or grad.layout != torch.strided:
            param.grad = old + grad
        else:
            added.append(param)
            new.append(grad)
    if added:
        torch._foreach_add_(writable_gradients(added), new)
