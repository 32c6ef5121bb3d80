"""Tensor lists that hurt, and how far a result may be from float64: what the multi-tensor tests share."""

from __future__ import annotations

import math

import pytest
import torch

from apex._loader import bindings
from apex.reference.fp8 import FORMATS

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
FP8 = tuple(FORMATS)
# Nothing, one, less than a vector, odd, one chunk of the CPU's plans to the brim, several chunks.
SHAPES = ((0,), (1,), (7,), (2, 0, 3), (33, 5), (1031,), (16384,), (3, 11001))
FEW = ((0,), (1,), (7,), (33, 5), (2050,))
MANY = 301  # public kernels take 110 tensors a launch
# Half a unit in the last place, relative: what one rounding to the dtype costs.
ROUNDING = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8, F64: 2.0**-53}
# Half a unit of the smallest values, which have no relative precision.
SMALLEST = {F32: 2.0**-150, F16: 2.0**-25, BF16: 2.0**-134, F64: 0.0}


def random(dtype, device, shapes=SHAPES, scale=1.0, seed=1):
    """One tensor of normal values a shape; the same for the same seed on every device and in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = [scale * torch.randn(shape, generator=generator, dtype=F64, device="cpu") for shape in shapes]
    return [value.to(dtype).to(device) for value in values]


def entrances(op):
    """(the op called through the dispatcher, a fixture that is this and the direct entry by turns).

    Both take (tensors, **options), every list of the op in its place.
    """

    def dispatcher(tensors, **options):
        getattr(torch.ops.apex, op)(*tensors, **options)

    def direct(tensors, **options):
        module = bindings.load().module
        if module is None:
            pytest.skip(f"no bindings: {bindings.load().reason}")
        getattr(module, op)(tensors, **options)

    @pytest.fixture(name=op, params=[dispatcher, direct], ids=lambda f: f.__name__)
    def entrance(request):
        bindings.load()
        return request.param

    return dispatcher, entrance


def empties(like, dtype=None, fill=7.0):
    """Tensors laid out like these that hold what no op writes."""
    return [torch.full_like(tensor, fill, dtype=dtype or tensor.dtype) for tensor in like]


def misaligned(tensors):
    """The same values in views that begin one element after an allocation: vectors of 16 bytes do not fit."""
    found = []
    for tensor in tensors:
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        found.append(memory[1:].view(tensor.shape).copy_(tensor))
    return found


def channels_last(dtype, device, seed=2):
    """Dense tensors whose memory order is not their index order."""
    images = random(dtype, device, ((2, 3, 5, 7), (1, 16, 33, 31)), seed=seed)
    matrices = random(dtype, device, ((40, 30),), seed=seed + 1)
    return [*(x.to(memory_format=torch.channels_last) for x in images), *(x.t() for x in matrices)]


def clones(tensors):
    """Copies with the same strides."""
    return [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]


def exact(tensors):
    """Copies in float64 on the CPU, as the oracle takes them."""
    return [tensor.detach().to(device="cpu", dtype=F64, copy=True) for tensor in tensors]


def math_dtype(*dtypes):
    """The arithmetic that the kernels use for these element types."""
    return F64 if F64 in dtypes else F32


def assert_near(found, expected, units=1.0, arithmetic=3.0, dtypes=(), smallest=0.0):
    """Every element of every tensor within a number of roundings of float64.

    found: tensors. expected: their values in float64. units: roundings to the tensor's own dtype, each at
    most half a unit in the last place. arithmetic: roundings of the arithmetic (dtypes: what else took part
    in it). smallest: an absolute error that is allowed beside these.
    """
    assert len(found) == len(expected)
    for index, (tensor, value) in enumerate(zip(found, expected, strict=True)):
        own = ROUNDING[tensor.dtype]
        working = ROUNDING[math_dtype(tensor.dtype, *dtypes)]
        relative = units * own * (1 + own) + arithmetic * working
        absolute = units * SMALLEST[tensor.dtype] + smallest
        torch.testing.assert_close(
            exact([tensor])[0],
            value,
            rtol=relative,
            atol=absolute,
            equal_nan=True,
            msg=lambda text, index=index, tensor=tensor: (
                f"tensor {index}, {tuple(tensor.shape)} {tensor.dtype}: {text}"
            ),
        )


def assert_same_bits(found, expected):
    """Bit for bit, nan included."""
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        same = torch.equal(_bits(a), _bits(b))
        assert same, f"tensor {index} differs: {a} and {b}"


def _bits(tensor):
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()])


def norm(values):
    """The L2 norm of all elements of float64 tensors."""
    return math.sqrt(math.fsum(float((value * value).sum()) for value in values))


def scalar(value, device, dtype=F32):
    """A tensor of one element."""
    return torch.tensor([value], dtype=dtype, device=device)


def flag(device, value=0):
    """A noop flag."""
    return scalar(value, device, torch.int32)


def comparable(tensor):
    """FP8 as float32, with which torch computes; other tensors as they are."""
    return tensor.to(F32) if tensor.dtype in FP8 else tensor
