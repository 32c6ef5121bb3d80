"""in1[idx1] * in2 in one kernel, twice differentiable."""

from apex.contrib.index_mul_2d.index_mul_2d import index_mul_2d

__all__ = ["index_mul_2d"]
