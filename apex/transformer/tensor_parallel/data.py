"""Batches from the first tensor parallel rank to the others."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from apex.transformer import _collectives as collectives
from apex.transformer.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
)
from apex.transformer.tensor_parallel.utils import current_device

_MAX_DIMENSIONS = 8
_WHAT = "a batch for the tensor parallel ranks"
_PROBLEMS = (
    "is not in the data of the first tensor parallel rank",
    "is no tensor on the first tensor parallel rank",
    "has another dtype than {datatype} on the first tensor parallel rank",
    f"has more than {_MAX_DIMENSIONS} dimensions on the first tensor parallel rank",
)


def _check_data_types(keys, data, target_dtype):
    """Raises TypeError for a tensor of another dtype."""
    for key in keys:
        if data[key].dtype != target_dtype:
            raise TypeError(f"broadcast_data: {key!r} is {data[key].dtype}, not {target_dtype}")


def _problem(key, data, datatype):
    """What is wrong with it: a place of _PROBLEMS, or None."""
    if data is None or key not in data:
        return 0
    if not isinstance(data[key], torch.Tensor):
        return 1
    if datatype is not None and data[key].dtype != datatype:
        return 2
    return 3 if data[key].dim() > _MAX_DIMENSIONS else None


def _build_key_size_numel_dictionaries(keys, data, datatype=None):
    """({key: size}, {key: elements}, all elements), of the first rank's data, on every rank.

    One all-reduce: the first rank's numbers are the highest, and all ranks see whether their keys are the same.
    Raises on every rank what broadcast_data does.
    """
    mark = zlib.crc32(repr((list(keys), datatype)).encode())
    header = [mark, -mark, -1, -1] + [-1] * (len(keys) * (1 + _MAX_DIMENSIONS))
    if get_tensor_model_parallel_rank() == 0:
        for i, key in enumerate(keys):
            problem = _problem(key, data, datatype)
            if problem is not None:
                header[2:4] = problem, i
                break
            size = data[key].shape
            first = 4 + i * (1 + _MAX_DIMENSIONS)
            header[first : first + 1 + len(size)] = len(size), *size
    told = torch.tensor(header, dtype=torch.int64, device=current_device())
    header = collectives.all_reduce(
        told, get_tensor_model_parallel_group(), _WHAT, dist.ReduceOp.MAX
    ).tolist()
    if header[0] != -header[1]:
        raise ValueError("broadcast_data: the ranks differ in their keys or datatype; all must pass the same")
    problem, which = header[2:4]
    if problem >= 0:
        kind = (KeyError, TypeError, TypeError, ValueError)[problem]
        raise kind(f"broadcast_data: {keys[which]!r} {_PROBLEMS[problem].format(datatype=datatype)}")
    sizes, numels = {}, {}
    for i, key in enumerate(keys):
        dimensions, *size = header[4 + i * (1 + _MAX_DIMENSIONS) :][: 1 + _MAX_DIMENSIONS]
        sizes[key] = size[:dimensions]
        numels[key] = torch.Size(sizes[key]).numel()
    return sizes, numels, sum(numels.values())


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, torch.Tensor] | None, datatype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The first tensor parallel rank's tensors, on every rank of its group.

    Args:
        keys: which ones, the same on all ranks.
        data: of the first rank; what others pass is not looked at.
        datatype: of all of them, the same on all ranks.

    Returns:
        The tensors by their keys, on the current GPU, or the CPU where there is none; views of one tensor.

    Raises:
        KeyError, TypeError, ValueError: on every rank: a key that the first rank lacks, a value of another dtype or
            with more than 8 dimensions; ranks whose keys or datatypes differ.
    """
    keys = list(keys)
    sizes, numels, total = _build_key_size_numel_dictionaries(keys, data, datatype)
    device = current_device()
    flat = torch.empty(total, dtype=datatype, device=device)
    parts = flat.split([numels[key] for key in keys])
    if data is not None and get_tensor_model_parallel_rank() == 0:
        for key, part in zip(keys, parts, strict=True):
            part.copy_(data[key].reshape(-1))
    group = get_tensor_model_parallel_group()
    collectives.broadcast(flat, get_tensor_model_parallel_src_rank(), group, _WHAT)
    return {key: part.view(sizes[key]) for key, part in zip(keys, parts, strict=True)}
