"""The exchange of halos through shared memory, csrc/host/push_pull_halos.h, from tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from apex._loader import library
from apex._loader.errors import ArgumentError, ArgumentTypeError, PeerMemoryError
from apex.contrib.peer_memory import _memory

TIMEOUT = 600.0  # seconds, as NCCL's


@dataclass
class Side:
    """One neighbour: what goes there, what comes from there, and the addresses of the two inboxes, both of one size.
    zero: there is none, and zeros come."""

    send: torch.Tensor
    receive: torch.Tensor
    inbox: int
    outbox: int
    zero: bool


class Faults:
    """Where kernels say that a neighbour did not answer: memory of the host that they reach, too."""

    def __init__(self, device):
        self.words = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")

    def check(self, what, timeout):
        """Raises PeerMemoryError if one did not. Does not wait for what is queued."""
        silent = [
            name
            for name, word in zip(("left (top)", "right (bottom)"), self.words.tolist(), strict=True)
            if word
        ]
        if silent:
            self.words.zero_()  # told; whoever uses the same inboxes again is told again
            raise PeerMemoryError(
                f"{what}: the {' and the '.join(silent)} neighbour did not answer within {timeout:g} s",
                found="a rank that ended, or that does not make the same exchanges in the same order",
                remedy="look at that rank's output; then make the pool anew on all ranks",
            )


def push_pull(what, explicit_nhwc, multiprocessors, sides, box_bytes, faults, timeout=TIMEOUT):
    """Exchanges the halos of (top, bottom). Raises ArgumentError and ArgumentTypeError for tensors that do not fit, and
    PeerMemoryError: on a GPU for an earlier exchange, on a CPU for this one.

    Halos are [batch, channels, height, width], or channels last if explicit_nhwc; of three dimensions without a batch.
    """
    from apex._portable import interface, tensors

    halos = [t for side in sides for t in (side.send, side.receive)]
    _check(what, tensors, halos)
    faults.check(what, timeout)
    sizes, strides, unit = _merged(halos, explicit_nhwc)
    made = interface.structure("PushPullHalos")()
    made.sizes[:], made.unit_bytes, made.box_bytes = sizes, unit, box_bytes
    made.fault, made.limit = faults.words.data_ptr(), int(timeout * 1e9)
    for i, (name, side) in enumerate(zip(("top", "bottom"), sides, strict=True)):
        values = dict(
            send=side.send.data_ptr(), receive=side.receive.data_ptr(), inbox=side.inbox, outbox=side.outbox,
            zero=side.zero,
        )  # fmt: skip
        for field, value in values.items():
            setattr(made, f"{name}_{field}", value)
        getattr(made, f"{name}_send_strides")[:] = strides[2 * i]
        getattr(made, f"{name}_receive_strides")[:] = strides[2 * i + 1]
    place = tensors.place_of_device(halos[0].device)
    status = interface.function("apex_push_pull_halos")(place, ctypes.byref(made), multiprocessors)
    if status == tensors.USE_REFERENCE:
        raise PeerMemoryError(
            f"{what}: no kernel exchanges halos on {halos[0].device}", remedy=_memory.INSTEAD
        )
    library.load().check(status)
    for side in sides:
        tensors.bump_version(side.receive)
    if halos[0].is_cpu:
        faults.check(what, timeout)


def check_alike(what, halos):
    """Raises ArgumentTypeError or ArgumentError unless all halos have one dtype, shape and device."""
    first = halos[0]
    for other in halos[1:]:
        if other.dtype != first.dtype:
            raise ArgumentTypeError(f"{what}: halos are {first.dtype} and {other.dtype}, they must be alike")
        if other.shape != first.shape or other.device != first.device:
            raise ArgumentError(
                f"{what}: halos are {list(first.shape)} on {first.device} and {list(other.shape)} on "
                f"{other.device}, they must be alike"
            )


def _check(what, tensors, halos):
    first = halos[0]
    if first.dim() not in (3, 4):
        raise ArgumentError(f"{what}: halos have 3 or 4 dimensions, not {first.dim()}")
    if first.element_size() not in (1, 2, 4, 8):
        raise ArgumentTypeError(
            f"{what}: elements have 1, 2, 4 or 8 bytes; {first.dtype} has {first.element_size()}"
        )
    check_alike(what, halos)
    for tensor in halos:
        tensors.refuse_unless_plain(tensor, f"{what}: a halo")
    for tensor in (halos[1], halos[3]):
        tensors.refuse_overlap(tensor, f"{what}: a halo that is received")


def _merged(halos, explicit_nhwc):
    """(four sizes, strides of each halo, bytes of an element): as few dimensions, and as wide elements, as all have.

    Channels are the fastest where the first halo that is received has them so; both neighbours come to one order.
    """
    halos = [t if t.dim() == 4 else t.unsqueeze(0) for t in halos]
    if not explicit_nhwc and halos[1].stride(1) == 1:
        halos = [t.permute(0, 2, 3, 1) for t in halos]
    dims = []
    for d, size in enumerate(halos[0].shape):
        strides = [t.stride(d) for t in halos]
        if size == 1:
            continue
        if dims and all(a == b * size for a, b in zip(dims[-1][1], strides, strict=True)):
            dims[-1] = (dims[-1][0] * size, strides)
        else:
            dims.append((size, strides))
    dims = [(1, [0] * 4)] * (4 - len(dims)) + dims
    unit = halos[0].element_size()
    wide = next((w for w in (8, 4, 2) if w > unit and _fits(halos, dims, unit, w)), unit)
    each = wide // unit
    sizes = [size for size, _ in dims]
    sizes[3] //= each
    strides = [[dims[d][1][i] // (each if d < 3 else 1) for d in range(4)] for i in range(4)]
    return sizes, strides, wide


def _fits(halos, dims, unit, wide):
    """Whether all halos can be read in elements of so many bytes."""
    size, fastest = dims[3]
    whole = size * unit % wide == 0 and all(stride == 1 for stride in fastest)
    apart = [stride * unit for _, strides in dims[:3] for stride in strides]
    return whole and not any(n % wide for n in (*apart, *(t.data_ptr() for t in halos)))
