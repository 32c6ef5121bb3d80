"""Statistics of several ranks as one: csrc/bindings/welford_parallel.h in Python."""

from __future__ import annotations

import torch

from apex._portable import interface, tensors
from apex._portable.checks import like, type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import F32, F64, address, code_of

_merge = interface.layout("WelfordParallel").packer(
    "mean", "var", "count", "out_mean", "out_var", "out_inv_std", "out_count", "running_mean", "running_var",
    "running_type", "batches", "ranks", "channels", "mean_stride", "var_stride", "count_stride", "eps", "momentum",
    "input_type", "count_is_int",
)  # fmt: skip
_c_merge = interface.function("apex_welford_parallel")


def _check_merge(mean, var_biased, numel, running_mean, running_var, batches):
    op, kind = "welford_parallel", mean.dtype
    value(mean.dim() == 2, "{}: mean must be [ranks, channels], not {}", op, mean.shape)
    type_(kind in (F32, F64), "{}: mean must be float32 or float64, not {}", op, kind)
    like(op, "var_biased", var_biased, mean.shape, kind, "the mean's ")
    like(op, "numel", numel, (mean.shape[0],), None, "one for each rank, ")
    type_(numel.dtype in (torch.int32, kind), "{}: numel must be int32 or {}, not {}", op, kind, numel.dtype)
    value(
        (running_mean is None) == (running_var is None),
        "{}: running_mean and running_var come together, or not at all", op,
    )  # fmt: skip
    if running_mean is None:
        return
    for name, running in (("running_mean", running_mean), ("running_var", running_var)):
        like(op, name, running, (mean.shape[1],))
        code_of(op, running.dtype)
        type_(
            running.dtype is running_mean.dtype and (running.dtype is F64) == (kind is F64),
            "{}: running statistics must have one dtype, and be float64 beside float64 alone, not {}",
            op, running.dtype,
        )  # fmt: skip
    if batches is not None:
        type_(
            batches.dtype is torch.int64, "{}: num_batches_tracked must be int64, not {}", op, batches.dtype
        )
        value(
            batches.numel() == 1,
            "{}: num_batches_tracked must be one number", op,
        )  # fmt: skip


@kernel
def welford_parallel(mean, var_biased, numel, eps, running_mean, running_var, momentum, num_batches_tracked):
    op = "welford_parallel"
    _check_merge(mean, var_biased, numel, running_mean, running_var, num_batches_tracked)
    running = [] if running_mean is None else [running_mean, running_var]
    for name, one in zip(("running_mean", "running_var"), running, strict=False):
        tensors.refuse_overlap(one, f"{op}: {name}")
    place = tensors.place_of(mean)
    # Kernels write running statistics where they are.
    if place is None or not all(one.is_contiguous() for one in running):
        return None
    m, v = (t if t.shape[1] <= 1 or t.stride(1) == 1 else t.contiguous() for t in (mean, var_biased))
    made = [torch.empty(mean.shape[1], dtype=mean.dtype, device=mean.device) for _ in range(3)]
    made.append(torch.empty(1, dtype=mean.dtype, device=mean.device))
    packed = _merge(
        m.data_ptr(), v.data_ptr(), numel.data_ptr(), *(t.data_ptr() for t in made), address(running_mean),
        address(running_var), code_of(op, running_mean.dtype) if running else 0,
        address(num_batches_tracked) if running else 0, m.shape[0], m.shape[1], m.stride(0), v.stride(0),
        numel.stride(0), eps, momentum, code_of(op, mean.dtype), numel.dtype is torch.int32,
    )  # fmt: skip
    status = _c_merge(place, packed)
    if status and tensors.must_use_reference(status, op):
        return None
    for one in running:
        tensors.bump_version(one)
    return tuple(made)
