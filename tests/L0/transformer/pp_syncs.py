"""Cases of what goes on around the passes: when gradients are reduced and parameters gathered, which microbatches keep
their activations, what is given up, utilities over ranks."""

from __future__ import annotations

import contextlib
import io
import math
import weakref

import torch
import torch.distributed as dist
from pp_model import MICRO, SAMPLES, batch_of, forward_step, losses_of, make, pipeline, step
from torch.nn.parallel import DistributedDataParallel
from tp_common import equal, gathered
from tp_model import HIDDEN, SEQUENCE, _whole

from apex.transformer import parallel_state
from apex.transformer.pipeline_parallel import get_forward_backward_func, utils
from apex.transformer.pipeline_parallel.schedules import common

F32 = torch.float32


class Watch:
    """What a step does: (what, part) where gradients come, contexts are held, functions are called."""

    def __init__(self, models):
        self.events, self.held, self._models = [], False, models
        for chunk, model in enumerate(models):
            param = next(iter(model.parameters()))
            param.register_post_accumulate_grad_hook(
                lambda p, c=chunk: self.note("held" if self.held else "free", c)
            )

    def note(self, what, chunk=None):
        self.events.append((what, chunk))

    @contextlib.contextmanager
    def handler(self):
        assert not self.held
        self.held = True
        try:
            yield
        finally:
            self.held = False

    def called(self, what):
        """A function that notes whose parameters it is given."""

        def function(params=None):
            mine = None if params is None else [*map(id, params)]
            chunk = next((i for i, m in enumerate(self._models) if mine == [*map(id, m.parameters())]), None)
            self.note(what, chunk)

        return function


def _reduced_once(mesh):
    """Within the handler's context but for the last backward pass of each part; not left behind."""
    world = dist.get_world_size()
    for chunks in (1, 2):
        with pipeline(1, world, chunks):
            models = make(F32)
            watch = Watch(models)
            step(models, F32, custom_sync_context_handler=watch.handler)
            microbatches = utils.get_num_microbatches()
            for chunk in range(chunks):
                told = [what for what, c in watch.events if c == chunk]
                assert told == ["held"] * (microbatches - 1) + ["free"], told
            assert not watch.held
            with contextlib.suppress(RuntimeError, ValueError):
                step(models, F32, custom_sync_context_handler=watch.handler, batch=[torch.zeros(0)])
            assert not watch.held
    with pipeline(1, 1):
        models = make(F32, wrap=False)
        watch = Watch(models)
        step(models, F32, custom_sync_context_handler=watch.handler)
        assert [what for what, _ in watch.events] == ["held"] * (utils.get_num_microbatches() - 1) + ["free"]


def _functions_that_reduce(mesh):
    """Of one part: behind all passes, but on the first stage. Of several: each part's once, behind its last pass."""
    world = dist.get_world_size()
    with pipeline(1, world):
        models = make(F32)
        watch = Watch(models)
        step(
            models,
            F32,
            custom_sync_context_handler=watch.handler,
            custom_grad_sync_func=watch.called("reduce"),
        )
        passes = ["held"] * utils.get_num_microbatches()
        first = parallel_state.is_pipeline_first_stage()
        assert [what for what, _ in watch.events] == ([*passes[1:], "free"] if first else [*passes, "reduce"])
    with pipeline(1, world, 2):
        models = make(F32)
        watch = Watch(models)
        step(
            *(models, F32),
            custom_sync_context_handler=watch.handler,
            custom_grad_sync_func=watch.called("reduce"),
            custom_param_sync_func=watch.called("gather"),
        )
        reduced = [event for event in watch.events if event[0] == "reduce"]
        assert reduced == [("reduce", 1), ("reduce", 0)]
        assert [event for event in watch.events if event[0] == "gather"] == [("gather", 0), ("gather", 1)]
        assert watch.events[:2] == [("gather", 0), ("gather", 1)]
        for chunk in (0, 1):
            last = max(
                i for i, event in enumerate(watch.events) if event in (("held", chunk), ("free", chunk))
            )
            where = watch.events.index(("reduce", chunk))
            assert where > last
            if chunk:  # as many backward passes later as there are stages before
                between = [what for what, _ in watch.events[last + 1 : where]]
                assert between == ["held"] * parallel_state.get_pipeline_model_parallel_rank()


def _parameters_that_are_gathered_late(mesh):
    """Of three parts: the third one's while the second one works, before it works itself."""
    world = dist.get_world_size()
    if world != 2:
        return
    with pipeline(1, 2, 3):
        events = []
        # Eight blocks over six parts: two belong to none, which is nothing to this case.
        models = make(F32)
        for chunk, model in enumerate(models):
            model.register_forward_pre_hook(lambda *_, c=chunk: events.append(("forward", c)))
        watch = Watch(models)
        watch.events = events
        step(models, F32, custom_param_sync_func=watch.called("gather"))
        assert events[:2] == [("gather", 0), ("gather", 1)]
        where, first = events.index(("gather", 2)), events.index(("forward", 2))
        assert events.count(("gather", 2)) == 1 and where < first
        assert ("forward", 0) in events[:where] and events[where:first].count(("forward", 1)) >= 1


def _wrapped_models(mesh):
    """DistributedDataParallel: the mean over data parallel ranks, bit for bit, of one, two and no reduced passes."""
    world = dist.get_world_size()
    stages = world // 2
    for chunks in (1, 2) if stages > 1 else (1,):
        for unused in (False, True):
            with pipeline(1, stages, chunks):
                alone = make(F32, wrap=False)
                losses_of(step(alone, F32))
                group = parallel_state.get_data_parallel_group()
                wanted = {}
                for model in alone:
                    for name, p in model.named_parameters():
                        mean = p.grad.clone()
                        dist.all_reduce(mean, group=group)
                        wanted[name] = mean / 2
                wrapped = [
                    DistributedDataParallel(model, process_group=group, find_unused_parameters=unused)
                    for model in make(F32, wrap=False)
                ]
                for _ in (1, 2):
                    step(wrapped, F32)
                    found = {
                        n: p.grad
                        for model in utils.unwrap_model(wrapped)
                        for n, p in model.named_parameters()
                    }
                    for name, grad in found.items():
                        equal(grad, wanted[name])
                    for model in wrapped:
                        assert model.require_backward_grad_sync
                        model.zero_grad()


def _microbatches_that_keep_activations(mesh):
    """Of those that a stage keeps at a time, the first ones are told not to be checkpointed."""
    world = dist.get_world_size()
    for chunks in (1, 2):
        with pipeline(1, world, chunks):
            told = []

            def noting(batch, model, checkpointed, told=told):
                told.append(checkpointed)
                return forward_step(batch, model)

            get_forward_backward_func(chunks if chunks > 1 else None, world)(
                *(noting, batch_of(0, 1), make(F32)),
                forward_only=False,
                tensor_shape=(SEQUENCE, MICRO, HIDDEN),
                num_micro_batches_with_partial_activation_checkpoints=1,
            )
            ahead = world - parallel_state.get_pipeline_model_parallel_rank() - 1
            window = min(ahead if chunks == 1 else 2 * ahead + world, SAMPLES // MICRO * chunks) + 1
            assert told == [k % window != 0 for k in range(SAMPLES // MICRO * chunks)]


def _memory_is_given_up(mesh):
    """deallocate_pipeline_outputs: while a microbatch is kept, its output has no memory; otherwise it has."""
    world = dist.get_world_size()
    with pipeline(1, world):
        for freed in (False, True):
            kept = []

            def noting(batch, model, kept=kept, freed=freed):
                output, loss_of = forward_step(batch, model)
                alive = [ref().numel() for ref in kept if ref() is not None]
                if not parallel_state.is_pipeline_last_stage():
                    assert all((n == 1) == freed for n in alive), alive
                kept.append(weakref.ref(output))
                return output, loss_of

            get_forward_backward_func(None, world)(
                *(noting, batch_of(0, 1), make(F32)),
                forward_only=False,
                tensor_shape=(SEQUENCE, MICRO, HIDDEN),
                deallocate_pipeline_outputs=freed,
            )
            assert len(kept) == SAMPLES // MICRO and not any(ref() is not None for ref in kept[:-1])


def _batches_that_grow(mesh):
    """The calculator says how many microbatches each step has, and both stages follow."""
    world = dist.get_world_size()
    with pipeline(1, world):
        utils._reconfigure_microbatch_calculator(0, [4, 4, 16], 16, MICRO, 1)
        models, consumed, counts = make(F32), 0, []
        while consumed < 40:
            utils.update_num_microbatches(consumed)
            found = losses_of(step(models, F32))
            assert (
                len(found) == utils.get_num_microbatches() == utils.get_current_global_batch_size() // MICRO
            )
            counts.append(len(found))
            consumed += utils.get_current_global_batch_size()
        assert counts == [2, 2, 4, 8, 8]


def _utilities(mesh):
    """Means, norms and prints over the ranks of a model."""
    world, rank = dist.get_world_size(), dist.get_rank()
    with pipeline(2, world // 2):
        models = make(F32, sequence=True)
        squares = {}
        for model in models:
            for name, p in model.named_parameters():
                if not getattr(p, "sequence_parallel_enabled", False):
                    squares[name] = _whole(p, p.detach()).double().square().sum().item()
                else:
                    squares[name] = p.detach().double().square().sum().item()
        everyone = {name: value for part in gathered(squares) for name, value in part.items()}
        norm = utils.calc_params_l2_norm(models, bf16=False)
        assert math.isclose(norm, math.sqrt(sum(everyone.values())), rel_tol=1e-6)
        shared = next(iter(models[0].parameters()))
        shared.shared = True
        assert not utils.param_is_not_shared(shared)
        assert utils.calc_params_l2_norm(models, bf16=True) < norm
    with pipeline(1, 1):
        losses = [torch.tensor(float(rank)), torch.tensor([2.0 * rank])]
        mean = (world - 1) / 2
        assert utils.average_losses_across_data_parallel_group(losses).tolist() == [mean, 2 * mean]
        assert common._calc_number_of_params([torch.nn.Linear(3, 2), torch.nn.Linear(1, 1)]) == 10
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            utils.print_rank_0("first")
            utils.print_rank_last("last")
            utils.report_memory("here")
        lines = told.getvalue().splitlines()
        assert ("first" in lines) == (rank == 0) and ("last" in lines) == (
            rank == world - 1
        ) == utils.is_last_rank()
        assert any(line.startswith(f"[Rank {rank}] here memory (MB)") for line in lines) == (rank == 0)


CASES = {
    "reduced once": _reduced_once,
    "functions that reduce": _functions_that_reduce,
    "parameters that are gathered late": _parameters_that_are_gathered_late,
    "wrapped models": _wrapped_models,
    "microbatches that keep activations": _microbatches_that_keep_activations,
    "memory that is given up": _memory_is_given_up,
    "batches that grow": _batches_that_grow,
    "utilities over ranks": _utilities,
}
