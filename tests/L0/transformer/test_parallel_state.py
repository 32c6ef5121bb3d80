"""The table of ranks, against tables written by hand; what parallel_state says without processes, and with one."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

from apex.transformer import parallel_state
from apex.transformer._split import Split

# world, tensor, pipeline, split rank, then groups by kind.
SPLITS = [
    (
        dict(world=1),
        dict(
            tensor=[[0]],
            pipeline=[[0]],
            data=[[0]],
            model=[[0]],
            amax=[[0]],
            embedding=[[0]],
            position_embedding=[[0]],
            encoder_relative_position_embedding=[[0]],
            decoder_relative_position_embedding=[[0]],
        ),
    ),
    (
        dict(world=8, tensor=2, pipeline=2),
        dict(
            tensor=[[0, 1], [2, 3], [4, 5], [6, 7]],
            pipeline=[[0, 4], [1, 5], [2, 6], [3, 7]],
            data=[[0, 2], [1, 3], [4, 6], [5, 7]],
            model=[[0, 1, 4, 5], [2, 3, 6, 7]],
            amax=[[0, 1, 2, 3], [4, 5, 6, 7]],
            embedding=[[0, 4], [1, 5], [2, 6], [3, 7]],
            position_embedding=[[0], [1], [2], [3]],
            encoder_relative_position_embedding=[[0], [1], [2], [3]],
            decoder_relative_position_embedding=[[0], [1], [2], [3]],
        ),
    ),
    (
        dict(world=16, tensor=2, pipeline=4),
        dict(
            tensor=[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
            pipeline=[[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
            data=[[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
            model=[[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]],
            embedding=[[0, 12], [1, 13], [2, 14], [3, 15]],
        ),
    ),
    (
        dict(world=8, pipeline=4, split_rank=2),  # encoder and decoder
        dict(
            tensor=[[0], [1], [2], [3], [4], [5], [6], [7]],
            pipeline=[[0, 2, 4, 6], [1, 3, 5, 7]],
            data=[[0, 1], [2, 3], [4, 5], [6, 7]],
            model=[[0, 2, 4, 6], [1, 3, 5, 7]],
            embedding=[[0, 4, 6], [1, 5, 7]],
            position_embedding=[[0, 4], [1, 5]],
            encoder_relative_position_embedding=[[0, 2], [1, 3]],
            decoder_relative_position_embedding=[[4, 6], [5, 7]],
        ),
    ),
    (
        dict(world=4, pipeline=4, split_rank=3),  # the decoder is the last stage
        dict(
            embedding=[[0, 3]],
            position_embedding=[[0, 3]],
            encoder_relative_position_embedding=[[0, 1, 2]],
            decoder_relative_position_embedding=[[3]],
        ),
    ),
    (
        dict(world=4, tensor=2, pipeline=2, split_rank=0),  # a decoder alone
        dict(
            embedding=[[0, 2], [1, 3]],
            position_embedding=[[0], [1]],
            encoder_relative_position_embedding=[[], []],
            decoder_relative_position_embedding=[[0, 2], [1, 3]],
        ),
    ),
    (
        dict(world=64, tensor=8, pipeline=4, split_rank=1),
        dict(
            tensor=[[8 * i + j for j in range(8)] for i in range(8)],
            pipeline=[[i, 16 + i, 32 + i, 48 + i] for i in range(16)],
            data=[[16 * s + t, 16 * s + t + 8] for s in range(4) for t in range(8)],
            model=[
                [0, 1, 2, 3, 4, 5, 6, 7, *range(16, 24), *range(32, 40), *range(48, 56)],
                [8, 9, 10, 11, 12, 13, 14, 15, *range(24, 32), *range(40, 48), *range(56, 64)],
            ],
            embedding=[[i, 16 + i, 48 + i] for i in range(16)],
            position_embedding=[[i, 16 + i] for i in range(16)],
            encoder_relative_position_embedding=[[i] for i in range(16)],
            decoder_relative_position_embedding=[[16 + i, 32 + i, 48 + i] for i in range(16)],
        ),
    ),
]


@pytest.mark.parametrize("sizes, groups", SPLITS, ids=str)
def test_table(sizes, groups):
    split = Split(**sizes)
    for kind, wanted in groups.items():
        assert getattr(split, f"{kind}_groups")() == wanted, kind


@pytest.mark.parametrize("world", [1, 2, 6, 8, 24, 64])
def test_every_rank_is_in_one_group_of_each_kind(world):
    for tensor, pipeline in itertools.product(range(1, world + 1), repeat=2):
        if world % (tensor * pipeline):
            continue
        split = Split(world, tensor, pipeline)
        for kind, size in (
            ("tensor", tensor),
            ("pipeline", pipeline),
            ("data", split.data),
            ("model", tensor * pipeline),
            ("amax", tensor * split.data),
        ):
            groups = getattr(split, f"{kind}_groups")()
            assert sorted(itertools.chain(*groups)) == list(range(world))
            assert {len(group) for group in groups} == {size}
        # A rank is told by its places in three of them.
        places = {
            rank: tuple(
                group.index(rank)
                for kind in ("tensor", "pipeline", "data")
                for group in getattr(split, f"{kind}_groups")()
                if rank in group
            )
            for rank in range(world)
        }
        assert len(set(places.values())) == world


@pytest.mark.parametrize(
    "sizes, words",
    [
        (dict(world=8, tensor=3), "8 ranks cannot be split"),
        (dict(world=2, tensor=4), "2 ranks cannot be split"),
        (dict(world=8, tensor=4, pipeline=4), "tensor x pipeline parallel size, 4 x 4"),
        (dict(world=8, tensor=0), "tensor parallel size 0"),
        (dict(world=8, pipeline=-2), "pipeline parallel size -2"),
        (dict(world=8, tensor=2.0), "tensor parallel size 2.0"),
        (dict(world=8, tensor=True), "tensor parallel size True"),
        (dict(world=8, pipeline=None), "pipeline parallel size None"),
        (dict(world=8, pipeline=2, virtual=0), "virtual parallel size 0"),
        (dict(world=8, virtual=2), "without a pipeline"),
        (dict(world=8, pipeline=4, split_rank=4), "from 0 to 3"),
        (dict(world=8, pipeline=4, split_rank=-1), "from 0 to 3"),
        (dict(world=8, split_rank=1), "from 0 to 0"),
    ],
    ids=str,
)
def test_no_such_split(sizes, words):
    with pytest.raises(RuntimeError, match=words):
        Split(**sizes)


def test_without_groups():
    assert parallel_state.is_unitialized() and not parallel_state.model_parallel_is_initialized()
    assert parallel_state.get_rank_info() == (0, 0, 0, 0)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        parallel_state.initialize_model_parallel()
    for name in (
        *("get_model_parallel_group", "get_tensor_model_parallel_group", "get_embedding_group"),
        *(
            "get_tensor_model_parallel_world_size",
            "get_pipeline_model_parallel_rank",
            "is_pipeline_last_stage",
        ),
        *("get_data_parallel_rank", "get_data_parallel_src_rank", "get_pipeline_model_parallel_next_rank"),
    ):
        with pytest.raises(RuntimeError, match="call initialize_model_parallel first"):
            getattr(parallel_state, name)()
    parallel_state.destroy_model_parallel()


def test_setters_speak_without_groups():
    try:
        parallel_state.set_tensor_model_parallel_world_size(8)
        parallel_state.set_tensor_model_parallel_rank(0)
        parallel_state.set_pipeline_model_parallel_world_size(4)
        parallel_state.set_pipeline_model_parallel_rank(3)
        assert parallel_state.get_tensor_model_parallel_world_size() == 8
        assert parallel_state.get_tensor_model_parallel_rank() == 0
        assert parallel_state.is_pipeline_last_stage() and not parallel_state.is_pipeline_first_stage()
        parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
        assert not parallel_state.is_pipeline_last_stage() and parallel_state.is_pipeline_last_stage(True)
        parallel_state.set_pipeline_model_parallel_split_rank(3)
        assert (
            parallel_state.is_pipeline_stage_after_split() and not parallel_state.is_pipeline_stage_at_split()
        )
        assert parallel_state.is_pipeline_stage_before_split(2)
        parallel_state.set_pipeline_model_parallel_rank(2)
        assert parallel_state.is_pipeline_stage_at_split()
    finally:
        parallel_state.destroy_model_parallel()
    assert parallel_state.get_pipeline_model_parallel_split_rank() is None
    assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
@pytest.mark.parametrize("world", [8, 1024])
def test_on_fake_ranks(world):
    """torch's process group without processes: groups of 1,024 ranks are those of the table."""
    import torch.testing._internal.distributed.fake_pg as fake

    for rank in (0, world // 2 + 1, world - 1):
        dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=world)
        try:
            parallel_state.initialize_model_parallel(4, 2)
            split = Split(world, 4, 2)
            for kind in ("tensor", "pipeline", "data"):
                group = getattr(
                    parallel_state, f"get_{kind}{'_model' if kind != 'data' else ''}_parallel_group"
                )()
                assert [*dist.get_process_group_ranks(group)] in getattr(split, f"{kind}_groups")()
                assert rank in dist.get_process_group_ranks(group)
            parallel_state.destroy_model_parallel()
        finally:
            dist.destroy_process_group()
