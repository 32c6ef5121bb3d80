"""Cases of p2p_communication: each function, at once, as futures and with handles, whole and by parts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tp_common import equal, integers, raises, raises_everywhere, split, tensor_sizes

from apex.transformer import parallel_state as state
from apex.transformer.pipeline_parallel import p2p_communication as p2p
from apex.transformer.pipeline_parallel._timers import _Timers
from apex.transformer.pipeline_parallel.p2p_communication import FutureTensor
from apex.transformer.pipeline_parallel.schedules import fwd_bwd_pipelining_without_interleaving as lists

SHAPE = (4, 2, 6)
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64
KINDS = (
    {},
    {"async_comm": True},
    {"scatter_gather_tensors_in_pipeline": True},
    {"scatter_gather_tensors_in_pipeline": True, "async_comm": True},
    {"scatter_gather_tensors_in_pipeline": True, "sequence_parallel_enabled": True},
)


def _of(stage, kind, dtype, shape=SHAPE):
    """What a stage sends: the same on the tensor parallel ranks."""
    return integers(shape, 10 * stage + kind, dtype, 60)


def _same(found, wanted, options):
    """That it is there, needs gradients, and is a future only if that was asked for."""
    assert isinstance(found, FutureTensor) == bool(options.get("async_comm"))
    for _ in range(2):
        tensor = found.get() if isinstance(found, FutureTensor) else found
        assert tensor.requires_grad and tensor.is_leaf
        equal(tensor.detach(), wanted)


def _each_function(mesh):
    for tensor in tensor_sizes():
        stages = dist.get_world_size() // tensor
        if stages == 1:
            continue
        with split(tensor, stages):
            for number, dtype in enumerate(DTYPES):
                for options in KINDS[number % 2 :: 2]:
                    _one_way(stages, dtype, {"dtype": dtype, **options})
                    _both_ways(stages, dtype, {"dtype": dtype, **options})
                    _at_once(stages, dtype, {"dtype": dtype, **options})


def _one_way(stages, dtype, options):
    stage = state.get_pipeline_model_parallel_rank()
    first, last = stage == 0, stage == stages - 1
    found = p2p.recv_forward(SHAPE, **options)
    p2p.send_forward(_of(stage, 0, dtype), tensor_shape=SHAPE, **options)
    assert found is None if first else not _same(found, _of(stage - 1, 0, dtype), options)
    found = p2p.recv_backward(SHAPE, **options)
    p2p.send_backward(_of(stage, 1, dtype), SHAPE, **options)
    assert found is None if last else not _same(found, _of(stage + 1, 1, dtype), options)


def _both_ways(stages, dtype, options):
    """Neighbours that send to each other: even stages to the next one, odd ones to the one before, and the reverse."""
    stage = state.get_pipeline_model_parallel_rank()
    for forward in (True, False):
        if (stage % 2 == 0) == forward:
            found = p2p.send_forward_recv_backward(_of(stage, 2, dtype), SHAPE, **options)
            assert (
                found is None if stage == stages - 1 else not _same(found, _of(stage + 1, 3, dtype), options)
            )
        else:
            found = p2p.send_backward_recv_forward(_of(stage, 3, dtype), SHAPE, **options)
            assert found is None if stage == 0 else not _same(found, _of(stage - 1, 2, dtype), options)


def _at_once(stages, dtype, options):
    """All stages in a ring, as parts of interleaved schedules are."""
    stage = state.get_pipeline_model_parallel_rank()
    before, behind = (stage - 1) % stages, (stage + 1) % stages
    found = p2p.send_forward_recv_forward(_of(stage, 4, dtype), True, SHAPE, **options)
    _same(found, _of(before, 4, dtype), options)
    found = p2p.send_backward_recv_backward(_of(stage, 5, dtype), True, SHAPE, **options)
    _same(found, _of(behind, 5, dtype), options)
    activations, gradients = p2p.send_forward_backward_recv_forward_backward(
        *(_of(stage, 6, dtype), _of(stage, 7, dtype), True, True, SHAPE), **options
    )
    _same(activations, _of(before, 6, dtype), options)
    _same(gradients, _of(behind, 7, dtype), options)
    # Nothing of it.
    assert p2p.send_forward_recv_forward(None, False, SHAPE, **options) is None
    assert p2p.send_backward_recv_backward(None, False, SHAPE, **options) is None
    assert p2p.send_forward_backward_recv_forward_backward(None, None, False, False, SHAPE, **options) == (
        None,
        None,
    )


def _handles(mesh):
    """overlap_p2p_comm: the tensor is there when the handle was waited for."""
    stages = dist.get_world_size()
    with split(1, stages):
        stage = state.get_pipeline_model_parallel_rank()
        before, behind = (stage - 1) % stages, (stage + 1) % stages
        options = dict(overlap_p2p_comm=True, batch_p2p_comm=False, sync_batch_comm=False)
        both = _of(stage, 6, torch.float32), _of(stage, 7, torch.float32)
        found = (
            *p2p.send_forward_recv_forward(both[0], True, SHAPE, **options),
            *p2p.send_backward_recv_backward(both[1], True, SHAPE, **options),
            *p2p.send_forward_backward_recv_forward_backward(*both, True, True, SHAPE, **options),
        )
        for handle in (*found[1], *found[3], *found[6]):
            handle.wait()
        for tensor, wanted in zip(
            (found[0], found[2], found[4], found[5]),
            ((before, 6), (behind, 7), (before, 6), (behind, 7)),
            strict=True,
        ):
            assert tensor.requires_grad
            equal(tensor.detach(), _of(*wanted, torch.float32))


def _lists(mesh):
    """The functions that schedules have for several tensors; a shape that is None is left out."""
    stages = dist.get_world_size()
    shapes = [SHAPE, None, (3, 1, 1)]
    with split(1, stages):
        stage = state.get_pipeline_model_parallel_rank()

        def sent(stage, kind):
            return [None if shape is None else _of(stage, kind, torch.float32, shape) for shape in shapes]

        def same(found, stage, kind):
            wanted = sent(stage, kind) if 0 <= stage < stages else [None] * 3
            assert len(found) == 3 and all(
                (x is None) == (y is None) for x, y in zip(found, wanted, strict=True)
            )
            equal([x.detach() for x in found if x is not None], [x for x in wanted if x is not None])

        found = lists.recv_forward(shapes)
        lists.send_forward(sent(stage, 0), shapes)
        same(found, stage - 1, 0)
        found = lists.recv_backward(shapes)
        lists.send_backward(sent(stage, 1), shapes)
        same(found, stage + 1, 1)
        for forward in (True, False):
            if (stage % 2 == 0) == forward:
                same(lists.send_forward_recv_backward(sent(stage, 2), shapes), stage + 1, 3)
            else:
                same(lists.send_backward_recv_forward(sent(stage, 3), shapes), stage - 1, 2)


def _dtypes(mesh):
    """dtype, else params_dtype unless residuals are float32, else float32."""
    with split(1, dist.get_world_size()):
        for options, dtype in (
            ({}, torch.float32),
            ({"params_dtype": torch.float16}, torch.float16),
            ({"params_dtype": torch.float16, "fp32_residual_connection": True}, torch.float32),
            ({"params_dtype": torch.float16, "dtype": torch.float64}, torch.float64),
        ):
            found = p2p.send_forward_recv_forward(_of(0, 0, dtype), True, SHAPE, **options)
            assert found.dtype == dtype
        found = p2p.send_forward_recv_forward(_of(0, 0, torch.int64), True, SHAPE, dtype=torch.int64)
        assert not found.requires_grad
        equal(found, _of(0, 0, torch.int64))


def _what_is_sent(mesh):
    """Values, whatever the memory: views, transposed, expanded, negative bits, without elements; and of a graph."""
    with split(1, dist.get_world_size()):
        x = integers((6, 2, 4), 3)
        odd = torch.complex(torch.zeros_like(x), x).conj().imag
        assert odd.is_neg()
        for tensor in (x.transpose(0, 2), x[1:, :, 1:2], x[:1].expand(5, -1, -1), odd, x[:0], x[0, 0, 0]):
            found = p2p.send_forward_recv_forward(tensor, True, tuple(tensor.shape))
            equal(found.detach(), tensor.resolve_neg().contiguous())
        weight = torch.ones(4, dtype=torch.float32, device=x.device, requires_grad=True)
        found = p2p.send_forward_recv_forward(x * weight, True, (6, 2, 4))
        assert found.grad_fn is None and found.requires_grad
        # A part of a tensor that the ranks do not divide is the whole.
        found = p2p.send_forward_recv_forward(
            x[:1, :1, :3], True, (1, 1, 3), scatter_gather_tensors_in_pipeline=True
        )
        equal(found.detach(), x[:1, :1, :3])


def _wrong_calls(mesh):
    with split(1, dist.get_world_size()):
        with raises_everywhere(RuntimeError, "tensor_shape is required"):
            p2p.send_forward_recv_forward(None, True, None)
        with raises_everywhere(TypeError, "no_such"):
            p2p.send_forward_recv_forward(None, True, SHAPE, no_such=True)
    with raises(RuntimeError, "initialize_model_parallel"):
        p2p.recv_forward(SHAPE)


def _timers(mesh):
    """Of a call that lasts: the others are late."""
    with split(1, dist.get_world_size()):
        timers = _Timers()
        dist.barrier()
        p2p.send_forward_recv_forward(_of(0, 0, torch.float32), True, SHAPE, timers=timers)
        assert list(timers.timers) == ["forward-send-forward-recv"]
        assert timers("forward-send-forward-recv").elapsed() > 0


CASES = {
    "each function": _each_function,
    "handles": _handles,
    "lists of tensors": _lists,
    "dtypes of messages": _dtypes,
    "what is sent": _what_is_sent,
    "wrong calls": _wrong_calls,
    "timers": _timers,
}
