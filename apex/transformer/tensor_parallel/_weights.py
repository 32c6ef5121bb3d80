"""Weights of which each tensor parallel rank holds a part, and what parameters say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from apex.transformer.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from apex.transformer.tensor_parallel.random import get_cuda_rng_tracker
from apex.transformer.utils import divide

_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS = {
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor) -> bool:
    """Whether a parameter counts on this rank: it is a part of one, or this rank is the first of those that hold it."""
    return bool(getattr(param, "tensor_model_parallel", False)) or get_tensor_model_parallel_rank() == 0


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Says of a parameter whether ranks hold parts of it, of which dimension, in how many pieces each.

    Sets tensor_model_parallel, partition_dim and partition_stride. Raises ValueError where one of them is set already.
    """
    for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        if hasattr(tensor, name):
            raise ValueError(f"the tensor's {name} is set already, to {getattr(tensor, name)}")
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Says that ranks hold all of it, where nothing else is said."""
    for name, value in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(
    destination_tensor: torch.Tensor, source_tensor: torch.Tensor
) -> None:
    """Says the same of another tensor."""
    for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def split_weight(shape, dim, init_method, stride, dtype, device):
    """(this rank's part of a new weight of that shape, the whole of it on the CPU).

    The dimension is cut into stride * ranks pieces, of which a rank has every ranks-th.
    """
    whole = _whole_weight(shape, init_method, dtype)
    size = divide(shape[dim], get_tensor_model_parallel_world_size())
    weight = nn.Parameter(_part(whole, size, dim, stride).to(device))
    set_tensor_model_parallel_attributes(weight, True, dim, stride)
    return weight, whole


def _whole_weight(shape, init_method, dtype):
    whole = torch.empty(shape, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        init_method(whole)
    return whole.to(dtype)


def _part(whole, size, dim, stride):
    """This rank's pieces, which are `size` together."""
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    divide(size, stride)
    return torch.cat(whole.chunk(stride * ranks, dim)[rank::ranks], dim)  # as many of 0 elements, too


def _initialize_affine_weight_cpu(
    weight: torch.Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Callable[[torch.Tensor], Any],
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    params_dtype: torch.dtype = torch.float32,
) -> torch.Tensor | None:
    """Fills this rank's part of a weight [output_size, input_size], which is drawn whole on the CPU; marks it.

    Returns the whole one where return_master_weight. Public apex's; layers here make their weights by themselves.
    """
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    whole = _whole_weight((output_size, input_size), init_method, params_dtype)
    with torch.no_grad():
        weight.copy_(_part(whole, per_partition_size, partition_dim, stride))
    return whole if return_master_weight else None


def _initialize_affine_weight_gpu(
    weight: torch.Tensor,
    init_method: Callable[[torch.Tensor], Any],
    partition_dim: int,
    stride: int = 1,
) -> None:
    """Fills this rank's part of a weight where it is, with numbers of its own; marks it. Public apex's."""
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    with get_cuda_rng_tracker().fork(), torch.no_grad():
        init_method(weight)
