"""Gradients and copies of parameters that the steps of public apex's first optimizers are given, in order."""

from __future__ import annotations

import types

import torch

_MASTERS = (torch.float32, torch.float64)


def by_group(given, groups, what):
    """One list a group: of `given`, which is a list a group, or a list or generator for the only one; None: of None.

    Raises ValueError unless there is one (or None) for each parameter.
    """
    if given is None:
        return [[None] * len(group["params"]) for group in groups]
    if isinstance(given, types.GeneratorType):
        found = [list(given)]
    else:
        given = list(given)
        nested = bool(given) and isinstance(given[0], (list, tuple, types.GeneratorType))
        found = [list(of_group) for of_group in given] if nested else [given]
    counts, wanted = [len(of_group) for of_group in found], [len(group["params"]) for group in groups]
    if counts != wanted:
        raise ValueError(
            f"step(): {what} are {counts} in {len(counts)} groups, parameters {wanted} in {len(wanted)}: one for each "
            "parameter, in a list a group"
        )
    return found


def check_row(optimizer, p, gradient, output, states):
    """Raises RuntimeError for a sparse gradient; TypeError, ValueError for tensors that no step takes.

    output: the tensor that receives the parameter, or None. states: of the parameter, each of its shape.
    """
    if gradient.layout != torch.strided:
        raise RuntimeError(f"{optimizer} does not take sparse gradients: make them without sparse=True")
    if p.dtype not in _MASTERS or gradient.dtype not in (torch.float16, torch.bfloat16, p.dtype):
        raise TypeError(
            f"{optimizer}: no variant takes a gradient in {gradient.dtype} of a parameter in {p.dtype}: parameters are "
            "float32 or float64, gradients float16, bfloat16 or as their parameter"
        )
    counts = [t.numel() for t in (gradient, *states, *([] if output is None else [output]))]
    if any(count != p.numel() for count in counts):
        raise ValueError(
            f"{optimizer}: a parameter has {p.numel()} elements, its gradient, states and output {counts}: they are of "
            "one shape"
        )
    if output is not None and not (output.is_floating_point() or output.dtype == torch.uint8):
        raise TypeError(f"{optimizer}: output_params are floating-point or uint8, not {output.dtype}")
