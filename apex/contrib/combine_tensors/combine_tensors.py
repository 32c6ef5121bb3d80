from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from apex._flat import Layout, alias, check_tensors, slot_size


@torch.no_grad()
def combine_tensors(
    list_of_tensor: Sequence[torch.Tensor], require_copy_value: bool = True
) -> torch.Tensor | None:
    """Moves tensors, in place, into one new buffer, which is returned; each then is a view of its slot there.

    What is done to the buffer is done to the tensors, and the other way round. Autograd sees a write to a tensor, and
    the zeros of require_copy_value=False, but no write to the buffer; where a graph may need a tensor's values from
    before such a write, say so: torch.autograd.graph.increment_version(tensors). Tensors lie in the order of the list,
    the first at the buffer's beginning, each `get_aligned_storage_size` elements after the one before; what lies
    between them is zero. Shapes stay, and so do the strides of dense tensors.

    Args:
        list_of_tensor: tensors of one dtype (float32, float16 or bfloat16) on one device, of any shapes; parameters
            and gradients too.
        require_copy_value: keep their values; False leaves zeros.

    Returns:
        The buffer: 1-D, the tensors' dtype and device. None for an empty list.

    Raises:
        TypeError: something in the list is no tensor; a tensor in the place of the list.
        RuntimeError: another dtype, several dtypes or devices, a sparse or sharded tensor, one that is there twice.

    Source: the interface of the Ascend patch, where it is called combine_npu.
    """
    if isinstance(list_of_tensor, torch.Tensor):  # whose rows would be the list
        raise TypeError("combine_tensors takes a list of tensors, not one: combine_tensors([tensor])")
    tensors = list(list_of_tensor)
    check_tensors(tensors)
    layout = Layout(tensors)
    if not tensors:
        return None
    combined = layout.zeros(tensors[0].dtype, tensors[0].device)
    views = layout.views(combined)
    if require_copy_value:
        torch._foreach_copy_(views, [t.detach() for t in tensors])
    for tensor, view in zip(tensors, views, strict=True):
        alias(tensor, view)
    if not require_copy_value:
        increment_version(tensors)  # autograd then refuses graphs that need the values from before
    return combined


combine_npu = combine_tensors


def get_aligned_storage_size(tensor: torch.Tensor) -> int:
    """Elements from the beginning of a tensor's slot to that of the next: its own rounded up to 16, and 32 more."""
    return slot_size(tensor)


def get_part_combined_tensor(
    combined_tensor: torch.Tensor | None, index: int, size: int
) -> torch.Tensor | None:
    """Elements [index, index + size) of a combined tensor, as a view; None for None or for no elements.

    Raises RuntimeError if they do not lie inside it.
    """
    if combined_tensor is None or size == 0:
        return None
    if index < 0 or size < 0 or index + size > combined_tensor.numel():
        raise RuntimeError(
            f"elements {index} to {index + size} are not inside a combined tensor of {combined_tensor.numel()}"
        )
    return combined_tensor[index : index + size]


def is_combined_tensor_valid(combined_tensor: torch.Tensor | None, list_of_tensor: Sequence) -> bool:
    """Whether each tensor of the list still begins inside the buffer; True for an empty list.

    A None in the list, or in the place of the buffer, is False. Tensors without elements have no address and pass.
    """
    if len(list_of_tensor) == 0:
        return True
    if combined_tensor is None:
        return False
    start = combined_tensor.data_ptr()
    stop = start + combined_tensor.numel() * combined_tensor.element_size()
    return all(t is not None and (t.numel() == 0 or start <= t.data_ptr() < stop) for t in list_of_tensor)
