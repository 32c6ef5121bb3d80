"""The methods that optimizers get to read and clip their combined tensors."""

from __future__ import annotations

import torch

from apex._flat import gradient_norm
from apex._loader import bindings
from apex.amp._amp_state import maybe_print
from apex.amp._errors import AmpUsageError
from apex.amp.scaler import _op


def _parts(self, what, need_fused):
    """The parts, or None after the reason why there are none was printed."""
    combined = self._amp_stash.combined
    reason = None
    if need_fused and not (combined is not None and combined.fused):
        reason = f"{what} are combined for fused optimizers (apex.optimizers.CombinedAdam, ...) only"
    elif combined is None:
        reason = f"{what} are combined with combine_grad=True, or for a fused optimizer"
    elif combined.parts is None:
        reason = f"{what} are combined at the first backward pass inside amp.scale_loss"
    if reason:
        maybe_print(f"apex.amp: {reason}")
        return None
    combined.gather()
    return combined.parts


def _has_masters(self):
    return hasattr(self._amp_stash, "fp16_groups")


def _listed(self, parts, get):
    """One entry a kind of parameters, None for a kind that there is none of: [masters', float32] or [float32]."""
    masters = [part for part in parts if part.models is not None]
    full = [part for part in parts if part.models is None]
    if not _has_masters(self):
        return [get(part) for part in full]
    return [get(part) for part in masters or [None]] + [get(part) for part in full or [None]]


def get_model_combined_params(self):
    """Flat parameters of the model: [None for half precision, float32], or [float32] without master weights."""
    parts = _parts(self, "parameters", True)
    if parts is None:
        return []
    return _listed(self, parts, lambda part: None if part is None or part.models is not None else part.param)


def get_model_combined_grads(self):
    """Flat gradients of the model: [half precision, float32], or [float32] without master weights."""
    parts = _parts(self, "gradients", False)
    return [] if parts is None else _listed(self, parts, lambda part: part and part.written)


def get_model_combined_grad_masks(self):
    """As get_model_combined_grads: 1 where a gradient lies, 0 between."""
    parts = _parts(self, "gradients", False)
    return [] if parts is None else _listed(self, parts, lambda part: part and part.mask(part.written.dtype))


def get_optimizer_combined_params(self):
    """Flat parameters that the optimizer updates: [masters, float32], or [float32] without master weights."""
    parts = _parts(self, "parameters", True)
    return [] if parts is None else _listed(self, parts, lambda part: part and part.param)


def get_optimizer_combined_grads(self):
    """Flat gradients that the optimizer reads: [masters', float32], or [float32] without master weights."""
    parts = _parts(self, "gradients", False)
    return [] if parts is None else _listed(self, parts, lambda part: part and part.grad)


def get_optimizer_combined_grad_masks(self):
    """As get_optimizer_combined_grads: 1 where a gradient lies, 0 between."""
    parts = _parts(self, "gradients", False)
    return [] if parts is None else _listed(self, parts, lambda part: part and part.mask(part.grad.dtype))


def clip_optimizer_grad_norm_fused(self, max_norm, norm_type=2):
    """Scales what the optimizer reads down, in place, to a norm of at most max_norm: two launches.

    As torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm, norm_type), up to the order of sums.
    norm_type: 1, 2, inf or any other. Returns the norm before, a float32 tensor without dimensions; 0 if nothing is
    combined yet.
    """
    parts = _parts(self, "gradients", False)
    return clip([part.grad for part in parts or ()], float(max_norm), float(norm_type))


def clip_model_grad_norm_fused(self, max_norm, norm_type=2):
    """The same for the model's gradients; AmpUsageError with master weights, where those are still scaled."""
    if _has_masters(self):
        raise AmpUsageError(
            "clip_model_grad_norm_fused: with master weights the model's gradients are scaled, and nobody reads them",
            remedy="optimizer.clip_optimizer_grad_norm_fused(max_norm)",
        )
    return clip_optimizer_grad_norm_fused(self, max_norm, norm_type)


@torch.no_grad()
def clip(flats, max_norm, norm_type):
    """Clips flat float32 gradients, whose gaps are zero, together. Nothing waits for the device."""
    if not flats:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    norm = gradient_norm(flats, norm_type)
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    bindings.load()
    _op("multi_tensor_scale", None, [flats, flats], 1.0, coefficient, True)
    return norm.reshape(())


METHODS = {
    f.__name__: f
    for f in (
        get_model_combined_params,
        get_model_combined_grads,
        get_model_combined_grad_masks,
        get_optimizer_combined_params,
        get_optimizer_combined_grads,
        get_optimizer_combined_grad_masks,
        clip_model_grad_norm_fused,
        clip_optimizer_grad_norm_fused,
    )
}
