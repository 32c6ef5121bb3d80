"""The functions of public apex's extension apex_C: dense tensors as one, and back."""

from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["flatten", "unflatten"]


def flatten(tensors):
    """The elements of all tensors in one dimension, one after the other.

    A copy, except of a single contiguous tensor, which is viewed. An empty list is torch.cat's error.
    """
    return _flatten_dense_tensors(list(tensors))


def unflatten(flat, tensors):
    """Views of `flat`, shaped like `tensors`, one after the other; an empty tensor has shape (0,)."""
    return list(_unflatten_dense_tensors(flat, list(tensors)))
