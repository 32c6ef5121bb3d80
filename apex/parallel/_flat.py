"""Collectives over lists of tensors: one call for all tensors of a type, laid out one after the other."""

import torch
import torch.distributed as dist

from apex._legacy import apex_C
from apex.parallel._waiting import CALLS, waiting


def import_flatten_impl():
    """Does nothing: kept for callers of public apex, where it looked for the extension apex_C."""


def flatten(bucket):
    """The elements of dense tensors of one dtype in one dimension, one after the other."""
    return apex_C.flatten(bucket)


def unflatten(coalesced, bucket):
    """Views of a flat tensor, shaped like the tensors of `bucket`."""
    return apex_C.unflatten(coalesced, bucket)


@torch.no_grad()
def apply_flat_dist_call(bucket, call, extra_args=None):
    """Calls a collective on tensors of one dtype and device at once, and copies the result back into them.

    call: a function of torch.distributed that works in place, called as call(flat, *extra_args).
    dist.all_reduce is followed by a division by the number of ranks.
    """
    bucket = [tensor for tensor in bucket if tensor.numel()]
    if not bucket:
        return
    coalesced = torch.cat([tensor.reshape(-1) for tensor in bucket])  # a copy, of a single tensor too
    with waiting("tensors that all ranks have", CALLS) as wait:
        if call in (dist.all_reduce, dist.broadcast):
            wait.run(call, coalesced, *(extra_args or ()))
        else:  # of the caller's own
            call(coalesced, *(extra_args or ()))
    if call is dist.all_reduce:
        coalesced /= dist.get_world_size()
    for tensor, synced in zip(bucket, unflatten(coalesced, bucket), strict=True):
        tensor.copy_(synced)


def split_by_type(tensors):
    """{tensor.type(): tensors of that type}, in the order in which types are met."""
    buckets = {}
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


def split_half_float_double_bfloat16(tensors):
    """The float16, float32, float64 and bfloat16 tensors as lists of their own; empty lists are left out."""
    dtypes = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
    buckets = ([t for t in tensors if t.dtype == dtype] for dtype in dtypes)
    return [bucket for bucket in buckets if bucket]


def split_half_float_double(tensors):
    """The float16, float32 and float64 tensors as lists of their own; empty lists are left out, and so is the rest."""
    return split_half_float_double_bfloat16([t for t in tensors if t.dtype != torch.bfloat16])


def flat_dist_call(tensors, call, extra_args=None):
    """`apply_flat_dist_call` for tensors of any types: one collective for each type."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def extract_tensors(maybe_tensor, tensor_list):
    """Appends the tensors of a nested iterable to tensor_list; what is neither is left out."""
    if isinstance(maybe_tensor, torch.Tensor):
        tensor_list.append(maybe_tensor)
    elif not isinstance(maybe_tensor, (str, bytes)):
        try:
            items = iter(maybe_tensor)
        except TypeError:
            return
        for item in items:
            extract_tensors(item, tensor_list)
