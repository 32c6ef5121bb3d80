"""Delayed scaling's update in plain PyTorch: the op over apex/reference/fp8.py."""

import torch

from apex.reference import fp8


def _check(amax_history, scale, scale_inv, fp8_max, reduced):
    name = "fp8_update_scales"
    if amax_history.dtype != torch.float32:
        raise TypeError(f"{name}: amax_history must be float32, not {amax_history.dtype}")
    if amax_history.dim() != 2 or amax_history.shape[0] < 1:
        raise ValueError(
            f"{name}: amax_history must be [rows, columns] with at least one row, not {list(amax_history.shape)}"
        )
    columns = amax_history.shape[1]
    given = {"scale": scale, "scale_inv": scale_inv, "fp8_max": fp8_max, "reduced": reduced}
    for what, numbers in given.items():
        if numbers is None:
            continue
        if numbers.dtype != torch.float32:
            raise TypeError(f"{name}: {what} must be float32, not {numbers.dtype}")
        if list(numbers.shape) != [columns]:
            raise ValueError(
                f"{name}: {what} has shape {list(numbers.shape)} but amax_history {list(amax_history.shape)}"
            )
        if numbers.device != amax_history.device:
            raise ValueError(
                f"{name}: {what} is on {numbers.device} but the input is on {amax_history.device}"
            )
        if columns > 1 and numbers.stride(0) != 1:
            raise ValueError(f"{name}: {what} must be contiguous")
    if fp8.is_upright(amax_history):
        return
    if columns > 1 and amax_history.stride(1) != 1:
        raise ValueError(f"{name}: the rows of amax_history must be contiguous, or its columns")
    if amax_history.shape[0] > 1 and amax_history.stride(0) < columns:
        raise ValueError(f"{name}: amax_history overlaps itself")


def fp8_update_scales(amax_history, scale, scale_inv, fp8_max, margin=0.0, most_recent=False, reduced=None):
    """Delayed scaling's update of any number of scales, in place.

    amax_history: float32 [rows, columns], whose rows or columns are contiguous. scale, scale_inv, fp8_max: float32
    [columns]; reduced: likewise, in the place of row 0, or None. amax is the largest of a column, or with most_recent
    its row 0; scale becomes fp8_max / amax / 2**margin, or stays where amax is 0, infinite or NaN; scale_inv is 1 /
    scale. The history moves up by a row, row 0 becoming the last one, and row 0 is 0 then. Raises ValueError and
    TypeError.
    """
    _check(amax_history, scale, scale_inv, fp8_max, reduced)
    if reduced is not None:
        amax_history[0].copy_(reduced)
    fp8.update_scales(
        [amax_history], [scale], [scale_inv], [fp8_max], margin, "most_recent" if most_recent else "max"
    )
