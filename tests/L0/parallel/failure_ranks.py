"""What each rank of test_failures.py runs, on gloo: one rank fails, and those that wait for it learn of it at once.

Groups are made anew in each case, so that each also runs after the failure of another one.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

L0 = pathlib.Path(__file__).parents[1]
sys.path += [str(folder) for folder in (L0 / "transformer",) if str(folder) not in sys.path]

from pp_model import MICRO, batch_of, forward_step, make, pipeline, step  # noqa: E402
from tp_common import gathered, raises, split  # noqa: E402
from tp_model import HIDDEN, SEQUENCE  # noqa: E402

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam  # noqa: E402
from apex.parallel import SyncBatchNorm, _failures, failing_together  # noqa: E402
from apex.transformer import _collectives as collectives  # noqa: E402
from apex.transformer import parallel_state, tensor_parallel  # noqa: E402
from apex.transformer.pipeline_parallel import get_forward_backward_func, p2p_communication, utils  # noqa: E402

SOON = 30  # seconds, of the 120 that the process group would wait: ranks of a busy machine start late
BAD = 1  # the rank that fails
F32 = torch.float32


def ones(*shape):
    return torch.ones(shape, dtype=F32, device="cpu")


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("of a backward pass")


def _bad():
    return dist.get_rank() == BAD


@contextlib.contextmanager
def ends(own, *told, waits=True):
    """The bad rank raises `own`, those that wait what the bad one told, and soon; no rank waits for the next line."""
    error, start = None, time.monotonic()
    try:
        if _bad():
            with raises(ValueError, own):
                yield
        elif waits:
            with raises(RuntimeError, f"rank {BAD} ", f"ValueError: {own}", *told):
                yield
        else:
            yield
    except Exception as caught:
        error = repr(caught)
    seconds = time.monotonic() - start
    said = gathered(error)
    assert not any(said), said
    assert seconds < SOON, seconds


def _layers():
    layers = [
        tensor_parallel.ColumnParallelLinear(HIDDEN, 16, gather_output=False),
        tensor_parallel.RowParallelLinear(16, HIDDEN, input_is_parallel=True),
    ]
    return nn.ModuleList(layers)


def _run(layers, x):
    for layer in layers:
        x = layer(x)[0]
    return x


def _in_forward(mesh):
    with split(dist.get_world_size()):
        layers, x = _layers(), ones(2, 2, HIDDEN)
        with ends("of forward", "a sum over the tensor parallel ranks", "make others"), failing_together():
            if _bad():
                raise ValueError("of forward")
            _run(layers, x)
        with raises(RuntimeError, f"rank {BAD} failed in a step: ValueError: of forward", "make others"):
            collectives.all_reduce(ones(1), parallel_state.get_tensor_model_parallel_group(), "another use")


def _in_backward(mesh):
    with split(dist.get_world_size()):
        layers, x = _layers(), ones(2, 2, HIDDEN).requires_grad_()
        y = _run(layers, x)
        with ends("of a backward pass", "the gradient of a layer's input"), failing_together("training"):
            (_Broken.apply(y) if _bad() else y).sum().backward()


def _in_an_optimizer(mesh):
    """Sharded: the others wait in the step itself, whichever group and collective it is."""
    for options in ({}, dict(overlap_param_sync=True)):
        group = dist.new_group()
        model = nn.Linear(4, 4, dtype=F32, device="cpu")
        optimizer = DistributedFusedAdam(model.parameters(), device="cpu", process_group=group, **options)
        model(ones(2, 4)).sum().backward()
        with ends("of a step", "apex.contrib.optimizers: rank"), failing_together():
            if _bad():
                raise ValueError("of a step")
            optimizer.step()
        dist.destroy_process_group(group)


def _behind_an_optimizer(mesh):
    """The others are at the next sum by then."""
    with split(dist.get_world_size()):
        p = nn.Parameter(ones(3))
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.grad = ones(3)
        with ends("of a hook", "a norm"), failing_together():
            if _bad():
                optimizer.register_step_post_hook(lambda *_: (_ for _ in ()).throw(ValueError("of a hook")))
            optimizer.step()
            collectives.all_reduce(ones(1), parallel_state.get_tensor_model_parallel_group(), "a norm")


def _in_a_batch_norm(mesh):
    group = dist.new_group()
    layer = SyncBatchNorm(3, process_group=group)
    with ends("of a layer", "a batch norm's statistics"), failing_together():
        if _bad():
            raise ValueError("of a layer")
        layer(ones(4, 3))
    dist.destroy_process_group(group)


def _of_a_schedule_of_one_stage(mesh):
    """Which is a step by itself."""
    with split(dist.get_world_size()):
        utils._reconfigure_microbatch_calculator(0, None, 4, 2, 1)

        def forward(batch, model):
            if _bad():
                raise ValueError("of a microbatch")
            return model(batch[0].t()), lambda y: (y.mean(), y.detach())

        (model,) = make(F32, wrap=False)
        with ends("of a microbatch", "failed in a step"):
            get_forward_backward_func(None, 1)(forward, batch_of(0, 1), model, forward_only=False)


def _a_message_of_a_pipeline(mesh):
    """Receives cannot be left, either."""
    with split(1, dist.get_world_size()):
        waits = parallel_state.get_pipeline_model_parallel_rank() == BAD + 1 or dist.get_world_size() == 2
        with ends("of a stage", "activations from rank", waits=waits), failing_together():
            if _bad():
                raise ValueError("of a stage")
            if dist.get_world_size() == 2:
                p2p_communication.send_forward_recv_forward(None, True, (2, 2))
            elif waits:
                p2p_communication.recv_forward((2, 2))


def _before_a_schedule(mesh):
    """A batch that cannot be read, in the loop around it."""
    with pipeline(1, dist.get_world_size()):
        models = make(F32)
        step(models, F32)
        with ends("of a batch"), failing_together("training"):
            if _bad():
                raise ValueError("of a batch")
            step(models, F32)


def _everybody_at_once(mesh):
    """Nobody waits for anybody: the groups stay, and a late rank of the next step is waited for."""
    with split(dist.get_world_size()):
        group = parallel_state.get_tensor_model_parallel_group()
        for _ in range(2):
            with raises(ValueError, "a bad batch"), failing_together():
                raise ValueError("a bad batch")
            _late_but_there(group)


def _late_but_there(group):
    with failing_together():
        if _bad():
            time.sleep(5 * _failures.TICK)
        total = collectives.all_reduce(ones(1), group, "a late rank")
    assert total.item() == dist.get_world_size()


def _one_that_goes_on(mesh):
    """A failure that nobody waits for is none of the others', in this step or in the next one."""
    with split(dist.get_world_size()):
        group = parallel_state.get_tensor_model_parallel_group()
        with contextlib.suppress(ValueError), failing_together():
            if _bad():
                raise ValueError("of its own")
        _late_but_there(group)


def _a_generator_that_is_left(mesh):
    """By whoever asks it for values: that is no failure, and who is late is waited for."""
    with split(dist.get_world_size()):
        group = parallel_state.get_tensor_model_parallel_group()

        def values():
            with failing_together():
                yield 1
                yield 2

        generator = values()
        next(generator)
        if _bad():
            generator.close()
            time.sleep(5 * _failures.TICK)
        total = collectives.all_reduce(ones(1), group, "a sum")
        assert total.item() == dist.get_world_size()
        generator.close()


def _a_child_process(mesh):
    """What fails in a process that a rank forked is not the rank's failure."""
    with split(dist.get_world_size()):
        group = parallel_state.get_tensor_model_parallel_group()
        _late_but_there(group)
        if _bad():
            child = os.fork()
            if child == 0:
                with contextlib.suppress(ValueError), failing_together():
                    sys.excepthook(ValueError, ValueError("of a child"), None)
                    raise ValueError("of a child's step")
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            time.sleep(5 * _failures.TICK)
        _late_but_there(group)


class _Untold(Exception):
    def __str__(self):
        raise LookupError("of a text")


def _texts(mesh):
    """An error is told whatever its text is, and what is to be done only once."""
    for error, told in (
        (_Untold(), "_Untold: its text cannot be had, LookupError. Process"),
        (ValueError("\udcff"), r"ValueError: \udcff. Process"),
        (KeyboardInterrupt(), "KeyboardInterrupt. Process"),
        (ValueError(f"one of another{_failures._ADVICE}"), f"one of another{_failures._ADVICE}"),
    ):
        with split(dist.get_world_size()):
            found = None
            try:
                with failing_together():
                    if _bad():
                        raise error
                    collectives.all_reduce(ones(1), parallel_state.get_tensor_model_parallel_group(), "a sum")
            except BaseException as caught:
                found = caught
            if _bad():
                assert found is error, repr(found)
            else:
                assert told in str(found), str(found)
                assert str(found).count(_failures._ADVICE) == 1, str(found)


def _tensor_rank_of_a_pipeline(mesh):
    """All ranks of the model learn of it at the end of the step; the stage's neighbours of it at once."""
    if dist.get_world_size() < 4:
        return
    with pipeline(2, 2):
        models = make(F32)
        with ends("of a tensor rank"):
            _failing_step(models, "of a tensor rank")


def _one_copy_of_a_pipeline(mesh):
    """The other copy waits for its gradients."""
    if dist.get_world_size() < 4:
        return
    with pipeline(1, 2):
        models = make(F32)
        with ends("of a copy"):
            _failing_step(models, "of a copy")


def _failing_step(models, what):
    def forward(batch, model):
        if _bad():
            raise ValueError(what)
        return forward_step(batch, model)

    data = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    get_forward_backward_func(None, 2)(
        forward, batch_of(*data), models, forward_only=False, tensor_shape=(SEQUENCE, MICRO, HIDDEN)
    )


CASES = {
    "forward": _in_forward,
    "backward": _in_backward,
    "a sharded optimizer": _in_an_optimizer,
    "behind an optimizer": _behind_an_optimizer,
    "a batch norm": _in_a_batch_norm,
    "a schedule of one stage": _of_a_schedule_of_one_stage,
    "a message of a pipeline": _a_message_of_a_pipeline,
    "before a schedule": _before_a_schedule,
    "everybody": _everybody_at_once,
    "one that goes on": _one_that_goes_on,
    "a generator that is left": _a_generator_that_is_left,
    "a child process": _a_child_process,
    "texts of errors": _texts,
    "a tensor rank of a pipeline": _tensor_rank_of_a_pipeline,
    "one copy of a pipeline": _one_copy_of_a_pipeline,
}
