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


def evaluate(closure):
    """The loss that step()'s closure returns, its gradients recorded; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
