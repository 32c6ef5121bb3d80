"""The functions of public apex's generic_scaled_masked_softmax_cuda: those of scaled_masked_softmax_cuda."""

from apex._legacy.scaled_masked_softmax_cuda import backward, forward

__all__ = ["backward", "forward"]
