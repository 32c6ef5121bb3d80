"""Messages between the stages of a pipeline.

What a stage sends and receives at one moment is one batch (`exchange`), so that neighbours that send to each other do
not wait for each other. The functions by name are the batches of which schedules consist. They take, beside shapes:

    dtype: of what is received; None: params_dtype, or float32.
    async_comm: what is received comes as FutureTensors, and nothing is waited for.
    overlap_p2p_comm: of functions that send and receive one way: return (tensors, handles to wait for) at once.
    scatter_gather_tensors_in_pipeline: each tensor parallel rank sends its part of the tensor, and the receivers gather
        it: for tensors that are the same on those ranks. Not with sequence parallelism, and not where the number of
        elements is not divisible.
    sequence_parallel_enabled: tensors are parts of the sequence. Shapes are those of what is sent.
    params_dtype, fp32_residual_connection: as in Megatron-LM: the dtype where `dtype` says nothing; float32 instead.
    timers: a _Timers that measures the call under "forward-recv" and such names.
    sync_batch_comm, batch_p2p_comm: without effect. Nothing waits for the whole device, and all goes in batches.

What is received requires gradients where it is floating. A rank that is not there is named: RuntimeError says which
rank waits for what, and from whom.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from apex.parallel._waiting import waiting_for
from apex.transformer import _collectives as collectives
from apex.transformer import parallel_state
from apex.transformer.pipeline_parallel._timers import _Timers
from apex.transformer.pipeline_parallel.utils import Shape
from apex.transformer.tensor_parallel.utils import current_device
from apex.transformer.utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks

WHY = (
    "that rank ended, failed, or is in another part of the schedule; every stage runs the same schedule over as many "
    "microbatches, with the same shapes and dtype"
)


class FutureTensor:
    """A tensor that may be under way.

    Args:
        tensor: what `get` returns, unless the function returns another one.
        waitfunc: called once, by the first `get`; None: there is nothing to wait for.
    """

    def __init__(self, tensor: torch.Tensor, waitfunc: Callable[[], torch.Tensor | None] | None) -> None:
        self.tensor, self.waitfunc = tensor, waitfunc

    def get(self) -> torch.Tensor:
        """The tensor, when it is there; on an accelerator the current stream waits, not the host."""
        if self.waitfunc is not None:
            found = self.waitfunc()
            self.tensor = self.tensor if found is None else found
            self.waitfunc = None
        return self.tensor


@dataclasses.dataclass
class Send:
    """A tensor for a global rank."""

    tensor: torch.Tensor
    peer: int
    what: str


@dataclasses.dataclass
class Receive:
    """A tensor from a global rank, of that shape and dtype, for that device."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    peer: int
    what: str


class Work:
    """Messages under way. `wait` may be called again, and raises RuntimeError where they do not come."""

    def __init__(self, pending, group):
        self._pending, self._group = pending, group  # [(torch's works, what is waited for)]

    def wait(self) -> None:
        while self._pending:
            works, what = self._pending[0]
            with waiting_for(what, WHY, group=self._group):
                for work in works:
                    work.wait()
            self._pending.pop(0)


def exchange(
    sends: Sequence[Send], receives: Sequence[Receive], scatter_gather: bool = False
) -> tuple[list[FutureTensor], Work]:
    """Sends and receives in one batch. The tensors that are received, and what waits for all that is sent.

    Both sides of each pair of ranks must call it for the same messages, in the same order.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    host = dist.get_backend(group) == "gloo"  # it sends from the memory of the CPU only
    ops, whats = [], []
    buffers = [_buffer(receive, host, scatter_gather) for receive in receives]
    for send in sends:
        tensor = collectives.contiguous(_part(send.tensor.detach(), scatter_gather))
        ops.append((dist.isend, tensor.cpu() if host else tensor, send.peer))
        whats.append(f"for rank {send.peer} to take {send.what}")
    for receive, buffer in zip(receives, buffers, strict=True):
        ops.append((dist.irecv, buffer, receive.peer))
        whats.append(f"for {receive.what} from rank {receive.peer}")
    works = iter(_start([op for op in ops if op[1].numel()], group, whats))
    pending = [([next(works)] if op[1].numel() else [], what) for op, what in zip(ops, whats, strict=True)]
    futures = [
        FutureTensor(buffer, _Arrival(receive, buffer, Work([each], group), scatter_gather))
        for receive, buffer, each in zip(receives, buffers, pending[len(sends) :], strict=True)
    ]
    return futures, Work(pending[: len(sends)], group)


def _start(ops, group, whats):
    """torch's work of each; backends that start all of a batch as one have one."""
    if not ops:
        return []
    with waiting_for("; ".join(whats), WHY, group=group):
        works = dist.batch_isend_irecv([dist.P2POp(op, tensor, peer, group) for op, tensor, peer in ops])
    return works if len(works) == len(ops) else works * len(ops)


def _splits(elements, scatter_gather):
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return scatter_gather and ranks > 1 and elements % ranks == 0


def _part(tensor, scatter_gather):
    if _splits(tensor.numel(), scatter_gather):
        return split_tensor_into_1d_equal_chunks(tensor)
    return tensor


def _buffer(receive, host, scatter_gather):
    shape = list(receive.shape)
    if _splits(math.prod(shape), scatter_gather):
        shape = [math.prod(shape) // parallel_state.get_tensor_model_parallel_world_size()]
    return torch.empty(shape, dtype=receive.dtype, device="cpu" if host else receive.device)


class _Arrival:
    """Waits for a message, and makes of it what was sent."""

    def __init__(self, receive, buffer, work, scatter_gather):
        self._receive, self._buffer, self._work, self._scatter_gather = receive, buffer, work, scatter_gather

    def __call__(self):
        self._work.wait()
        tensor = self._buffer.to(self._receive.device)
        if _splits(math.prod(self._receive.shape), self._scatter_gather):
            tensor = gather_split_1d_tensor(tensor).view(*self._receive.shape)
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor


@dataclasses.dataclass(frozen=True)
class _Options:
    """What the functions take by keyword; the module's text says what they mean."""

    dtype: torch.dtype | None = None
    async_comm: bool = False
    sequence_parallel_enabled: bool = False
    timers: _Timers | None = None
    scatter_gather_tensors_in_pipeline: bool = False
    params_dtype: torch.dtype | None = None
    fp32_residual_connection: bool = False
    sync_batch_comm: bool = True
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True

    @property
    def wire_dtype(self):
        return self.dtype or (not self.fp32_residual_connection and self.params_dtype) or torch.float32

    def measure(self, name):
        return contextlib.nullcontext() if self.timers is None else _measured(self.timers(name))


@contextlib.contextmanager
def _measured(timer):
    timer.start()
    try:
        yield
    finally:
        timer.stop()


# What an earlier call sent and nobody waited for: gloo takes back what is given up before it was taken.
_on_their_way: list[tuple[dist.ProcessGroup, Work]] = []


def _wait_for_earlier(group):
    while _on_their_way:
        sent_by, work = _on_their_way.pop()
        if sent_by is group:  # of groups that were ended nobody takes anything
            work.wait()


class _Handle:
    """Waits for all messages of a batch."""

    def __init__(self, futures, sent):
        self._futures, self._sent = futures, sent

    def wait(self):
        for future in self._futures:
            future.get()
        self._sent.wait()


def _communicate(name, options, shape, *, send_next=None, send_prev=None, recv_prev=False, recv_next=False):
    """One batch with the stages beside this one: (from the one before, from the next one, what waits for all)."""
    if shape is None and (recv_prev or recv_next):
        raise RuntimeError("tensor_shape is required: (sequence, micro batch, hidden) of what is received")
    before = parallel_state.get_pipeline_model_parallel_prev_rank()
    behind = parallel_state.get_pipeline_model_parallel_next_rank()
    sent = next((tensor for tensor in (send_next, send_prev) if tensor is not None), None)
    device = current_device() if sent is None else sent.device
    # Of two stages, each is before and behind the other one: gradients go first on both sides.
    sends = [Send(send_prev, before, "gradients")] if send_prev is not None else []
    sends += [Send(send_next, behind, "activations")] if send_next is not None else []
    receives = [Receive(shape, options.wire_dtype, device, behind, "gradients")] if recv_next else []
    receives += [Receive(shape, options.wire_dtype, device, before, "activations")] if recv_prev else []
    split = options.scatter_gather_tensors_in_pipeline and not options.sequence_parallel_enabled
    group = parallel_state.get_pipeline_model_parallel_group()
    with options.measure(name):
        _wait_for_earlier(group)
        futures, work = exchange(sends, receives, split)
        handle = _Handle(futures, work)
        if options.async_comm or options.overlap_p2p_comm:
            _on_their_way.append((group, work))
        else:
            handle.wait()
    found = iter(
        futures if options.async_comm else [_now(future, options, device, split) for future in futures]
    )
    gradients = next(found) if recv_next else None
    return next(found) if recv_prev else None, gradients, handle


def _now(future, options, device, split):
    """A tensor at once: the buffer, if what is received goes there and stays there."""
    if options.overlap_p2p_comm and future.tensor.device == device and not split:
        return future.tensor
    return future.get()


def recv_forward(
    tensor_shape: Shape, override_scatter_gather_tensors_in_pipeline: bool = False, **options: Any
) -> torch.Tensor | FutureTensor | None:
    """The activations of the stage before; None on the first one."""
    if parallel_state.is_pipeline_first_stage():
        return None
    chosen = _options(options, override_scatter_gather_tensors_in_pipeline)
    return _communicate("forward-recv", chosen, tensor_shape, recv_prev=True)[0]


def recv_backward(tensor_shape: Shape | None = None, **options: Any) -> torch.Tensor | FutureTensor | None:
    """The gradients of what this stage sent to the next one; None on the last one."""
    if parallel_state.is_pipeline_last_stage():
        return None
    return _communicate("backward-recv", _options(options), tensor_shape, recv_next=True)[1]


def send_forward(
    output_tensor: torch.Tensor,
    override_scatter_gather_tensors_in_pipeline: bool = False,
    tensor_shape: Shape | None = None,
    **options: Any,
) -> None:
    """Sends activations to the next stage; the last one sends nothing."""
    if not parallel_state.is_pipeline_last_stage():
        chosen = _options(options, override_scatter_gather_tensors_in_pipeline)
        _communicate("forward-send", chosen, tensor_shape, send_next=output_tensor)


def send_backward(input_tensor_grad: torch.Tensor, tensor_shape: Shape, **options: Any) -> None:
    """Sends the gradients of this stage's input to the stage before; the first one sends nothing."""
    if not parallel_state.is_pipeline_first_stage():
        _communicate("backward-send", _options(options), tensor_shape, send_prev=input_tensor_grad)


def send_forward_recv_backward(
    output_tensor: torch.Tensor, tensor_shape: Shape, **options: Any
) -> torch.Tensor | FutureTensor | None:
    """Activations to the next stage, gradients from there; None on the last one."""
    if parallel_state.is_pipeline_last_stage():
        return None
    name, chosen = "forward-send-backward-recv", _options(options)
    return _communicate(name, chosen, tensor_shape, send_next=output_tensor, recv_next=True)[1]


def send_backward_recv_forward(
    input_tensor_grad: torch.Tensor, tensor_shape: Shape, **options: Any
) -> torch.Tensor | FutureTensor | None:
    """Gradients to the stage before, activations from there; None on the first one."""
    if parallel_state.is_pipeline_first_stage():
        return None
    name, chosen = "backward-send-forward-recv", _options(options)
    return _communicate(name, chosen, tensor_shape, send_prev=input_tensor_grad, recv_prev=True)[0]


def send_forward_recv_forward(
    output_tensor: torch.Tensor | None, recv_prev: bool, tensor_shape: Shape, **options: Any
) -> Any:
    """Activations to the next stage (None: nothing), activations from the one before, if recv_prev."""
    name, chosen = "forward-send-forward-recv", _options(options)
    found, _, handle = _communicate(name, chosen, tensor_shape, send_next=output_tensor, recv_prev=recv_prev)
    return (found, [handle]) if chosen.overlap_p2p_comm else found


def send_backward_recv_backward(
    input_tensor_grad: torch.Tensor | None, recv_next: bool, tensor_shape: Shape, **options: Any
) -> Any:
    """Gradients to the stage before (None: nothing), gradients from the next one, if recv_next."""
    name, chosen = "backward-send-backward-recv", _options(options)
    _, found, handle = _communicate(
        name, chosen, tensor_shape, send_prev=input_tensor_grad, recv_next=recv_next
    )
    return (found, [handle]) if chosen.overlap_p2p_comm else found


def send_forward_backward_recv_forward_backward(
    output_tensor: torch.Tensor | None,
    input_tensor_grad: torch.Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Shape,
    **options: Any,
) -> Any:
    """Both at once: (activations from the stage before, gradients from the next one), as of the functions above."""
    name, chosen = "forward-backward-send-forward-backward-recv", _options(options)
    activations, gradients, handle = _communicate(
        *(name, chosen, tensor_shape),
        send_next=output_tensor,
        send_prev=input_tensor_grad,
        recv_prev=recv_prev,
        recv_next=recv_next,
    )
    found = activations, gradients
    return (*found, [handle]) if chosen.overlap_p2p_comm else found


def _options(given, whole=False):
    """whole: as override_scatter_gather_tensors_in_pipeline says, of one tensor."""
    found = _Options(**given)
    return dataclasses.replace(found, scatter_gather_tensors_in_pipeline=False) if whole else found
