"""torch.Tensor: operators, and each method that bears the name of a function in torch_overrides."""

import torch

from apex.amp.lists import torch_overrides

MODULE = torch.Tensor


def _with_methods(kind, own=()):
    return [*own, *(name for name in getattr(torch_overrides, kind) if hasattr(MODULE, name))]


FP16_FUNCS = _with_methods("FP16_FUNCS", ["__matmul__"])

BFLOAT16_FUNCS = _with_methods("BFLOAT16_FUNCS", ["__matmul__"])

FP32_FUNCS = _with_methods(
    "FP32_FUNCS",
    [
        "__ipow__",
        "__pow__",
        "__rpow__",
        "cpu",  # what leaves the accelerator is float32
    ],
)

CASTS = _with_methods(
    "CASTS",
    [
        "__add__",
        "__eq__",
        "__ge__",
        "__gt__",
        "__iadd__",
        "__imul__",
        "__isub__",
        "__itruediv__",
        "__le__",
        "__lt__",
        "__mul__",
        "__ne__",
        "__radd__",
        "__rmul__",
        "__rsub__",
        "__rtruediv__",
        "__sub__",
        "__truediv__",
    ],
)

SEQUENCE_CASTS = _with_methods("SEQUENCE_CASTS")
