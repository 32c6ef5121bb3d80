"""What every fused optimizer does with its arguments: bounds, and the closure of step()."""

import torch


def check_arguments(optimizer, *, amsgrad=False, betas=(), **not_negative):
    """Raises RuntimeError for amsgrad, ValueError for betas outside [0, 1) and for anything else below zero, or nan.

    not_negative: numbers by name; lr may be a tensor of one element.
    """
    if amsgrad:
        raise RuntimeError(f"{optimizer} does not support the AMSGrad variant")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas must lie in [0, 1): {betas}")
    for name, value in not_negative.items():
        if not (float(value) if name == "lr" else value) >= 0.0:
            raise ValueError(f"{name} must not be negative: {value}")


def check_fraction(**values):
    """Raises ValueError for what does not lie in [0, 1)."""
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must lie in [0, 1): {value}")


_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "dampening", "trust_coefficient")


def check_numbers(optimizer, index, group):
    """Raises TypeError, ValueError where an option of a group is no number any more, as a schedule may leave it.

    What is a tensor has one element.
    """
    betas = group.get("betas", (0.0, 0.0))
    if len(betas) != 2:
        raise ValueError(f"{optimizer}: betas of group {index} are two numbers, not {betas!r}")
    for name, value in (*((name, group.get(name, 0.0)) for name in _NUMBERS), *(("betas", b) for b in betas)):
        if not hasattr(value, "__float__"):
            raise TypeError(f"{optimizer}: {name} of group {index} must be a number, not {value!r}")
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(f"{optimizer}: {name} of group {index} must be one number, not {value.numel()}")


def evaluate(closure):
    """The loss that step()'s closure returns, its gradients recorded; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
