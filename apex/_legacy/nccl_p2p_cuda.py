"""The functions of public apex's nccl_p2p_cuda: halos by sends and receives of NCCL (RCCL) on communicators of its own.

The library is the one that torch uses; without it functions raise NoDriverError. Communicators live until the process
ends. apex.contrib.bottleneck.HaloExchangerSendRecv needs none of them.
"""

from __future__ import annotations

import torch

from apex import _nccl
from apex._loader.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "add_delay",
    "get_unique_nccl_id",
    "init_nccl_comm",
    "left_right_halo_exchange",
    "left_right_halo_exchange_inplace",
]
_communicators: list[_nccl.Communicator] = []


def get_unique_nccl_id(n):
    """n ids by which ranks meet: uint8 [n, 128], on the CPU."""
    ids = bytearray(b"".join(_nccl.unique_id() for _ in range(n)))
    return torch.frombuffer(ids, dtype=torch.uint8).view(n, _nccl.ID_BYTES)


def init_nccl_comm(unique_nccl_id, my_rank, num_ranks):
    """The handle of a communicator of num_ranks ranks, which all call this together with one id, uint8 on the CPU. This
    rank uses its current GPU. Raises ValueError, and DriverError with NCCL's words."""
    if unique_nccl_id.numel() < _nccl.ID_BYTES or unique_nccl_id.dtype != torch.uint8:
        raise ArgumentError(
            f"init_nccl_comm: unique_nccl_id must be uint8 [{_nccl.ID_BYTES}], not {unique_nccl_id.dtype} "
            f"{list(unique_nccl_id.shape)}"
        )
    if not 0 <= my_rank < num_ranks:
        raise ArgumentError(f"init_nccl_comm: my_rank is {my_rank}, of {num_ranks} ranks")
    wanted = bytes(unique_nccl_id.reshape(-1)[: _nccl.ID_BYTES].tolist())
    _communicators.append(_nccl.Communicator(wanted, my_rank, num_ranks))
    return len(_communicators) - 1


def _is_on_gpu(tensor):
    return tensor.is_cuda


@torch.no_grad()
def left_right_halo_exchange_inplace(
    handle,
    left_rank,
    right_rank,
    left_output_halo,
    right_output_halo,
    left_input_halo,
    right_input_halo,
):
    """Sends the outputs to the neighbours and receives the inputs from them, on the current stream; -1 is no neighbour,
    from which zeros come. Halos have one size and dtype, any strides. Raises ValueError and TypeError."""
    if not 0 <= handle < len(_communicators):
        raise ArgumentError(
            f"there is no communicator {handle}: init_nccl_comm returned {len(_communicators)} so far"
        )
    halos = (left_output_halo, right_output_halo, left_input_halo, right_input_halo)
    for tensor in halos:
        if tensor.dtype != halos[0].dtype:
            raise ArgumentTypeError(f"halos are {halos[0].dtype} and {tensor.dtype}, they must be alike")
        if tensor.numel() != halos[0].numel() or tensor.device != halos[0].device or not _is_on_gpu(tensor):
            raise ArgumentError(
                f"halos are {list(halos[0].shape)} on {halos[0].device} and {list(tensor.shape)} on {tensor.device}: "
                "they must have one size, on one GPU"
            )
    communicator = _communicators[handle]
    sent = [t.contiguous() for t in halos[:2]]
    received = [torch.empty_like(t) for t in sent]
    with communicator.group():
        for rank, out, into in zip((left_rank, right_rank), sent, received, strict=True):
            if rank >= 0:
                communicator.send(out, rank)
                communicator.receive(into, rank)
    for rank, found, into in zip((left_rank, right_rank), received, halos[2:], strict=True):
        into.zero_() if rank < 0 else into.copy_(found.view(into.shape))


def left_right_halo_exchange(handle, left_rank, right_rank, left_output_halo, right_output_halo):
    """[left input, right input]: as left_right_halo_exchange_inplace."""
    found = [torch.empty_like(right_output_halo), torch.empty_like(left_output_halo)]
    left_right_halo_exchange_inplace(
        handle, left_rank, right_rank, left_output_halo, right_output_halo, *found
    )
    return found


def add_delay(delay):
    """Keeps the current GPU's stream (without a GPU, the caller) busy for `delay` nanoseconds."""
    from apex._portable import interface, tensors
    from apex.contrib.peer_memory import _memory

    place = tensors.place_of_device(_memory.current_device())
    status = interface.function("apex_add_delay")(place, int(delay))
    if status:
        tensors.must_use_reference(status, "add_delay")
