"""FP16_Optimizer: masters and loss scaling around an optimizer, as public apex's contrib has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apex._gradients import separate_gradients
from apex._legacy import amp_C
from apex.contrib.optimizers.fused_adam import FusedAdam
from apex.contrib.optimizers.fused_sgd import FusedSGD
from apex.fp16_utils._master_optimizer import MasterOptimizer
from apex.multi_tensor_apply import multi_tensor_applier

__all__ = ["FP16_Optimizer"]

_SCALE = ("dynamic_loss_scale", "cur_scale", "cur_iter")
_DYNAMIC = ("last_overflow_iter", "scale_factor", "scale_window")


class FP16_Optimizer(MasterOptimizer):
    """Keeps float32 masters of all parameters of an optimizer, which it updates, and scales losses.

        optimizer = FP16_Optimizer(apex.optimizers.FusedAdam(model.parameters()), dynamic_loss_scale=True)
        for images, labels in data:
            optimizer.zero_grad()
            optimizer.backward(criterion(model(images), labels))    # in the place of loss.backward()
            optimizer.step()

    It wraps any optimizer of apex.optimizers or torch, and FusedAdam and FusedSGD of this package, whose step() is
    given gradients and the model's parameters, so that masters need no gradients. New code: FusedAdam of
    apex.optimizers with master_weights=True and torch.amp.GradScaler, or apex.amp.

    Args:
        init_optimizer: an optimizer over floating-point parameters; the masters take their place in its groups.
        static_loss_scale: the scale, above 0.
        dynamic_loss_scale: begin at 2**16, halve after an overflow (not below 1), and double every 1000 steps without.
        dynamic_loss_args: must be None, as in public apex.
        verbose: print when a step is skipped.

    Attributes: optimizer, state and param_groups (the wrapped optimizer's), fp16_groups, fp32_groups (parameters and
    their masters, by group), cur_scale.

    Raises:
        TypeError: no optimizer, one that is wrapped already, or a parameter that is no floating-point tensor.
        ValueError: a static_loss_scale that is not above 0; dynamic_loss_args.
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
            "FusedAdam(..., master_weights=True) with torch.amp.GradScaler",
        )
        if dynamic_loss_args is not None:
            raise ValueError("FP16_Optimizer takes no dynamic_loss_args; apex.fp16_utils.FP16_Optimizer does")
        self.fp16_groups: list[list] = []
        self.fp32_groups: list[list] = []
        self._take_masters()
        self.cur_scale = 2.0**16 if dynamic_loss_scale else static_loss_scale
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.scale_factor, self.scale_window = 2, 1000

    def _adopt(self, index, group):
        params = list(group["params"])
        for i, p in enumerate(params):
            if not p.is_floating_point():
                raise TypeError(
                    f"FP16_Optimizer: parameter {i} of group {index} is {p.dtype}, no floating-point tensor"
                )
        group["params"] = masters = [self._master_of(p) for p in params]
        self.fp16_groups.append(params)
        self.fp32_groups.append(masters)

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Drops the gradients of the model, or zeroes them. Masters have none between steps."""
        for p in (p for group in self.fp16_groups for p in group):
            if set_grads_to_None:
                p.grad = None
            elif p.grad is not None:
                p.grad = p.grad.detach().zero_()

    def backward(self, loss: torch.Tensor) -> None:
        """Backward pass of the loss (a tensor of one element) times the scale, in float32."""
        (loss.float() * self.cur_scale).backward()
        separate_gradients([p for group in self.fp16_groups for p in group])  # to which another pass may add

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates masters and model; after an overflow, the scale alone. Raises NotImplementedError for a closure."""
        if closure is not None:
            raise NotImplementedError(
                "FP16_Optimizer.step takes no closure; apex.fp16_utils.FP16_Optimizer does"
            )
        pairs = [
            (p, master)
            for params, masters in zip(self.fp16_groups, self.fp32_groups, strict=True)
            for p, master in zip(params, masters, strict=True)
            if p.grad is not None
        ]
        if isinstance(self.optimizer, (FusedAdam, FusedSGD)):
            self._update_scale(self._step_with_gradients())
            return
        try:
            skip = self._unscale(pairs)
            if not skip:
                self.optimizer.step()
                if pairs:
                    torch._foreach_copy_([p for p, _ in pairs], [master for _, master in pairs])
        finally:
            for _, master in pairs:
                master.grad = None
        self._update_scale(skip)

    def _step_with_gradients(self):
        """The step of an optimizer that is given gradients, left out where one holds inf or nan: whether it was."""
        grads = [[p.grad for p in group] for group in self.fp16_groups]
        flags, norms = [], []
        for group in grads:
            known = [grad for grad in group if grad is not None]
            device = known[0].device if known else torch.device("cpu")
            flags.append(torch.zeros(1, dtype=torch.int32, device=device))
            norms.append(multi_tensor_applier(amp_C.multi_tensor_l2norm, flags[-1], [known])[0])
        skip = any(bool(flag) for flag in flags)
        if not skip:
            self.optimizer.step(
                grads=grads, output_params=self.fp16_groups, scale=self.cur_scale, grad_norms=norms
            )
        return skip

    def _unscale(self, pairs):
        """Gives the masters their gradients; whether one holds inf or nan."""
        flags = []
        for device in dict.fromkeys(p.device for p, _ in pairs):
            here = [(p, master) for p, master in pairs if p.device == device]
            for _, master in here:
                master.grad = torch.empty_like(master)
            flags.append(torch.zeros(1, dtype=torch.int32, device=device))
            lists = [[p.grad for p, _ in here], [master.grad for _, master in here]]
            multi_tensor_applier(amp_C.multi_tensor_scale, flags[-1], lists, 1.0 / self.cur_scale)
        return any(bool(flag) for flag in flags)

    def _update_scale(self, skip):
        if skip and (self.verbose or not self.dynamic_loss_scale):
            print(f"Gradient overflow: step {self.cur_iter} skipped, at loss scale {self.cur_scale}")
        if self.dynamic_loss_scale:
            if skip:
                self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
                self.last_overflow_iter = self.cur_iter
            elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    # ---- checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Scale, the optimizer's state and the masters. In public apex's layout."""
        names = (*_SCALE, *(_DYNAMIC if self.dynamic_loss_scale else ()))
        saved = {name: getattr(self, name) for name in names}
        saved["optimizer_state_dict"] = self.optimizer.state_dict()
        saved["fp32_groups"] = [[master.detach() for master in group] for group in self.fp32_groups]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() gave, public apex's too. Load the model's state dict as well.

        Raises ValueError, before anything changes, if it is another's, or of other parameters.
        """
        self._check_saved(
            state_dict, (*_SCALE, "optimizer_state_dict", "fp32_groups"), "fp32_groups", self.fp32_groups
        )
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for name in (*_SCALE, *_DYNAMIC):
            if name in state_dict:
                setattr(self, name, state_dict[name])
        self._load_masters(self.fp32_groups, state_dict["fp32_groups"])
