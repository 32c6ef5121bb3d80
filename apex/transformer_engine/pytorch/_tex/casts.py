"""What the functions of transformer_engine_extensions share: codes as uint8, and tensors that they write into."""

from __future__ import annotations

import torch

from apex import _fp8
from apex.reference.fp8 import rows_of
from apex.transformer_engine.pytorch import constants

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def is_fp8(dtype):
    """Whether a torch dtype is one of FP8."""
    return dtype in FP8


def given(tensor):
    """The tensor; None where it has no element, by which the public engine says that there is none."""
    return None if tensor is None or tensor.numel() == 0 else tensor


def codes_of(name, tensor, dtype):
    """A tensor of codes as one of FP8; what is none of FP8 as it is. Raises TypeError."""
    wanted = constants.torch_dtype(dtype, tensor.device)
    if is_fp8(wanted):
        if tensor.dtype not in (torch.uint8, torch.int8, wanted):
            raise TypeError(f"{name}: codes of {wanted} must be uint8, not {tensor.dtype}")
        return tensor.view(wanted)
    if tensor.dtype != wanted:
        raise TypeError(f"{name}: a tensor is said to be {wanted}, and is {tensor.dtype}")
    return tensor


def as_bytes(tensor):
    """Codes as the public engine has them: uint8."""
    return tensor.view(torch.uint8)


def check_target(name, target, shape, device):
    """Raises where codes of such a shape do not go into a tensor of bytes or FP8."""
    if target.element_size() != 1 or target.dtype == torch.bool:
        raise TypeError(f"{name}: codes are written into uint8, not {target.dtype}")
    if list(target.shape) != list(shape) or target.device != device:
        raise ValueError(
            f"{name}: codes of shape {list(shape)} on {device} do not go into {list(target.shape)} on {target.device}"
        )


def write_codes(name, target, codes, noop=None):
    """Codes into a tensor of bytes or FP8. noop: float32, of one element: where it is 1, nothing is written."""
    check_target(name, target, codes.shape, codes.device)
    into, made = as_bytes(target), as_bytes(codes)
    into.copy_(made if noop is None else torch.where(noop.reshape(()) == 1, into, made))


def check_targets(name, x, targets):
    """The same for each of targets (tensor, whether it is the transpose) of a cast of x."""
    for target, turned in targets:
        check_target(name, target, (x.shape[-1], rows_of(x)) if turned else x.shape, x.device)


def cast_into(name, x, scale, amax, scale_inv, targets, otype, noop=None):
    """x * scale in FP8, into each of targets (tensor, whether it is the transpose), in one pass.

    amax becomes max(amax, max |x|), scale_inv 1 / scale.
    """
    check_targets(name, x, targets)
    amax, noop, columns = given(amax), given(noop), any(turned for _, turned in targets)
    recorded = amax if noop is None or amax is None else torch.zeros_like(amax)
    dtype = constants.fp8_dtype(otype, x.device)
    rows = any(not turned for _, turned in targets)
    made = _fp8.pass_over(x, scale, dtype, recorded, rows, columns, False)
    for target, turned in targets:
        write_codes(name, target, made[turned], noop)
    if recorded is not amax:
        amax.copy_(torch.where(noop.reshape(()) == 1, amax, torch.maximum(amax, recorded)))
    write_inverse(scale, scale_inv, noop)


def write_inverse(scale, scale_inv, noop=None):
    """scale_inv becomes 1 / scale."""
    scale_inv = given(scale_inv)
    if scale_inv is None:
        return
    found = (torch.ones_like(scale) / scale).reshape(scale_inv.shape)
    scale_inv.copy_(found if noop is None else torch.where(noop.reshape(()) == 1, scale_inv, found))
