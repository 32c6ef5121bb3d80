"""How a bucket's shard keeps its state, and that state in float32, which is what Adam computes in.

States are kept as they are; or (scaled) divided, fragment by fragment, by what makes the most of the range of
a half-precision dtype (FP8-LM, arXiv:2310.18313). Float32 parameters are kept as well; or only the 16 bits that
they have beyond a bfloat16 parameter; or not at all, and are the model's.
"""

from __future__ import annotations

import torch

from apex._bits import join_remainders, split_remainders
from apex.contrib.optimizers._flat import copy_lists, flat

MOMENTS = ("exp_avg", "exp_avg_sq")
_TOP = torch.finfo(torch.float16).max / 2  # the largest magnitude of a scaled state


def scale_states(bucket, device):
    """From here on the states of an allocated bucket are scaled."""
    fragments = bucket.local_fragments
    bucket.state_scales = {
        name: torch.zeros(len(fragments), dtype=torch.float32, device=device) for name in ("param", *MOMENTS)
    }
    firsts = [f.shard_range[0] for f in fragments[1:]]
    ends = [0, *firsts, bucket.shard_size]  # the space between fragments goes with what is before it
    lengths = [end - first for first, end in zip(ends, ends[1:], strict=False)] if fragments else []
    bucket.scaled_lengths = torch.tensor(lengths, dtype=torch.int64, device=device)


def load_moment(bucket, name):
    """A moment in float32; the state itself if that is how it is kept."""
    return _load(bucket, name, getattr(bucket, name + "_shard"))


def store_moment(bucket, name, values):
    _store(bucket, name, getattr(bucket, name + "_shard"), values)


def load_parameters(bucket, parameter_of):
    """This rank's shard of the parameters in float32; the state itself if that is how it is kept.

    parameter_of: fragment -> parameter.
    """
    if bucket.params_shard is not None:
        return _load(bucket, "param", bucket.params_shard)
    if bucket.param_remainders_shard is not None:
        rounded = model_shard(bucket, parameter_of, torch.bfloat16)
        return join_remainders(rounded, bucket.param_remainders_shard)
    return model_shard(bucket, parameter_of, torch.float32)


def store_parameters(bucket, values):
    """Keeps what is to be kept of float32 parameters."""
    if bucket.params_shard is not None:
        _store(bucket, "param", bucket.params_shard, values)
    if bucket.param_remainders_shard is not None:
        bucket.param_remainders_shard.copy_(split_remainders(values)[1])


def model_shard(bucket, parameter_of, dtype):
    """This rank's shard of the model's parameters, in another dtype."""
    shard = torch.zeros(bucket.shard_size, dtype=dtype, device=bucket.exp_avg_shard.device)
    fragments = bucket.local_fragments
    copy_lists(
        [flat(parameter_of(f))[slice(*f.shard_param_range)] for f in fragments],
        [shard[slice(*f.shard_range)] for f in fragments],
    )
    return shard


def _load(bucket, name, kept):
    if bucket.state_scales is None:
        return kept.float()
    return kept.float() * _spread(bucket, bucket.state_scales[name])


def _store(bucket, name, kept, values):
    if bucket.state_scales is not None and bucket.local_fragments:
        scales = _largest(bucket, values) / _TOP
        scales.clamp_(min=torch.finfo(torch.float32).tiny)  # whose reciprocal is finite
        bucket.state_scales[name].copy_(scales)
        values = values * _spread(bucket, scales.reciprocal())
    if values is not kept:
        kept.copy_(values)


def _largest(bucket, values):
    """The largest magnitude in each local fragment."""
    pieces = [values[slice(*f.shard_range)] for f in bucket.local_fragments]
    total, largest = values.new_zeros(1), values.new_zeros(len(pieces))
    torch.ops.apex.multi_tensor_l2norm(pieces, total, largest, None, 1.0, None, False, True)
    return largest


def _spread(bucket, of_fragments):
    """One number a local fragment -> one an element of the shard."""
    if not len(of_fragments):
        return 1.0
    return torch.repeat_interleave(of_fragments, bucket.scaled_lengths, output_size=bucket.shard_size)
