"""When a tensor's bytes are its values: asked before memory is handed to a kernel, a collective or a flat buffer.

torch's own ops find out by their dispatcher. What goes past it must ask: a negative or conjugate view holds the values
before the sign was turned, a zero tensor holds nothing, a wrapper (DTensor, FakeTensor, functional, batched) has its
data elsewhere, a freed storage none at all. The compiled bindings ask the same in csrc/bindings/plain.h.

A copy-on-write tensor is plain to read. To write it, take its address by `data_ptr()`, as torch's collectives do, or
write it by torch's ops: both give it memory of its own first.
"""

from __future__ import annotations

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


def _other_keys(tensor):
    return torch._C._dispatch_keys(tensor).raw_repr() & ~_PLAIN_KEYS


def has_memory(tensor):
    """Whether the storage of a strided tensor holds all its elements; FSDP, for one, frees that of parameters."""
    if tensor.numel() == 0:
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= end


def is_plain(tensor):
    """Whether the tensor's memory may be read as its values, at the places that its sizes and strides say."""
    return not _other_keys(tensor) and tensor.device.type != "meta" and has_memory(tensor)


def plain(tensor, what="tensor"):
    """The tensor itself where it is plain, else a plain copy of it: negative, conjugate and zero tensors are resolved.

    Who writes into the result looks whether it is `tensor` itself: a copy is to be put in its place, or back into it.

    what: names the tensor in errors.
    Raises TypeError for wrappers (DTensor, FakeTensor, ...), sparse and quantized tensors, ValueError for tensors on
    the meta device and for those whose storage was freed.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else f"sparse ({tensor.layout})"
        raise TypeError(f"{what} is {kind}: a dense tensor is required")
    if tensor.device.type == "meta":
        raise ValueError(f"{what} is on the meta device: it has no data")
    others = _other_keys(tensor)
    if others & ~_KEYS_OF_VIEWS:
        raise TypeError(
            f"{what} is a wrapper whose data is elsewhere ({type(tensor).__name__}); pass its local tensor"
        )
    if not has_memory(tensor):
        raise ValueError(f"{what} has no memory: its storage was freed")
    if not others:
        return tensor
    with torch.no_grad():
        return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg().resolve_conj()


def writable_gradient(owner):
    """owner.grad; a plain copy is put in its place where ops on lists of tensors cannot write it: negative views, zero
    tensors. That goes for torch's own, and for ours where no binding resolves them."""
    grad = owner.grad
    if grad is not None and (grad.is_neg() or grad._is_zerotensor()):
        grad = owner.grad = plain(grad, "gradient")
    return grad
