from __future__ import annotations

from collections.abc import Iterable

import torch

from apex import _lists
from apex._gradients import separate_gradients, writable_gradients
from apex._loader import bindings
from apex._plain import is_shape_alone
from apex._sharding import combine_norm, local, shard_groups

_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales all gradients down together, in place, so that their norm is at most max_norm.

    Does what torch.nn.utils.clip_grad_norm_ does, measured in float32: one launch per dtype reads the gradients
    and leaves norm and factor on the device, a second one multiplies, and returns at once where the norm is
    within the limit. float16, bfloat16 and float32 gradients take this path for the 2- and the infinity-norm;
    anything else is handed to torch. Gradients of DTensors are measured over all their shards.

    Args:
        parameters: a tensor, or any iterable of tensors; those without .grad are passed over.
        max_norm: the limit.
        norm_type: 2, infinity, or any other p-norm.
        error_if_nonfinite: raise RuntimeError, before any gradient changes, if the norm is inf or nan (this
            waits for the device).

    Raises:
        RuntimeError: the norm is inf or nan, with error_if_nonfinite.

    Returns:
        The norm before clipping: a float32 tensor without dimensions; 0 if there are no gradients.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    parameters = [p for p in parameters if p.grad is not None]
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not parameters:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    separate_gradients(parameters)
    maximum = norm_type == float("inf")
    if not (norm_type == 2.0 or maximum) or not all(map(_is_fused, parameters)):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    if bindings.load().module is None:
        writable_gradients(parameters)
    parts: dict = {}
    for p in parameters:
        key = (local(p.grad).device, shard_groups(p.grad))
        parts.setdefault(key, []).append(local(p.grad))
    if any(map(is_shape_alone, (grads[0] for grads in parts.values()))):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    norms, coefficients = _measure(parts, max_norm, maximum)
    total = next(iter(norms.values()))
    if error_if_nonfinite and not torch.isfinite(total).item():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so it cannot be clipped; pass "
            "error_if_nonfinite=False to scale by it all the same"
        )
    for (device, _), grads in parts.items():
        _scale(grads, coefficients[device])
    return total.reshape(())


def _is_fused(p):
    grad = p.grad
    return grad.layout == torch.strided and grad.dtype in _FUSED_DTYPES and local(grad).is_contiguous()


def _measure(parts, max_norm, maximum):
    """(norm of everything, factor) by device: float32 tensors of one element."""
    if len(parts) == 1:
        ((device, groups), grads) = next(iter(parts.items()))
        norm, coefficient = torch.empty(2, 1, dtype=torch.float32, device=device).unbind()
        _norm(grads, norm, maximum, max_norm, coefficient)
        if not groups:
            return {device: norm}, {device: coefficient}
        norms = [combine_norm(norm, groups, maximum)]
    else:
        norms = []
        for (device, groups), grads in parts.items():
            norm = torch.empty(1, dtype=torch.float32, device=device)
            _norm(grads, norm, maximum)
            norms.append(combine_norm(norm, groups, maximum))
    everything = torch.cat([norm.to(norms[0].device) for norm in norms])
    total = torch.linalg.vector_norm(everything, float("inf") if maximum else 2.0).reshape(1)
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
    devices = {device for device, _ in parts}
    return {d: total.to(d) for d in devices}, {d: coefficient.to(d) for d in devices}


def _norm(grads, total, maximum, max_norm=0.0, clip_coefficient=None):
    scalars = dict(maximum=maximum, max_norm=max_norm, clip_coefficient=clip_coefficient)
    _lists.call("multi_tensor_l2norm", [grads], total, **scalars)


def _scale(grads, coefficient):
    _lists.call("multi_tensor_scale", [grads, grads], None, 1.0, coefficient, True)
