"""The functions of public apex's group_norm_v2_cuda. They record no gradients, as there.

sm_margin, the number of multiprocessors to leave to other kernels, is taken and not needed: no launch here
occupies them for longer than its blocks run.
"""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex._loader import bindings
from apex.contrib.group_norm.group_norm import statistics_of, sums_of

bindings.load()
_ops = torch.ops.apex

__all__ = ["gn", "gn_bwd"]


@_raw
def gn(x, w, b, eps, silu, num_groups, mean_var_out=None, sm_margin=0):
    """Group norm of x.

    mean_var_out: float32 with 2 * batch * num_groups elements, or None; mean and variance are written there by
    turns. Raises ValueError and TypeError.
    """
    count = 2 * x.shape[0] * num_groups
    if mean_var_out is not None and (mean_var_out.dtype != torch.float32 or mean_var_out.numel() != count):
        raise ValueError(
            f"group_norm_v2_cuda.gn: mean_var_out must be float32 with {count} elements, not {mean_var_out.dtype} "
            f"with {mean_var_out.numel()}"
        )
    if mean_var_out is not None and mean_var_out.device != x.device:
        raise ValueError(f"group_norm_v2_cuda.gn: mean_var_out is on {mean_var_out.device}, x on {x.device}")
    output, mean, rstd = _ops.group_norm_forward(x, num_groups, w, b, eps, silu)
    if mean_var_out is not None:
        mean_var_out.copy_(sums_of(mean, rstd, eps, of_squares=False).view_as(mean_var_out))
    return output


@_raw
def gn_bwd(grad_output, x, w, b, mean_var, eps, silu, num_groups, sm_margin=0):
    """(gradient of x, of w, of b); mean_var: as gn's mean_var_out."""
    mean, rstd = statistics_of(mean_var, x.shape[0], num_groups, eps, x.dtype, of_squares=False)
    return tuple(_ops.group_norm_backward(grad_output, x, mean, rstd, num_groups, w, b, eps, silu))
