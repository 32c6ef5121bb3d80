"""Places, dtypes, statuses, addresses: what csrc/bindings/{place,status,functional,plain,scalars}.h do in C++."""

from __future__ import annotations

import ctypes
import operator

import torch

from apex import _plain
from apex._loader import library
from apex._portable import interface

# ---- where work runs -------------------------------------------------------------------------------------------

CPU, CUDA, HIP = 0, 1, 2  # enum apex_platform
GPU = HIP if torch.version.hip else CUDA
_place = interface.layout("apex_place").packer("platform", "device", "stream")
CPU_PLACE = _place(CPU, 0, 0)
# What Inductor and Triton call, 0.1 us; by public names it takes 2 to 3 us.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)


def place_of(tensor):
    """The apex_place of a tensor's device on torch's current stream; None where no variant of ours serves it."""
    if tensor.is_cpu:
        return CPU_PLACE
    return place_of_device(tensor.device) if tensor.is_cuda else None


def place_of_device(device):
    """As place_of, of a torch.device."""
    if device.type == "cpu":
        return CPU_PLACE
    if device.type != "cuda":
        return None
    return _place(GPU, device.index, _raw_stream(device.index))


# ---- dtypes ----------------------------------------------------------------------------------------------------

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
CODES = {F32: 0, F16: 1, BF16: 2, F64: 3}  # enum apex_dtype
_NAMES = {
    F32: "Float", F16: "Half", BF16: "BFloat16", F64: "Double", torch.int32: "Int", torch.int64: "Long",
    torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte", torch.bool: "Bool", torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip


def math_type(dtype):
    """What sums are made in, and the dtype of statistics."""
    return F64 if dtype is F64 else F32


def dtype_name(dtype):
    """As C++ prints it: errors of all bindings read alike."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.").capitalize()


def code_of(op, dtype):
    """The apex_dtype; raises TypeError for a dtype that no kernel takes."""
    code = CODES.get(dtype)
    if code is None:
        raise TypeError(f"{op} takes float32, float16, bfloat16 and float64, not {dtype_name(dtype)}")
    return code


# ---- statuses --------------------------------------------------------------------------------------------------

USE_REFERENCE = 1  # enum apex_status
# Likewise: a dtype, a size, an index; others are no fault of the caller's.
_ERRORS = {2: TypeError, 10: ValueError, 12: IndexError}


def must_use_reference(status, op):
    """Of a status that is not 0: True, or raises."""
    if status == USE_REFERENCE:
        return True
    library.raise_stored()  # the probe's own exception, if it refused to choose
    text = library.load().last_error()
    raise _ERRORS[status](text) if status in _ERRORS else RuntimeError(f"{op}: {text}")


# ---- bytes and values ------------------------------------------------------------------------------------------

_keys = torch._C._dispatch_keys
_FOREIGN = ~_plain._PLAIN_KEYS & (2**64 - 1)
_LAZY = _plain._KEYS_OF_VIEWS


def foreign_keys(tensor):
    """The dispatch keys that say that the tensor's bytes are not its values, or not here."""
    return _keys(tensor).raw_repr() & _FOREIGN


def is_lazy(tensor):
    """Whether it has memory of its own, whose bytes are not its values: negative, conjugate or zero."""
    keys = foreign_keys(tensor)
    return bool(keys) and not keys & ~_LAZY and _has_memory(tensor)


def is_plain(tensor):
    """What the compiled module's is_plain says."""
    return _plain.is_plain(tensor)


def has_plain_copy(tensor, written):
    """Whether a kernel can be given a copy in the tensor's place, which is copied back where it was written."""
    if foreign_keys(tensor) & ~_LAZY or tensor.device.type == "meta" or not torch._C._has_storage(tensor):
        return False
    return _has_memory(tensor) and not (written and tensor._is_zerotensor())


def _has_memory(tensor):
    """As the compiled bindings see it: a zero tensor has none, whatever its storage says."""
    return _plain.has_memory(tensor) and (tensor.data_ptr() != 0 or tensor.numel() == 0)


def refuse_unless_plain(tensor, name):
    """Raises TypeError or ValueError, which `name` begins, for a tensor that is not plain and real."""
    if not tensor.is_complex() and _plain.is_plain(tensor):
        return
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} is sparse ({_layout_name(tensor.layout)}): fused ops take dense tensors")
    if tensor.is_quantized:
        raise TypeError(f"{name} is quantized: fused ops take plain numbers")
    if tensor.is_complex():
        raise TypeError(f"{name} is {dtype_name(tensor.dtype)}: fused ops take real tensors")
    if tensor.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: it has no data")
    if foreign_keys(tensor) & ~_LAZY or not torch._C._has_storage(tensor):
        raise TypeError(
            f"{name} is a wrapper whose data is elsewhere ({_kind(tensor)}); pass its local tensor"
        )
    if not _has_memory(tensor):
        raise ValueError(
            f"{name} has no memory: it was freed, or not allocated yet (FSDP frees that of parameters after each use)"
        )
    kind = "negative" if tensor.is_neg() else "conjugate" if tensor.is_conj() else "zero"
    remedy = {"negative": "torch.resolve_neg", "conjugate": "torch.resolve_conj", "zero": "torch.clone"}[kind]
    raise TypeError(f"{name} is a lazy view whose bytes are not its values ({kind}); pass {remedy} of it")


def _layout_name(layout):
    words = str(layout).removeprefix("torch.").split("_")
    return "".join(word.capitalize() for word in words)


def _kind(tensor):
    return type(tensor).__name__


def refuse_shared(ranges, describe, op=""):
    """Raises ValueError where two outputs share memory: which value stays in it would be left to chance.

    ranges: (begin, end, list, index) of each; one range may be that of several lists at one index. describe(list,
    index): an output's name. op: what the error begins with.
    """
    ranges = sorted(ranges, key=operator.itemgetter(0))
    for (a, a_end, k, i), (b, b_end, of_k, of_i) in zip(ranges, ranges[1:], strict=False):
        if a_end > b and not (a == b and a_end == b_end and i == of_i):
            raise ValueError(
                f"{op}{describe(k, i)} and {describe(of_k, of_i)} share memory: both are written"
            )


def refuse_overlap(tensor, name):
    """Raises ValueError for a tensor of which several elements share memory."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(
            f"{name} overlaps itself (sizes {list(tensor.shape)}, strides {list(tensor.stride())}): it cannot be "
            "written; pass a contiguous tensor"
        )


def address(tensor):
    """Where the tensor's values begin; 0 for None and without elements."""
    return 0 if tensor is None else tensor.data_ptr()


def contiguous(tensor):
    """The tensor, or None, as kernels read it."""
    return None if tensor is None else tensor.contiguous()


def bump_version(tensor):
    """Counts a write that autograd does not see."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def scalar(tensor, name, dtype, device, written=False):
    """The address of the one element of a tensor that stands for a scalar, or 0 for None. Raises unless it is plain,
    and has that dtype on that device."""
    if tensor is None:
        return 0
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} must be a {dtype_name(dtype)} tensor, not {dtype_name(tensor.dtype)}")
    if tensor.numel() != 1:
        raise ValueError(f"{name} must hold one element, not {tensor.numel()}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but the tensors are on {device}")
    if not _plain.is_plain(tensor):
        refuse_unless_plain(tensor, name)
    if written:
        bump_version(tensor)
    return tensor.data_ptr()


# ---- memory of libapex's own -----------------------------------------------------------------------------------

_is_capturing = interface.function("apex_is_capturing")
_take, _give_back = interface.function("apex_take_memory"), interface.function("apex_give_memory_back")


def is_capturing(place, op):
    """1 while the place's stream records a graph, else 0."""
    answer = _is_capturing(place)
    if answer < 0:
        must_use_reference(-answer, op)
    return answer


class StreamMemory:
    """Memory of one stream that outlives a call: libapex's own, never torch's allocator's, whose memory belongs to a
    graph while one is warmed up or captured. `address` is None where there is none: in a capture, on a full device."""

    def __init__(self, place, size, zeroed, op):
        found = ctypes.c_void_p()
        status = _take(place, size, zeroed, ctypes.byref(found))
        if status:
            must_use_reference(status, op)
        self.place, self.size, self.address = place, size, found.value

    def __del__(self):
        if getattr(self, "address", None):
            _give_back(self.place, self.size, self.address)
