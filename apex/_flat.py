"""Flat buffers: tensors that lie, each in a slot of its own, in one piece of memory.

Facts of the layout are those of the Ascend patch: slots begin at multiples of 16 elements and end in at least 32
elements of padding, in the order of the list; what lies between tensors is zero and stays zero.
"""

from __future__ import annotations

import torch

from apex import _lists
from apex._sharding import is_sharded

ALIGNMENT, PADDING = 16, 32  # elements
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def slot_size(tensor):
    """Elements that a tensor takes in a flat buffer: its own, rounded up to 16, and 32 more."""
    return -(-tensor.numel() // ALIGNMENT) * ALIGNMENT + PADDING


def check_tensors(tensors, what="tensor"):
    """Raises TypeError or RuntimeError if these cannot lie in one flat buffer; names the first that cannot."""
    seen = set()
    for i, t in enumerate(tensors):
        where = f"{what} {i}"
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{where} is {type(t).__name__}, not a tensor")
        if t.layout != torch.strided or is_sharded(t):
            kind = "sharded over ranks" if is_sharded(t) else f"sparse ({t.layout})"
            raise RuntimeError(f"{where} is {kind}: a flat buffer holds dense local tensors; leave it out")
        if t.dtype not in DTYPES:
            raise RuntimeError(f"{where} is {t.dtype}: a flat buffer holds float32, float16 or bfloat16")
        if t.dtype != tensors[0].dtype or t.device != tensors[0].device:
            raise RuntimeError(
                f"{where} is {t.dtype} on {t.device}, but {what} 0 is {tensors[0].dtype} on {tensors[0].device}: "
                "make one buffer a dtype and device"
            )
        if id(t) in seen:
            raise RuntimeError(f"{where} is in the list twice: a tensor has one slot")
        seen.add(id(t))


class Layout:
    """Where tensors lie in a flat buffer, in elements.

    Dense tensors keep their strides (channels_last, say); any other lies contiguously, and with `rows` so does one
    whose first dimension is not its outermost in memory.

    Attributes:
        shapes, strides, offsets, slots: one a tensor.
        total: length of the buffer.
    """

    def __init__(self, tensors, rows=False):
        self.shapes = [t.shape for t in tensors]
        self.strides = [_strides(t, rows) for t in tensors]
        self.slots = [slot_size(t) for t in tensors]
        self.offsets, self.total = [], 0
        for slot in self.slots:
            self.offsets.append(self.total)
            self.total += slot

    def zeros(self, dtype, device):
        """A new buffer; None if there are no tensors."""
        if not self.total:
            return None
        with torch.inference_mode(False):
            return torch.zeros(self.total, dtype=dtype, device=device)

    def view(self, flat, i):
        """The place of tensor i in a buffer."""
        return flat.as_strided(self.shapes[i], self.strides[i], flat.storage_offset() + self.offsets[i])

    def views(self, flat):
        return [self.view(flat, i) for i in range(len(self.shapes))]

    def part(self, first, last):
        """The layout of tensors [first, last) in the slice of a buffer that begins with the first one's slot."""
        part = Layout(())
        part.shapes, part.strides = self.shapes[first:last], self.strides[first:last]
        part.slots = self.slots[first:last]
        start = self.offsets[first] if first < last else 0
        part.offsets = [offset - start for offset in self.offsets[first:last]]
        part.total = sum(part.slots)
        return part

    def mask(self, dtype, device):
        """A buffer that is 1 where tensors lie and 0 between them."""
        mask = self.zeros(dtype, device)
        for view in self.views(mask) if mask is not None else ():
            view.fill_(1)
        return mask


def _strides(tensor, rows):
    # What torch gives a new tensor like this one: its own strides where it is dense, else contiguous ones.
    strides = torch.empty_like(tensor, device="meta").stride()
    outermost = tensor.dim() < 2 or tensor.shape[0] < 2 or strides[0] * tensor.shape[0] == tensor.numel()
    if rows and not outermost:
        return tensor.new_empty(tensor.shape, device="meta").stride()
    return strides


@torch._disable_dynamo
def alias(tensor, view):
    """Makes `tensor` lie where `view` does, without a copy."""
    tensor.data = view


def addresses(tensors):
    return [t.data_ptr() for t in tensors]


def gradient_norm(flats, norm_type=2.0):
    """The p-norm of all elements of flat gradients on one device: a float32 tensor of one element."""
    maximum = norm_type == float("inf")
    if norm_type != 2.0 and not maximum:
        norms = torch.stack([torch.linalg.vector_norm(flat.float(), norm_type) for flat in flats])
        return torch.linalg.vector_norm(norms, norm_type).reshape(1)
    norm = torch.empty(1, dtype=torch.float32, device=flats[0].device)
    _lists.call("multi_tensor_l2norm", [flats], norm, maximum=maximum)
    return norm
