"""apex_matmul_run from Python, and fake BLAS libraries to run it on."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int32, c_int64, c_void_p

import torch

from . import build
from .apex_library import CUDA, HIP, FakeDriver, Place

NONE, BIAS, RELU_BIAS, GELU_BIAS, BIAS_GRADIENT = range(5)
DEFAULT, LT, TORCH = range(3)
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
POINTERS = ("a", "b", "d", "bias", "aux", "workspace")
SIZES = ("m", "n", "k", "ld_a", "ld_b", "ld_d", "ld_aux", "workspace_bytes")
NUMBERS = ("transpose_a", "transpose_b", "type", "type_d", "epilogue", "accumulate", "tf32")


class Matmul(ctypes.Structure):
    """apex_matmul."""

    _fields_ = [
        *((name, c_void_p) for name in POINTERS),
        *((name, c_int64) for name in SIZES),
        *((name, c_int32) for name in NUMBERS),
    ]


class FakeLt(FakeDriver):
    """A fake BLAS library that this process has mapped, as torch maps the real one."""

    FILES = {CUDA: "libcublasLt.so.13", HIP: "libhipblaslt.so.1"}

    def __init__(self, platform, version=None):
        flags = ["-DFAKE_HIP"] if platform == HIP else [f"-DFAKE_VERSION={version}"] if version else []
        self.c = ctypes.CDLL(
            str(build.build_shared(self.FILES[platform], build.FAKES / "fake_lt.cpp", ["-O2", *flags]))
        )
        self.c.fake_log.restype = ctypes.c_char_p


def describe(a, b, d, *, transpose_a=False, transpose_b=False, epilogue=NONE, bias=None, aux=None, **others):
    """The Matmul of tensors a and b as they lie in memory, and d."""
    rows, depth = a.t().shape if transpose_a else a.shape
    matmul = Matmul(
        m=rows, n=d.shape[1], k=depth, ld_a=a.stride(0), ld_b=b.stride(0), ld_d=d.stride(0),
        transpose_a=transpose_a, transpose_b=transpose_b, type=TYPES[a.dtype], type_d=TYPES[d.dtype],
        epilogue=epilogue, **others,
    )  # fmt: skip
    for name, tensor in zip(POINTERS, (a, b, d, bias, aux), strict=False):
        if tensor is not None:
            setattr(matmul, name, tensor.data_ptr())
    matmul.ld_aux = 0 if aux is None else aux.stride(0)
    matmul.kept = (a, b, d, bias, aux)  # their memory lives as long as this
    return matmul


def run(apex, platform, matmul, device=0, stream=None) -> int:
    """apex_matmul_run's status."""
    return apex.c.apex_matmul_run(byref(Place(platform, device, stream)), byref(matmul))


def name(apex, platform) -> tuple[int, str]:
    """apex_blas_name: status and text."""
    text = ctypes.create_string_buffer(64)
    return apex.c.apex_blas_name(platform, text, ctypes.c_size_t(64)), text.value.decode()
