"""What sharded optimizers refuse: options that contradict each other, and parameters that they cannot shard."""

from __future__ import annotations

import torch
import torch.distributed as dist

from apex._plain import is_plain
from apex.contrib.optimizers._flat import is_dense

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_options(optimizer):
    """Raises as DistributedFusedAdam's docstring tells."""
    o = optimizer
    if o.dtype not in DTYPES or not travels(o.grad_sync_dtype, o.param_sync_dtype):
        raise ValueError(
            f"DistributedFusedAdam: dtype={o.dtype}, grad_sync_dtype={o.grad_sync_dtype}, param_sync_dtype="
            f"{o.param_sync_dtype}: float32, float16 or bfloat16 is required (or an integer type for the last)"
        )
    if o.store_param_remainders and o.store_params:
        raise RuntimeError(
            "DistributedFusedAdam: store_param_remainders is in the place of the parameters themselves: add "
            "store_params=False"
        )
    if o.store_param_remainders and (o.dtype, o.param_sync_dtype) != (torch.float32, torch.bfloat16):
        raise RuntimeError(
            "DistributedFusedAdam: remainders are what float32 has beyond bfloat16: store_param_remainders needs "
            f"dtype=torch.float32 and param_sync_dtype=torch.bfloat16, not {o.dtype} and {o.param_sync_dtype}"
        )
    if o.with_scaled_states and (not o.store_params or o.dtype == torch.float32):
        raise RuntimeError(
            "DistributedFusedAdam: with_scaled_states scales parameters and averages that are kept in half "
            "precision: it needs store_params=True and dtype=torch.float16 or torch.bfloat16, not "
            f"store_params={o.store_params} and {o.dtype}"
        )
    if o.with_scaled_states and o.capturable:
        raise NotImplementedError(
            "DistributedFusedAdam: with_scaled_states rounds anew at every step, a skipped one included, so "
            "capturable is not offered with it: use dtype=torch.float32"
        )
    if o.nccl_ub and not o.contiguous_grad_buffer:
        raise RuntimeError(
            "DistributedFusedAdam: nccl_ub registers the contiguous buffers with NCCL: add contiguous_grad_buffer=True"
        )
    if not (o.bucket_cap_mb > 0 and o.pipeline_size >= 1):
        raise ValueError(
            "DistributedFusedAdam: bucket_cap_mb and pipeline_size must be positive: "
            f"{o.bucket_cap_mb} and {o.pipeline_size}"
        )


def check_user_buffers(device, group):
    """Raises RuntimeError unless NCCL reduces on GPUs, whose memory is to be registered with it."""
    backend = str(dist.get_backend(group))
    if device.type != "cuda" or "nccl" not in backend:
        raise RuntimeError(
            f"DistributedFusedAdam: nccl_ub registers memory of GPUs with NCCL, and these parameters are on {device}, "
            f"their ranks connected by {backend}: use nccl_ub=False"
        )


def travels(grad_sync_dtype, param_sync_dtype):
    """Whether gradients and parameters can be under way in these dtypes."""
    integer = not (param_sync_dtype.is_floating_point or param_sync_dtype.is_complex)
    return grad_sync_dtype in DTYPES and (integer or param_sync_dtype in DTYPES)


def device_of(params, wanted):
    """The device of all parameters; "cuda", the default, and None ask for no other one."""
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise ValueError(
            f"apex.contrib.optimizers: parameters are on {', '.join(sorted(map(str, devices)))}: one device a process"
        )
    wanted = None if wanted is None else torch.device(wanted)
    if not devices:
        return torch.device("cpu") if wanted is None else wanted
    (device,) = devices
    if wanted in (None, torch.device("cuda")):
        return device
    if wanted.type != device.type or wanted.index not in (None, device.index):
        raise RuntimeError(
            f"apex.contrib.optimizers: device={wanted}, but the parameters are on {device}: move the model first, or "
            "leave device out"
        )
    return device


def check_parameter(where, p, device):
    """Raises TypeError or ValueError for a parameter that cannot be placed in buckets."""
    if type(p).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{where} is a {type(p).__name__}, whose elements are its own affair: use apex.optimizers.FusedAdam for "
            "DTensors, and plain parameters here"
        )
    if p.dtype not in DTYPES:
        raise TypeError(f"{where} is {p.dtype}; float32, float16 or bfloat16 is required")
    if not is_dense(p):
        raise TypeError(f"{where} has gaps or overlaps in memory: make it of tensor.contiguous()")
    if p.device.type != "meta" and not is_plain(p):
        raise TypeError(
            f"{where} is a view whose memory does not hold its values (of torch's lazy negative or conjugate bit), or "
            "has no memory: make it of tensor.clone()"
        )
    if p.device != device:
        raise ValueError(f"{where} is on {p.device}, others are on {device}: one device a process")


def check_placement(where, p, optimizer, dtypes):
    """Raises ValueError for dtypes (state, gradients, parameters under way) that a parameter cannot have here."""
    state, gradients, values = dtypes
    if state != optimizer.dtype:
        raise ValueError(f"{where}: its state cannot be {state}, that of this optimizer is {optimizer.dtype}")
    if not travels(gradients, values):
        raise ValueError(f"{where} cannot travel as {gradients} and {values}: see grad_sync_dtype")
    remainders = optimizer.store_param_remainders and values == optimizer.param_sync_dtype
    if remainders and p.dtype != torch.bfloat16:
        raise ValueError(
            f"{where} is {p.dtype}, and store_param_remainders needs bfloat16: cast the model, or call "
            f"init_params(such parameters, param_sync_dtype={p.dtype}) first"
        )
    sent = torch.float32 if optimizer.with_scaled_states else state
    leading = not values.is_floating_point and optimizer._unpack is None  # bytes of `sent`
    if leading and torch.float16 in (sent, p.dtype) and sent != p.dtype:
        raise ValueError(
            f"{where} is {p.dtype}, whose leading bytes are not those of {sent}: it cannot travel as {values}; "
            "choose another param_sync_dtype"
        )
