"""Many tensors in one piece of memory, so that one launch works on all of them."""

from apex.contrib.combine_tensors.combine_tensors import (
    combine_npu,
    combine_tensors,
    get_aligned_storage_size,
    get_part_combined_tensor,
    is_combined_tensor_valid,
)

__all__ = [
    "combine_npu",
    "combine_tensors",
    "get_aligned_storage_size",
    "get_part_combined_tensor",
    "is_combined_tensor_valid",
]
