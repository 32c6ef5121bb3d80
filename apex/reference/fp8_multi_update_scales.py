"""Delayed scaling's update of many histories in plain PyTorch: the op over apex/reference/fp8.py."""

import torch

from apex.reference import fp8

_NAME = "fp8_multi_update_scales"

NO_DERIVATIVE = True


def _check_history(history, rows, i):
    if history.dtype != torch.float32:
        raise TypeError(f"{_NAME}: amax_histories[{i}] must be float32, not {history.dtype}")
    if history.dim() != 2 or history.shape[0] < 1:
        raise ValueError(
            f"{_NAME}: amax_histories[{i}] must be [rows, columns] with at least one row, not {list(history.shape)}"
        )
    if history.shape[0] != rows:
        raise ValueError(f"{_NAME}: amax_histories have {rows} and {history.shape[0]} rows")
    if not history.is_contiguous() and not fp8.is_upright(history):
        raise ValueError(f"{_NAME}: amax_histories[{i}] must be contiguous, or each of its columns")


def fp8_multi_update_scales(fp8_max, amax_histories, scales, scale, scale_inv, margin=0.0, most_recent=False):
    """Delayed scaling's update of many histories: `fp8_update_scales` of each, with new scales elsewhere.

    amax_histories: float32 [rows, n] each, contiguous, or each of their columns; they move on by a row. scales: float32
    [n] each, which are only read. fp8_max, and what is written, scale and scale_inv: float32, of all tensors one behind
    the other. Raises ValueError and TypeError.
    """
    if len(amax_histories) != len(scales):
        raise ValueError(f"{_NAME}: {len(amax_histories)} histories, {len(scales)} scales")
    for i, (history, old) in enumerate(zip(amax_histories, scales, strict=True)):
        _check_history(history, amax_histories[0].shape[0], i)
        fp8.check_numbers(_NAME, f"scales[{i}]", old, history.shape[1], history.device)
    sizes = [old.numel() for old in scales]
    for what, numbers in (("fp8_max", fp8_max), ("scale", scale), ("scale_inv", scale_inv)):
        fp8.check_numbers(_NAME, what, numbers, sum(sizes), scale.device)
    if not scales:
        return
    scale.copy_(torch.cat(scales))
    parts = ([part for part in numbers.split(sizes)] for numbers in (scale, scale_inv, fp8_max))
    algorithm = "most_recent" if most_recent else "max"
    fp8.update_scales(amax_histories, *parts, margin, algorithm)
