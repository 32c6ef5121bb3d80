"""The exchange of halos through shared memory, csrc/host/push_pull_halos.h, from tensors."""

from __future__ import annotations

import functools
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
        words = self.words.tolist()
        if any(words):
            silent = [
                name for name, word in zip(("left (top)", "right (bottom)"), words, strict=True) if word
            ]
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
    sizes, strides, unit = _merged(
        *(halos[0].shape, tuple(t.stride() for t in halos), tuple(t.data_ptr() % 8 for t in halos)),
        *(halos[0].element_size(), explicit_nhwc),
    )
    values = [sizes, unit, box_bytes, faults.words.data_ptr(), int(timeout * 1e9)]
    for i, side in enumerate(sides):
        values += side.send.data_ptr(), side.receive.data_ptr(), side.inbox, side.outbox, side.zero
        values += strides[2 * i : 2 * i + 2]
    place = tensors.place_of_device(halos[0].device)
    status = interface.function("apex_push_pull_halos")(place, _packed(interface)(*values), multiprocessors)
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


@functools.cache
def _packed(interface):
    """A function of the fields of PushPullHalos in the order in which push_pull gives them, that makes its bytes."""
    of_a_side = "send", "receive", "inbox", "outbox", "zero", "send_strides", "receive_strides"
    fields = [f"{name}_{field}" for name in ("top", "bottom") for field in of_a_side]
    return interface.Layout("PushPullHalos").packer(
        "sizes", "unit_bytes", "box_bytes", "fault", "limit", *fields
    )


@functools.lru_cache(maxsize=256)  # a layer exchanges the same shapes at every step
def _merged(shape, strides, starts, unit, explicit_nhwc):
    """(four sizes, strides of each halo, bytes of an element): as few dimensions, and as wide elements, as all have.

    strides, starts: of the four halos, their strides and addresses modulo 8. Channels are the fastest where the first
    halo that is received has them so; both neighbours come to one order.
    """
    order = range(len(shape))
    if not explicit_nhwc and strides[1][-3] == 1:
        order = *order[:-3], order[-2], order[-1], order[-3]
    dims = []
    for d in order:
        size, of_halos = shape[d], [of[d] for of in strides]
        if size == 1:
            continue
        if dims and all(a == b * size for a, b in zip(dims[-1][1], of_halos, strict=True)):
            dims[-1] = (dims[-1][0] * size, of_halos)
        else:
            dims.append((size, of_halos))
    dims = [(1, [0] * 4)] * (4 - len(dims)) + dims
    wide = next((w for w in (8, 4, 2) if w > unit and _fits(starts, dims, unit, w)), unit)
    each = wide // unit
    sizes = [size for size, _ in dims]
    sizes[3] //= each
    merged = [[dims[d][1][i] // (each if d < 3 else 1) for d in range(4)] for i in range(4)]
    return sizes, merged, wide


def _fits(starts, dims, unit, wide):
    """Whether all halos can be read in elements of so many bytes."""
    size, fastest = dims[3]
    whole = size * unit % wide == 0 and all(stride == 1 for stride in fastest)
    apart = [stride * unit for _, strides in dims[:3] for stride in strides]
    return whole and not any(n % wide for n in (*apart, *starts))
