"""Tensors that one launch takes: sizes, chunks, and how their addresses are read at each use."""

from __future__ import annotations

import ctypes
import operator

import torch

from apex._portable import fast, interface, tensors

_GPU_CHUNK, _CPU_CHUNK = 8192, 16384  # elements, as the compiled bindings have them
_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_data_ptr, _numel = torch.Tensor.data_ptr, torch.Tensor.numel
_is_contiguous, _is_neg, _get_device = (
    torch.Tensor.is_contiguous,
    torch.Tensor.is_neg,
    torch.Tensor.get_device,
)
_dtype = operator.attrgetter("dtype")
_words = interface.function("apex_tensor_table_words")
_lists = interface.layout("apex_tensor_lists").packer(
    "image",
    "table",
    "scratch",
    "lists",
    "tensors",
    "chunk_size",
    "chunks",
    "tensors_with_chunks",
    "dtypes",
    "check_only",
    "variant",
)


class Bucket:
    """Tensors of one device and one combination of dtypes: one launch."""

    def __init__(self, device, kinds):
        self.device, self.kinds = device, kinds
        self.members, self.numels, self.strides = [], [], []
        self.first = self.last = False
        self.tables, self.scratches = {}, {}  # by place

    def lay_out(self):
        """Sizes and chunks; addresses come with each use."""
        lists, n = len(self.kinds), len(self.members)
        cpu = self.device.type == "cpu"
        self.chunk_size = _CPU_CHUNK if cpu else _GPU_CHUNK
        self.index = {-1 if cpu else self.device.index}
        self.image = (ctypes.c_uint64 * _words(lists, n))()
        self.image[lists * n : (lists + 1) * n] = self.numels
        first_chunk = (ctypes.c_uint32 * (n + 1)).from_buffer(self.image, (lists + 1) * n * 8)
        chunks = 0
        for i, numel in enumerate(self.numels):
            first_chunk[i] = min(chunks, 2**32 - 1)
            chunks += -(-numel // self.chunk_size)
        if chunks >= 2**32:
            raise ValueError(f"multi-tensor list of more than {self.chunk_size} * 2^32 elements")
        first_chunk[n] = self.chunks = chunks
        self.with_chunks = sum(numel > 0 for numel in self.numels)
        self.codes = (ctypes.c_int32 * lists)(*map(tensors.CODES.get, self.kinds))
        self.contiguous = not any(self.strides)
        self.words = None
        if fast.module is not None and self.device.type in ("cpu", "cuda"):
            self.words = (ctypes.c_uint64 * n)()
            self.words_at = ctypes.addressof(self.words)
            self.dlpack = (1, 0) if cpu else (10 if torch.version.hip else 2, self.device.index)
        self.addresses = [[0] * n for _ in range(lists)]

    def lists(self, table=0, scratch=0, check_only=0, variant=0):
        """The apex_tensor_lists of a launch, as bytes. variant: an apex_variant, or 0: it is looked up."""
        return _lists(
            ctypes.addressof(self.image), table, scratch, len(self.kinds), len(self.members), self.chunk_size,
            self.chunks, self.with_chunks, ctypes.addressof(self.codes), check_only, variant,
        )  # fmt: skip

    def fast_addresses(self, k, column):
        """As quick_addresses, by the module in C, which reads an address in 90 ns."""
        if not self.contiguous:
            return None
        n, base = len(self.members), ctypes.addressof(self.image)
        numels, row = base + len(self.kinds) * n * 8, base + k * n * 8
        differ = fast.module.addresses(
            column, k == 0, self.codes[k], *self.dlpack, numels, row, self.words_at
        )
        if differ is None:
            return None
        return list(self.words) if differ else self.addresses[k]

    def quick_addresses(self, k, column):
        """The addresses of list k's tensors, where none of them needs a closer look; else None."""
        present = [t for t in column if t is not None]
        numels = self.numels
        if len(present) != len(column):
            if k:
                return None
            numels = [n for t, n in zip(column, numels, strict=True) if t is not None]
        if not present:
            return [0] * len(column)
        if not (
            self.contiguous
            and _TYPES.issuperset(map(type, present))
            and {self.kinds[k]}.issuperset(map(_dtype, present))
            and list(map(_numel, present)) == numels
            and self.index.issuperset(map(_get_device, present))
            and all(map(_is_contiguous, present))
            and not any(map(_is_neg, present))
        ):
            return None
        addresses = list(map(_data_ptr, present))
        if 0 in addresses:
            return None
        if len(present) != len(column):
            found = iter(addresses)
            addresses = [0 if t is None else next(found) for t in column]
        return addresses

    def store(self, k, addresses):
        """Puts the addresses of list k into the image; whether any is another than before."""
        if addresses == self.addresses[k]:
            return False
        n = len(self.members)
        self.image[k * n : (k + 1) * n] = addresses
        self.addresses[k] = addresses
        return True
