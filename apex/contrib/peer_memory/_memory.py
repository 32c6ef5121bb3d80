"""Memory that processes of one machine share: a device's by the IPC of its driver, the CPU's by a file without a name.

Memory is known by its address, `raw`. Other processes open it by a handle of 64 bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import struct
from dataclasses import dataclass

import torch

from apex._loader import library
from apex._loader.errors import ArgumentError, PeerMemoryError

HANDLE_BYTES = 64
INSTEAD = (
    "use HaloExchangerSendRecv or HaloExchangerAllGather of apex.contrib.bottleneck, which share no memory"
)
_FILE = struct.Struct("=qqq16s")  # of a CPU's handle: process, file, bytes, and what the file must be called


@dataclass
class _Region:
    """Memory of this process, or of another one (is_peer). map: of a CPU's."""

    device: torch.device
    size: int
    is_peer: bool = False
    map: mmap.mmap | None = None
    file: int = -1
    token: bytes = b""


_regions: dict[int, _Region] = {}  # by address


def _call(name, device, *arguments):
    """A function of the library for the device; raises what its status says."""
    from apex._portable import interface, tensors

    status = interface.function(name)(tensors.place_of_device(device), *arguments)
    if status:
        library.load().check(status)


def current_device():
    """The current GPU, or the CPU where torch has none."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _region(raw):
    for begin, region in _regions.items():
        if begin <= raw < begin + region.size:
            return begin, region
    raise ArgumentError(f"no memory that was allocated or opened here holds the address {raw:#x}")


def _known(raw):
    """The region that begins there. Raises ArgumentError."""
    if raw not in _regions:
        raise ArgumentError(f"no memory that was allocated or opened here begins at the address {raw:#x}")
    return _regions[raw]


# ---- the CPU's -------------------------------------------------------------------------------------------------------


def _mapped(file, size):
    """(address, map) of a file's bytes."""
    found = mmap.mmap(file, size)
    return ctypes.addressof(ctypes.c_char.from_buffer(found)), found


def _allocate_on_cpu(size):
    token = secrets.token_hex(8).encode()
    file = os.memfd_create(f"apex-{token.decode()}")
    try:
        os.ftruncate(file, size)
        raw, found = _mapped(file, size)
    except BaseException:
        os.close(file)
        raise
    return raw, _Region(torch.device("cpu"), size, False, found, file, token)


def _open_on_cpu(handle):
    process, file, size, token = _FILE.unpack_from(handle)
    path = f"/proc/{process}/fd/{file}"
    try:
        if not os.readlink(path).startswith(f"/memfd:apex-{token.decode()}"):
            raise OSError("it is another file: the processes do not see each other's numbers")
        with open(path, "r+b") as opened:
            raw, found = _mapped(opened.fileno(), size)
    except OSError as error:
        raise PeerMemoryError(
            f"memory of process {process} cannot be opened: {error}", found=path, remedy=INSTEAD
        ) from error
    return raw, _Region(torch.device("cpu"), size, True, found)


# ---- every device's --------------------------------------------------------------------------------------------------


def allocate(device, size):
    """The address of `size` zeroed bytes. Raises PeerMemoryError where there are none left."""
    if device.type == "cpu":
        raw, region = _allocate_on_cpu(max(size, 1))
    else:
        found = ctypes.c_void_p()
        _call("apex_peer_allocate", device, size, ctypes.byref(found))
        if not found.value:
            raise PeerMemoryError(
                f"{device} has no {size} bytes left to share", remedy="make the pool smaller"
            )
        raw, region = found.value, _Region(device, size)
    _regions[raw] = region
    return raw


def free(raw):
    """Frees what `allocate` made, or closes what `opened` did. Tensors of a CPU's memory keep it until they end."""
    region = _known(raw)
    if region.device.type == "cpu":
        if region.file >= 0:
            os.close(region.file)
    else:
        torch.cuda.synchronize(region.device)
        _call("apex_peer_close" if region.is_peer else "apex_peer_free", region.device, raw)
    del _regions[raw]


def zero(raw, size):
    """Zeroes bytes, in their turn on the current stream."""
    begin, region = _region(raw)
    if raw + size > begin + region.size:
        raise ArgumentError(
            f"{size} bytes at {raw:#x} reach beyond the {region.size} that begin at {begin:#x}"
        )
    if region.device.type == "cpu":
        ctypes.memset(raw, 0, size)
    else:
        _call("apex_peer_zero", region.device, raw, size)


def handle(raw):
    """The handle of what `allocate` made, 64 bytes. Raises PeerMemoryError where the driver does not share memory."""
    region = _known(raw)
    if region.device.type == "cpu":
        return _FILE.pack(os.getpid(), region.file, region.size, region.token).ljust(HANDLE_BYTES, b"\0")
    made = ctypes.create_string_buffer(HANDLE_BYTES)
    _shared("apex_peer_handle", region.device, raw, made)
    return made.raw


def opened(device, size, handle):
    """The address here of another process's memory. Raises PeerMemoryError where it cannot be reached."""
    if device.type == "cpu":
        raw, region = _open_on_cpu(handle)
    else:
        found = ctypes.c_void_p()
        _shared("apex_peer_open", device, handle, ctypes.byref(found))
        raw, region = found.value, _Region(device, size, True)
    _regions[raw] = region
    return raw


def _shared(name, device, *arguments):
    try:
        _call(name, device, *arguments)
    except Exception as error:
        what = getattr(error, "what", str(error))
        raise PeerMemoryError(
            f"memory cannot be shared between processes on {device}: {what}",
            found="GPUs without access to each other, a virtual machine, or containers that do not share IPC",
            remedy=INSTEAD,
        ) from error


def view(raw, shape, dtype, channels_last):
    """The tensor there, contiguous or in torch.channels_last. Memory of a device must outlive it."""
    begin, region = _region(raw)
    meta = torch.empty(shape, dtype=dtype, device="meta")
    if channels_last:
        if len(shape) != 4:
            raise ArgumentError(f"channels_last takes 4 dimensions, not {len(shape)}")
        meta = meta.to(memory_format=torch.channels_last)
    size = meta.numel() * meta.element_size()
    if not size:
        return torch.empty_like(meta, device=region.device)
    if raw + size > begin + region.size:
        raise ArgumentError(
            f"a tensor of {size} bytes at {raw:#x} reaches beyond the {region.size} at {begin:#x}"
        )
    if region.map is not None:
        flat = torch.frombuffer(region.map, dtype=torch.uint8, count=size, offset=raw - begin)
        return flat.view(dtype).as_strided(meta.shape, meta.stride())
    storage = torch._C._construct_storage_from_data_pointer(raw, region.device, size)
    return torch.empty(0, dtype=dtype, device=region.device).set_(storage, 0, meta.shape, meta.stride())
