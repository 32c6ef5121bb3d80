"""Searches for orders of channels that let 2:4 pruning keep more of a weight's magnitude."""

from apex.contrib.sparsity.permutation_search_kernels.call_permutation_search_kernels import (
    accelerated_search_for_good_permutation,
)
from apex.contrib.sparsity.permutation_search_kernels.permutation_utilities import sum_after_2_to_4

__all__ = ["accelerated_search_for_good_permutation", "sum_after_2_to_4"]
