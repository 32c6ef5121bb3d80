"""Cases of pipelines that fail: every rank of the model says who and why, none waits, and the next step runs."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from pp_model import MICRO, batch_of, forward_step, grads_of, losses_of, make, pipeline, step
from tp_common import equal, gathered, raises, raises_everywhere
from tp_model import HIDDEN, SEQUENCE

from apex.transformer import parallel_state
from apex.transformer.pipeline_parallel import get_forward_backward_func, utils
from apex.transformer.pipeline_parallel.schedules import _run

F32 = torch.float32


@contextlib.contextmanager
def _models(chunks=1, **options):
    """A pipeline of all ranks, and its parts here."""
    with pipeline(1, dist.get_world_size(), chunks, **options):
        yield make(F32)


def _again(models, **options):
    """The next step is as the first one of fresh models."""
    for model in models:
        model.zero_grad()
    found = losses_of(step(models, F32, **options)), grads_of(models)
    fresh = make(F32)
    equal(found, (losses_of(step(fresh, F32, **options)), grads_of(fresh)))


def _a_stage_that_raises(mesh):
    """In a forward pass, in the loss, in a backward pass: its own error there, elsewhere one that names it."""
    last = dist.get_world_size() - 1

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("a backward pass")

    def broken_loss(output):
        raise KeyError("the loss")

    def failing(rank, where):
        calls = []

        def run(batch, model):
            calls.append(1)
            output, loss_of = forward_step(batch, model)
            if dist.get_rank() != rank:
                return output, loss_of
            if where == "a forward pass" and len(calls) == 3:
                raise KeyError(where)
            third = where == "a backward pass" and len(calls) == 3
            return Broken.apply(output) if third else output, broken_loss if where == "the loss" else loss_of

        return run

    for chunks in (1, 2):
        with _models(chunks) as models:
            run = get_forward_backward_func(chunks if chunks > 1 else None, last + 1)
            for rank, where in (
                *((0, "a forward pass"), (last, "the loss"), (0, "a backward pass")),
                *((last, "a forward pass"), (last, "a backward pass")),
            ):
                own = dist.get_rank() == rank
                elsewhere = (
                    f"another rank, and gradients of this one are of no use: rank {rank} (stage {rank}): KeyError",
                )
                with raises_everywhere(KeyError if own else RuntimeError, where, *(() if own else elsewhere)):
                    run(
                        *(failing(rank, where), batch_of(0, 1), models),
                        forward_only=False,
                        tensor_shape=(SEQUENCE, MICRO, HIDDEN),
                    )
            _again(models)


def _a_wrong_shape(mesh):
    """Of what a stage sends: its shape, its dtype, how many tensors, and none."""
    world = dist.get_world_size()
    sender = world - 2

    def changed(change):
        def run(batch, model):
            output, loss_of = forward_step(batch, model)
            return (change(output) if dist.get_rank() == sender else output), loss_of

        return run

    run = get_forward_backward_func
    with _models() as models:
        for change, told in (
            (lambda x: x[:-1], f"({SEQUENCE - 1}, {MICRO}, {HIDDEN})"),
            (lambda x: x.half(), "torch.float16"),
            (lambda x: [x, x], "tensor_shape"),
            (lambda x: None, "NoneType"),
        ):
            with raises_everywhere(
                RuntimeError, f"stage {sender} sends", told, "tensor_shape, decoder_sequence_length"
            ):
                run(None, world)(
                    *(changed(change), batch_of(0, 1), models),
                    forward_only=False,
                    tensor_shape=(SEQUENCE, MICRO, HIDDEN),
                )
        _again(models)


def _arguments_that_do_not_fit(mesh):
    world = dist.get_world_size()
    with _models() as models:
        for options, kind, told in (
            (dict(tensor_shape=None), RuntimeError, "(sequence, micro batch, hidden) is required"),
            (
                dict(tensor_shape=(SEQUENCE, HIDDEN)),
                RuntimeError,
                "(sequence, micro batch, hidden) is required",
            ),
            (
                dict(batch=[x[:-1] for x in batch_of(0, 1)]),
                (ValueError, RuntimeError),
                "no whole microbatch 7",
            ),
        ):
            with raises_everywhere(kind, told):
                step(models, F32, **options)
        with raises_everywhere(RuntimeError, "one module is required, of 2 parts"):
            step([*models, *models], F32)
        _again(models)
    with _models(2, samples=2 * MICRO * (world + 1) // 2) as models:
        if (world + 1) % 2 == 0 or utils.get_num_microbatches() % world:
            with raises_everywhere(RuntimeError, "divisible by the pipeline size"):
                step(models, F32)
    with _models(2) as models:
        for wrong, told in ((models[:1], "1 parts a stage"), (models[0], "a list of this stage's parts")):
            with raises_everywhere(RuntimeError, told):
                step(wrong, F32)
    with raises_everywhere(ValueError, "not divisible by micro batch size"):
        utils._reconfigure_microbatch_calculator(0, None, 3, 2, 1)


def _ranks_that_differ(mesh):
    """In microbatches, in shapes, in what they are to do."""
    world, mine = dist.get_world_size(), dist.get_rank() == 1
    with _models() as models:
        for options in (
            dict(tensor_shape=(SEQUENCE, MICRO, HIDDEN + mine)),
            dict(forward_only=mine),
            dict(dtype=torch.float64 if mine else torch.float32),
        ):
            with raises_everywhere(RuntimeError, "the ranks' schedules differ", "ranks [1]: "):
                step(models, **{"dtype": F32, **options})
        utils._reconfigure_microbatch_calculator(0, None, MICRO * (5 if mine else 7), MICRO, 1)
        with raises_everywhere(
            RuntimeError, "the ranks' schedules differ", "'microbatches': 5", "'microbatches': 7"
        ):
            step(models, F32)
        utils._reconfigure_microbatch_calculator(0, None, MICRO * world, MICRO, 1)
        _again(models)


def _messages_that_fail_behind_a_pass(mesh):
    """What a pass raised is told, and not only that its neighbours are gone then."""
    exchange = _run.p2p.exchange

    def lost(*_):
        raise RuntimeError("lost")

    def broken(batch, model):
        _run.p2p.exchange = lost
        raise KeyError("the cause")

    with _models() as models:
        run = get_forward_backward_func(None, dist.get_world_size())
        options = dict(forward_only=False, tensor_shape=(SEQUENCE, MICRO, HIDDEN))
        try:
            if parallel_state.is_pipeline_first_stage():
                with raises(KeyError, "the cause"):
                    run(broken, batch_of(0, 1), models, **options)
            else:
                _run.p2p.exchange = lost
                with raises(RuntimeError, "lost"):
                    run(forward_step, batch_of(0, 1), models, **options)
        finally:
            _run.p2p.exchange = exchange
        _again(models)


def _before_a_start(mesh):
    """Groups or microbatches that are not there."""
    with raises(RuntimeError, "initialize_model_parallel"):
        get_forward_backward_func(None, 1)
    utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None
    with raises(RuntimeError, "setup_microbatch_calculator"):
        utils.get_num_microbatches()
    utils.setup_microbatch_calculator(0, None, 8, 2, 1)
    with raises(RuntimeError, "set up already"):
        utils.setup_microbatch_calculator(0, None, 8, 2, 1)


def _groups_wait_as_long_as_the_world(mesh):
    """torch's new groups would wait for half an hour."""
    from apex.parallel.process_groups import timeout_of

    with pipeline(1, dist.get_world_size()):
        for group in parallel_state._state.groups.values():
            assert timeout_of(group) == timeout_of() != dist.constants.default_pg_timeout


def _settings_are_forgotten_with_the_groups(mesh):
    with _models() as models:
        step(models, F32)
        group = parallel_state.get_model_parallel_group()
        assert _run._agreed[0] is group and len(_run._agreed[1]) == 1
        step(models, F32)
        assert len(_run._agreed[1]) == 1
    with _models() as models:
        step(models, F32)
        assert _run._agreed[0] is parallel_state.get_model_parallel_group()
    assert gathered(True)


CASES = {
    "a stage that raises": _a_stage_that_raises,
    "a wrong shape": _a_wrong_shape,
    "arguments that do not fit": _arguments_that_do_not_fit,
    "ranks that differ": _ranks_that_differ,
    "messages that fail behind a pass": _messages_that_fail_behind_a_pass,
    "before a start": _before_a_start,
    "timeouts of groups": _groups_wait_as_long_as_the_world,
    "settings of groups that ended": _settings_are_forgotten_with_the_groups,
}
