"""Cases of parallel_state: groups, wrong splits, ranks that differ, again and again."""

from __future__ import annotations

import datetime
import time

import torch
import torch.distributed as dist
from tp_common import gathered, raises, raises_everywhere, split

from apex.transformer import _groups as _groups_module
from apex.transformer import parallel_state as state
from apex.transformer._split import Split


def _groups(mesh):
    world, rank = dist.get_world_size(), dist.get_rank()
    for tensor, pipeline, options in (
        (1, 1, {}),
        (world, 1, {}),
        (1, world, {}),
        (2, world // 2, {}),
        (1, 2, dict(pipeline_model_parallel_split_rank_=1, use_fp8_=True)),
        (
            1,
            world,
            dict(pipeline_model_parallel_split_rank_=world - 1, default_backend="gloo", p2p_backend="gloo"),
        ),
    ):
        with split(tensor, pipeline, **options):
            table = Split(world, tensor, pipeline, None, options.get("pipeline_model_parallel_split_rank_"))
            kinds = {kind: getattr(table, f"{kind}_groups")() for kind in state._state.groups}
            assert len(kinds) >= 4 and ("amax" in kinds) == ("use_fp8_" in options)
            for kind, groups in kinds.items():
                mine = next(ranks for ranks in groups if rank in ranks)
                assert [*dist.get_process_group_ranks(state._state.groups[kind])] == mine, kind
                told = torch.tensor(float(rank))
                dist.all_reduce(told, group=state._state.groups[kind])
                assert told.item() == sum(mine), kind
            _check_places(table, rank)


def _check_places(table, rank):
    def place(groups):
        ranks = next(ranks for ranks in groups if rank in ranks)
        return ranks, ranks.index(rank)

    for name, groups in (("tensor_model", table.tensor_groups()), ("data", table.data_groups())):
        ranks, index = place(groups)
        assert getattr(state, f"get_{name}_parallel_world_size")() == len(ranks)
        assert getattr(state, f"get_{name}_parallel_rank")() == index
        assert getattr(state, f"get_{name}_parallel_src_rank")() == ranks[0]
    stages, stage = place(table.pipeline_groups())
    assert state.get_pipeline_model_parallel_rank() == stage
    assert state.get_pipeline_model_parallel_first_rank() == stages[0]
    assert state.get_pipeline_model_parallel_last_rank() == stages[-1]
    assert state.get_pipeline_model_parallel_next_rank() == stages[(stage + 1) % len(stages)]
    assert state.get_pipeline_model_parallel_prev_rank() == stages[stage - 1]
    assert state.is_pipeline_first_stage() == (stage == 0)
    assert state.is_pipeline_last_stage() == (stage == len(stages) - 1)
    for name in (
        *("embedding", "position_embedding"),
        *("encoder_relative_position_embedding", "decoder_relative_position_embedding"),
    ):
        groups = getattr(table, f"{name}_groups")()
        inside = any(rank in ranks for ranks in groups)
        assert getattr(state, f"is_rank_in_{name}_group")() == inside
        if inside:
            assert dist.get_rank(getattr(state, f"get_{name}_group")()) == place(groups)[1]
        else:
            with raises(RuntimeError, f"rank {rank} is in no {name.replace('_', ' ')} group"):
                getattr(state, f"get_{name}_group")()
    split_rank = table.split_rank
    assert state.is_pipeline_stage_before_split() == (split_rank is None or stage < split_rank)
    assert state.is_pipeline_stage_after_split() == (split_rank is None or stage >= split_rank)
    info = state.get_data_parallel_rank(), state.get_tensor_model_parallel_rank(), stage, None
    assert state.get_rank_info() == info


def _virtual(mesh):
    world = dist.get_world_size()
    with split(1, world, 2):
        first, last = state.is_pipeline_first_stage, state.is_pipeline_last_stage
        assert state.get_virtual_pipeline_model_parallel_world_size() == 2
        assert state.get_virtual_pipeline_model_parallel_rank() == 0
        assert first() == first(True) and not last()
        assert state.is_rank_in_embedding_group() == first(True)
        assert state.is_rank_in_embedding_group(ignore_virtual=True) == (first(True) or last(True))
        state.set_virtual_pipeline_model_parallel_rank(1)
        assert last() == last(True) and not first()
        assert state.is_rank_in_embedding_group() == last(True)
    assert state.get_virtual_pipeline_model_parallel_rank() is None


def _wrong(mesh):
    """Named on every rank; afterwards a right split is made as ever."""
    world = dist.get_world_size()
    for arguments, options, words in (
        ((3,), {}, "cannot be split"),
        ((2 * world,), {}, "cannot be split"),
        ((world, 2), {}, "cannot be split"),
        ((1, 1, 2), {}, "without a pipeline"),
        ((1, 2, None, 2), {}, "split rank 2"),
        ((1,), dict(default_backend="no_such"), "no backend 'no_such'"),
        ((1,), dict(p2p_backend=7), "no backend 7"),
    ):
        before = len(dist.distributed_c10d._world.pg_map)
        with raises_everywhere(RuntimeError, "initialize_model_parallel", words):
            state.initialize_model_parallel(*arguments, **options)
        assert state.is_unitialized() and len(dist.distributed_c10d._world.pg_map) == before
    with raises_everywhere(ImportError, "ucc"):
        state.initialize_model_parallel(p2p_backend="ucc")
    with split(world):
        pass


def _ranks_that_differ(mesh):
    rank = dist.get_rank()
    with raises_everywhere(RuntimeError, "the ranks differ", '"tensor": 2', "ranks [0]: "):
        state.initialize_model_parallel(2 if rank == 0 else 1)
    with raises_everywhere(RuntimeError, "the ranks differ", '"pipeline": 0'):
        state.initialize_model_parallel(1, 0 if rank == 1 else 1)
    with split(1):
        with raises_everywhere(RuntimeError, "already initialized; call destroy_model_parallel first"):
            state.initialize_model_parallel(1)
        assert state.get_tensor_model_parallel_world_size() == 1
    if rank == 0:  # has groups, and the others none
        kept = state._state
        state._state = type(kept)()
        state._state.groups["data"] = dist.group.WORLD
    with raises_everywhere(RuntimeError, "the ranks differ", '"initialized": true'):
        state.initialize_model_parallel(1)
    if rank == 0:
        state._state = kept


def _a_rank_that_does_not_call(mesh):
    """The others are told which call they wait in, at the end of the timeout; later all call, and it goes on."""
    store = dist.distributed_c10d._get_default_store()
    timeout = store.timeout
    if dist.get_rank():
        store.set_timeout(datetime.timedelta(seconds=2))
        try:
            with raises(RuntimeError, "initialize_model_parallel", f"rank {dist.get_rank()} waited in vain"):
                state.initialize_model_parallel(1)
        finally:
            store.set_timeout(timeout)
    gathered(None)
    with split(2):
        assert state.get_tensor_model_parallel_world_size() == 2


def _again(mesh):
    """Nothing is left of groups that were destroyed."""
    before = len(dist.distributed_c10d._world.pg_map)
    for tensor in (1, 2) * 6:
        with split(tensor, 1, None, 0):
            assert state.get_tensor_model_parallel_world_size() == tensor
            state.set_tensor_model_parallel_world_size(16)
            state.set_tensor_model_parallel_rank(9)
            assert state.get_tensor_model_parallel_world_size() == 16
        assert state.is_unitialized() and state.get_pipeline_model_parallel_split_rank() is None
        assert len(dist.distributed_c10d._world.pg_map) == before
    state.destroy_model_parallel()


def _nobody_is_left_behind(mesh):
    """Nobody returns, and may end the groups, before all have made theirs: that would break the others' connections."""
    make = _groups_module._make_groups

    def slowly(*args):
        make(*args)
        time.sleep(0.5)

    begin = time.monotonic()
    if dist.get_rank() == 1:
        _groups_module._make_groups = slowly
    try:
        with split(1):
            assert time.monotonic() - begin > 0.4
    finally:
        _groups_module._make_groups = make


def _a_group_that_cannot_be_made(mesh):
    """The error comes through, elsewhere that of the wait; no group is left, and it goes on."""
    before, new_group = len(dist.distributed_c10d._world.pg_map), dist.new_group

    def fails(ranks=None, **kwargs):
        if "pipeline" in kwargs["group_desc"]:
            raise MemoryError("no memory")
        return new_group(ranks, **kwargs)

    dist.new_group = fails
    try:
        with raises_everywhere(MemoryError, "no memory"):
            state.initialize_model_parallel(2)
    finally:
        dist.new_group = new_group
    assert state.is_unitialized() and len(dist.distributed_c10d._world.pg_map) == before
    with split(2):
        pass


CASES = {
    "groups": _groups,
    "virtual": _virtual,
    "wrong splits": _wrong,
    "ranks that differ": _ranks_that_differ,
    "a rank that does not call": _a_rank_that_does_not_call,
    "again": _again,
    "nobody is left behind": _nobody_is_left_behind,
    "a group that cannot be made": _a_group_that_cannot_be_made,
}
