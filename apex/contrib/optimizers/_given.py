"""Gradients and copies of parameters that the steps of public apex's first optimizers are given, in order."""

from __future__ import annotations

import types

import torch


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


def check_dense(gradient, optimizer):
    """Raises RuntimeError for a sparse gradient."""
    if gradient.layout != torch.strided:
        raise RuntimeError(f"{optimizer} does not take sparse gradients: make them without sparse=True")
