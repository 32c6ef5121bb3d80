"""index_mul_2d and its gradients, with public apex's names."""

from __future__ import annotations

import torch

from apex._functional import call

_op = torch.ops.apex.index_mul_2d_forward.default


class IndexMul2d_:
    """in1[idx1] * in2. Has the face of an autograd.Function; the op behind is differentiable by itself."""

    @staticmethod
    def apply(in1: torch.Tensor, in2: torch.Tensor, idx1: torch.Tensor) -> torch.Tensor:
        """in1[idx1] * in2.

        Args:
            in1: [entries, features], float16, bfloat16, float32 or float64, of any strides.
            in2: [rows, features], of in1's dtype.
            idx1: [rows], int64 or int32. An index outside [0, entries) raises IndexError on a CPU; on a GPU, where
                looking would make the host wait, its row of the result and of in2's gradient is nan, it adds
                nothing to in1's gradient, and no memory is read for it.

        Differentiable to any order. Gradients of in1 are sums in the rows' own order, without atomics: the same
        input gives the same bits.

        Raises:
            TypeError, ValueError: dtypes, shapes or devices that do not fit.
        """
        return call("index_mul_2d", _op, 1, (in1, in2, idx1))

    @staticmethod
    def forward(ctx, in1, in2, idx1):
        return IndexMul2d_.apply(in1, in2, idx1)


class IndexMul2dBackward_:
    """(gradient of in1, gradient of in2) of index_mul_2d, differentiable."""

    @staticmethod
    def apply(in1, in2, idx1, grad_out):
        return torch.ops.apex.index_mul_2d_backward(grad_out, in1, in2, idx1)

    @staticmethod
    def forward(ctx, in1, in2, idx1, grad_out):
        return IndexMul2dBackward_.apply(in1, in2, idx1, grad_out)


index_mul_2d = IndexMul2d_.apply
index_mul_2d_backward = IndexMul2dBackward_.apply
