"""What public apex's raw functions are, which no autograd and no autocast reaches."""

from __future__ import annotations

import torch

from apex._once import runs_in_given_dtypes


def raw(function):
    """The function without gradients, and in the dtypes that it is given."""
    return torch.no_grad()(runs_in_given_dtypes(function))
