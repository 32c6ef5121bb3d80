"""When a tensor's bytes are its values: asked before memory is handed to a kernel, a collective or a flat buffer.

torch's own ops find out by their dispatcher. What goes past it must ask: a negative or conjugate view holds the values
before the sign was turned, a zero tensor holds nothing, a wrapper (DTensor, FakeTensor, functional, batched) has its
data elsewhere, a freed storage none at all. The compiled bindings ask the same in csrc/bindings/plain.h.

A copy-on-write tensor is plain to read. To write it, take its address by `data_ptr()`, as torch's collectives do, or
write it by torch's ops: both give it memory of its own first.
"""

from __future__ import annotations

import itertools
import operator

import torch

_BACKENDS = ("CPU", "CUDA", "HIP", "XLA", "MPS", "XPU", "HPU", "MTIA", "MAIA", "PrivateUse1")


def _mask(*names):
    keys = (getattr(torch._C.DispatchKey, name, None) for name in names)
    mask = 0
    for key in keys:
        mask |= 0 if key is None else torch._C.DispatchKeySet(key).raw_repr()
    return mask


# What the keys of a plain tensor are made of; autograd's and autocast's change nothing in memory.
_PLAIN_KEYS = _mask(
    "ADInplaceOrView",
    "AutogradOther",
    *(prefix + backend for prefix in ("", "Autograd", "Autocast") for backend in _BACKENDS),
)
_KEYS_OF_VIEWS = _mask("Negative", "Conjugate", "ZeroTensor")
_KEYS_OF_LAYOUTS = _mask("Sparse", "SparseCsr", "Quantized", *(f"Sparse{b}" for b in _BACKENDS))


def _other_keys(tensor):
    return torch._C._dispatch_keys(tensor).raw_repr() & ~_PLAIN_KEYS


def has_memory(tensor):
    """Whether the storage of a strided tensor holds all its elements; FSDP, for one, frees that of parameters."""
    if tensor.numel() == 0:
        return True
    if tensor.is_contiguous():
        return tensor.untyped_storage().nbytes() >= (
            (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        )
    return tensor.untyped_storage().nbytes() >= range_of(tensor)[1]


def range_of(tensor):
    """The bytes of its storage that a tensor lies in, from the first to behind the last; it has an element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.element_size()
    return begin, begin + (last + 1) * tensor.element_size()


def share_memory(one, other):
    """Whether two tensors lie in one storage, in ranges that meet."""
    if not (one.numel() and other.numel() and torch._C._has_storage(one) and torch._C._has_storage(other)):
        return False
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    (begin, end), (start, stop) = range_of(one), range_of(other)
    return begin < stop and start < end


def contiguous(tensor, memory_format=torch.contiguous_format):
    """tensor.contiguous(), which ends the process where a tensor's memory was freed: ValueError instead."""
    if not torch.compiler.is_compiling():
        _refuse_freed(tensor, "a tensor")
    return tensor.contiguous(memory_format=memory_format)


def is_shape_alone(tensor):
    """Whether the tensor is a meta or fake one, as memory estimators use them: a shape and a dtype without values."""
    return tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor)


def is_plain(tensor):
    """Whether the tensor's memory may be read as its values, at the places that its sizes and strides say."""
    if _other_keys(tensor) or tensor.device.type == "meta" or not torch._C._has_storage(tensor):
        return False
    return has_memory(tensor)


def _refuse_layouts_and_freed(tensor, what):
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else f"sparse ({tensor.layout})"
        raise TypeError(f"{what} is {kind}: a dense tensor is required")
    _refuse_freed(tensor, what)


def _refuse_freed(tensor, what):
    if torch._C._has_storage(tensor) and not has_memory(tensor):
        raise ValueError(
            f"{what} has no memory: it was freed, or not allocated yet (FSDP frees that of parameters after each "
            "use)"
        )


def check_argument(tensor, what, written=False):
    """For ops made of torch's own, which would take or crash on what no op of apex means. Wrappers and meta pass.

    what: names the tensor in errors. written: whether the op writes it.
    Raises TypeError for sparse, quantized and complex tensors, ValueError for those whose storage was freed, and for
    written ones of which several elements share memory.
    """
    if _other_keys(tensor) & ~(_KEYS_OF_VIEWS | _KEYS_OF_LAYOUTS) or tensor.device.type == "meta":
        return
    _refuse_layouts_and_freed(tensor, what)
    if tensor.is_complex():
        raise TypeError(f"{what} is {tensor.dtype}: a real tensor is required")
    if written and torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(
            f"{what} overlaps itself (sizes {list(tensor.shape)}, strides {list(tensor.stride())}): it cannot be "
            "written; pass a contiguous tensor"
        )


def check(tensor, what="tensor"):
    """Raises unless the tensor's values lie in its own memory, as they are or as torch's lazy views of them.

    what: names the tensor in errors.
    Raises TypeError for wrappers (DTensor, FakeTensor, ...), sparse and quantized tensors, ValueError for tensors on
    the meta device and for those whose storage was freed.
    """
    if tensor.device.type == "meta":
        raise ValueError(f"{what} is on the meta device: it has no data")
    elsewhere = _other_keys(tensor) & ~(_KEYS_OF_VIEWS | _KEYS_OF_LAYOUTS) or not torch._C._has_storage(
        tensor
    )
    if elsewhere and tensor.layout == torch.strided:
        raise TypeError(
            f"{what} is a wrapper whose data is elsewhere ({type(tensor).__name__}); pass its local tensor"
        )
    _refuse_layouts_and_freed(tensor, what)


def plain(tensor, what="tensor"):
    """The tensor itself where it is plain, else a plain copy of it: negative, conjugate and zero tensors are resolved.

    Who writes into the result looks whether it is `tensor` itself: a copy is to be put in its place, or back into it.
    Raises what `check` does.
    """
    check(tensor, what)
    if not _other_keys(tensor):
        return tensor
    with torch.no_grad():
        return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg().resolve_conj()


def layouts_differ(lists):
    """Whether a tensor of a list lies in memory otherwise than the first list's of the same place, as an optimizer's
    state beside its parameter. Lists may hold None."""
    try:
        if all(map(torch.Tensor.is_contiguous, itertools.chain.from_iterable(lists))):
            return False
    except TypeError:  # of None
        pass
    for first, *others in zip(*lists, strict=True):
        for other in others:
            if other is None or (first.is_contiguous() and other.is_contiguous()):
                continue
            if other.numel() > 1 and other.stride() != first.stride():
                return True
    return False


class Dtypes:
    """Notices that parameters have other dtypes than they had, as after model.double().

    owners: the tensors whose .grad are the gradients. lists: an optimizer's; of these the first, of parameters or their
    masters, is looked at.
    """

    def __init__(self, owners, lists):
        firsts = [t for t, owner in zip(lists[0], owners, strict=True) if t is not owner] if lists else []
        self._tensors = [*owners, *firsts]
        self._known = list(map(_dtype, self._tensors))

    def changed(self):
        return self._known != list(map(_dtype, self._tensors))


_dtype = operator.attrgetter("dtype")


def writable_gradient(owner):
    """owner.grad; a plain copy is put in its place where ops on lists of tensors cannot write it: negative views, zero
    tensors. That goes for torch's own, and for ours where no binding resolves them."""
    grad = owner.grad
    if grad is not None and (grad.is_neg() or grad._is_zerotensor()):
        grad = owner.grad = plain(grad, "gradient")
    return grad
