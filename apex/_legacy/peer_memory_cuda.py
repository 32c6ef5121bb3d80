"""The functions of public apex's peer_memory_cuda: memory that processes of one machine share, by its address.

It is the current GPU's, or the CPU's where torch has no GPU. apex.contrib.peer_memory.PeerMemoryPool does all of this,
and says on every rank what fails. Memory of a device must outlive the tensors that show it.
"""

from __future__ import annotations

import torch

from apex._loader.errors import ArgumentError
from apex.contrib.peer_memory import _memory, _push_pull

__all__ = [
    "allocate_raw",
    "blob_view_float",
    "blob_view_half",
    "blob_view_int",
    "free_raw",
    "get_raw_ipc_address",
    "get_raw_peers",
    "push_pull_halos_1d",
    "zero",
]
_faults: dict[torch.device, _push_pull.Faults] = {}


def allocate_raw(size):
    """The address of `size` zeroed bytes. Raises PeerMemoryError where there are none left."""
    return _memory.allocate(_memory.current_device(), size)


def free_raw(raw):
    """Frees them, when what is queued on the device is done."""
    _memory.free(raw)


def zero(raw, size):
    """Zeroes `size` bytes there."""
    _memory.zero(raw, size)


def get_raw_ipc_address(raw):
    """The handle by which other processes open memory: uint8 [64], on the CPU. Raises PeerMemoryError."""
    return torch.frombuffer(bytearray(_memory.handle(raw)), dtype=torch.uint8)


def get_raw_peers(ipc_addresses, peer_rank, raw):
    """The addresses here of the memory with these handles, uint8 [ranks, 64]; of this rank, `peer_rank`, it is `raw`.

    Raises PeerMemoryError where one cannot be reached.
    """
    region = _memory._known(raw)
    return [
        raw if rank == peer_rank else _memory.opened(region.device, region.size, bytes(handle))
        for rank, handle in enumerate(ipc_addresses.tolist())
    ]


def blob_view_half(raw, shape, channels_last):
    """The float16 tensor of that shape there, contiguous or in torch.channels_last."""
    return _memory.view(raw, shape, torch.float16, channels_last)


def blob_view_float(raw, shape, channels_last):
    """As blob_view_half, float32."""
    return _memory.view(raw, shape, torch.float32, channels_last)


def blob_view_int(raw, shape, channels_last):
    """As blob_view_half, int32."""
    return _memory.view(raw, shape, torch.int32, channels_last)


@torch.no_grad()
def push_pull_halos_1d(diagnostics, explicit_nhwc, numSM, *arguments):
    """Exchanges halos with both neighbours through transfer buffers, which are zero before their first use and used for
    this alone. Both ends of a buffer have the same size.

    arguments: of NVIDIA's apex (rank, top, bottom), of ROCm's (top, bottom, three tensors of signals, which are not
    needed). top and bottom are five each: whether there is no neighbour and zeros come, the halo to send, this rank's
    transfer buffer, the neighbour's, the halo to receive.

    Raises TypeError, ValueError, and PeerMemoryError: see apex/contrib/peer_memory/_push_pull.py.
    """
    if len(arguments) not in (11, 13):
        raise TypeError(
            "push_pull_halos_1d takes 14 arguments as NVIDIA's apex has them, or 16 as ROCm's, not "
            f"{3 + len(arguments)}"
        )
    top, bottom = (
        (arguments[1:6], arguments[6:]) if len(arguments) == 11 else (arguments[:5], arguments[5:10])
    )
    sizes = set()
    for none, _, inbox, outbox, _ in (top, bottom):
        if not none:
            sizes |= {t.numel() * t.element_size() for t in (inbox, outbox)}
            if not (inbox.is_contiguous() and outbox.is_contiguous()):
                raise ArgumentError("push_pull_halos_1d: transfer buffers must be contiguous")
    if len(sizes) > 1:
        raise ArgumentError(
            f"push_pull_halos_1d: transfer buffers must have one size, not {sorted(sizes)} bytes"
        )
    sides = [
        _push_pull.Side(
            send, receive, 0 if none else inbox.data_ptr(), 0 if none else outbox.data_ptr(), bool(none)
        )
        for none, send, inbox, outbox, receive in (top, bottom)
    ]
    device = top[1].device
    if device not in _faults:
        _faults[device] = _push_pull.Faults(device)
    if diagnostics:
        print(f"push_pull_halos_1d: {list(top[1].shape)}, {top[1].dtype}, boxes of {sizes} bytes")
    _push_pull.push_pull(
        "push_pull_halos_1d", explicit_nhwc, numSM, sides, max(sizes, default=48), _faults[device]
    )
