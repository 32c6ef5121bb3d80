"""LARC: layer-wise adaptive rates, for any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apex._gradients import writable_gradients
from apex._sharding import is_sharded


class LARC(torch.optim.Optimizer):
    """Wraps an optimizer so that each parameter gets its own learning rate, from the ratio of its norm to its
    gradient's.

        optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4))

    With rate = trust_coefficient * |p| / (|grad| + weight_decay * |p| + eps), the gradient becomes
    rate * (grad + weight_decay * p) before the optimizer's own step, which then decays no weights itself. Where
    a norm is 0 the gradient stays. Nothing waits for the device. It goes through amp.initialize and into
    FP16_Optimizer as any optimizer does.

    Everything else (param_groups, state, state_dict, ...) is the wrapped optimizer's.

    Args:
        optimizer: any torch optimizer, fused ones included. Weight decay is taken from its groups.
        trust_coefficient: factor of the rate.
        clip: True: a parameter is updated with min(lr, rate), that is, the factor above is at most 1 and is
            rate / lr. False: with lr * rate.
        eps: added to the denominator.

    Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888.
    """

    # Gradients are changed before the wrapped optimizer can read found_inf: a step is skipped from the outside.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"LARC wraps an optimizer of torch, not {type(optimizer).__name__}")
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    def __getattr__(self, name):
        if name == "optim":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self):
        """As of any torch optimizer: without the methods that schedulers and amp put on it, which know their object."""
        return {name: vars(self)[name] for name in ("optim", "trust_coefficient", "eps", "clip")}

    def __setstate__(self, state):
        vars(self).update(state)

    def __repr__(self):
        return repr(self.optim)

    @property
    def state(self) -> Any:
        return self.optim.state

    @property
    def defaults(self) -> Any:
        return self.optim.defaults

    @property
    def param_groups(self) -> Any:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> Any:
        self.optim.param_groups = value

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; closure is called first, and what it returns is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay") for group in self.param_groups]
        writable_gradients([p for group in self.param_groups for p in group["params"]])
        try:
            for group in self.param_groups:
                self._adapt(group)
                if "weight_decay" in group:
                    group["weight_decay"] = 0
            self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay
        return loss

    @torch.no_grad()
    def _adapt(self, group):
        by_kind = {}
        for p in group["params"]:
            if p.grad is not None:
                by_kind.setdefault((p.dtype, p.grad.dtype, p.device), []).append(p)
        for params in by_kind.values():
            _check_gradients(params)
            grads = [p.grad for p in params]
            param_norms, grad_norms = _norms(params), _norms(grads)
            decay, lr = group.get("weight_decay", 0), group["lr"]
            rates = self.trust_coefficient * param_norms / (grad_norms + param_norms * decay + self.eps)
            if self.clip:
                rates = (rates / lr).clamp(max=1)
            unknown = (param_norms == 0) | (grad_norms == 0)
            rates = rates.masked_fill(unknown, 1.0).unbind()
            if decay:
                decays = torch.full_like(param_norms, decay).masked_fill_(unknown, 0.0).unbind()
                torch._foreach_add_(grads, torch._foreach_mul(params, decays))
            torch._foreach_mul_(grads, rates)


def _norms(tensors):
    """L2 norms, in float32 at least, as one tensor."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def _check_gradients(params):
    for p in params:
        if p.grad.layout != torch.strided:
            raise TypeError("LARC needs dense gradients: leave out sparse=True")
        if is_sharded(p):
            raise NotImplementedError(
                "LARC measures whole parameters: use apex.optimizers.FusedLARS for shards"
            )
