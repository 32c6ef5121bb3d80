"""Process groups of tensor, pipeline and data parallel training, and this rank's place in them.

`initialize_model_parallel` makes them, `destroy_model_parallel` ends them; every rank calls both. Which ranks make a
group is written in `apex.transformer._split`. What asks for a group raises RuntimeError where there is none.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from apex.transformer._groups import (
    INITIALIZE,
    State,
    end_groups,
    initialize,
)
from apex.transformer._groups import ExperimentalWarning as ExperimentalWarning
from apex.transformer._groups import check_torch_ucc_availability as check_torch_ucc_availability
from apex.transformer.log_util import get_transformer_logger

_logger = get_transformer_logger(__name__)

_state = State()


def is_unitialized() -> bool:
    """Whether there are no groups. (Spelled as in public apex.)"""
    return not _state.groups


def model_parallel_is_initialized() -> bool:
    """Whether there are groups."""
    return bool(_state.groups)


def initialize_model_parallel(
    tensor_model_parallel_size_: int = 1,
    pipeline_model_parallel_size_: int = 1,
    virtual_pipeline_model_parallel_size_: int | None = None,
    pipeline_model_parallel_split_rank_: int | None = None,
    use_fp8_: bool = False,
    init_mpi_proc_group: bool = False,
    *,
    default_backend: str | None = None,
    p2p_backend: str | None = None,
) -> None:
    """Makes the process groups; every rank calls it, with the same arguments, after init_process_group.

    Of 16 ranks with tensor size 2 and pipeline size 4, ranks 0 and 1 share each layer, ranks 0, 4, 8 and 12 are the
    stages of a pipeline, and ranks 0 and 2 train the same part of the model on different data. Ranks of one tensor
    parallel group are neighbours, so that they lie in one machine.

    Args:
        tensor_model_parallel_size_: ranks that share each layer.
        pipeline_model_parallel_size_: stages of the pipeline.
        virtual_pipeline_model_parallel_size_: parts of the model that each stage holds, of interleaved schedules.
        pipeline_model_parallel_split_rank_: the decoder's first stage, in models with encoder and decoder.
        use_fp8_: also make the groups over which scales of fp8 tensors are agreed on.
        init_mpi_proc_group: also make an MPI group of all ranks.
        default_backend: of all groups but the pipeline's; None: that of init_process_group.
        p2p_backend: of the pipeline's.

    Raises:
        RuntimeError: on every rank, before any group is made: sizes that do not divide the world size, a virtual size
            without a pipeline, a split rank that is no stage, a backend that this torch lacks, groups that are there
            already, or ranks that differ in one of these. A rank that does not call ends the others' by the timeout of
            the process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(f"{INITIALIZE}: call torch.distributed.init_process_group first")
    sizes: dict[str, Any] = dict(
        tensor=tensor_model_parallel_size_,
        pipeline=pipeline_model_parallel_size_,
        virtual=virtual_pipeline_model_parallel_size_,
        split_rank=pipeline_model_parallel_split_rank_,
    )
    split, _state.groups, _state.ranks = initialize(
        *(sizes, bool(use_fp8_), bool(init_mpi_proc_group), default_backend, p2p_backend),
        initialized=model_parallel_is_initialized(),
    )
    _state.split_rank, _state.virtual_size = split.split_rank, split.virtual
    _state.virtual_rank = None if split.virtual is None else 0
    if dist.get_rank() == 0:
        _logger.info(
            f"tensor parallel size {split.tensor}, pipeline {split.pipeline}, data parallel {split.data}"
        )


def destroy_model_parallel() -> None:
    """Ends the groups, and forgets what the setters said; every rank calls it. Without groups it does no more."""
    global _state
    groups, _state = _state.groups, State()
    end_groups(groups)


def get_rank_info() -> tuple[int, int, int, int | None]:
    """This rank's data, tensor, pipeline and virtual pipeline rank, for logs; zeros where there are no groups."""
    if is_unitialized():
        return (0, 0, 0, 0)
    return (
        get_data_parallel_rank(),
        get_tensor_model_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_virtual_pipeline_model_parallel_rank(),
    )


def _group(kind):
    try:
        return _state.groups[kind]
    except KeyError:
        what = kind.replace("_", " ")
        raise RuntimeError(
            f"there are no model parallel groups: call {INITIALIZE} first"
            if is_unitialized()
            else f"rank {dist.get_rank()} is in no {what} group"
        ) from None


def _ranks(kind):
    _group("pipeline")
    return _state.ranks[kind]


def get_model_parallel_group() -> dist.ProcessGroup:
    """All ranks that hold one copy of the model together with this one."""
    return _group("model")


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that share layers with this one."""
    return _group("tensor")


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """The stages of this rank's pipeline."""
    return _group("pipeline")


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold the same part of the model."""
    return _group("data")


def get_amax_reduction_group() -> dist.ProcessGroup:
    """The ranks of this stage, of `use_fp8_`."""
    return _group("amax")


def get_embedding_group() -> dist.ProcessGroup:
    """The stages that hold word embeddings: first, last, and the decoder's first."""
    return _group("embedding")


def get_position_embedding_group() -> dist.ProcessGroup:
    """The stages that hold position embeddings: the encoder's first and the decoder's first."""
    return _group("position_embedding")


def get_encoder_relative_position_embedding_group() -> dist.ProcessGroup:
    """The encoder's stages; without a split, the first stage."""
    return _group("encoder_relative_position_embedding")


def get_decoder_relative_position_embedding_group() -> dist.ProcessGroup:
    """The decoder's stages; without a split, the first stage."""
    return _group("decoder_relative_position_embedding")


def is_rank_in_embedding_group(ignore_virtual: bool = False) -> bool:
    """Whether this rank, or the part of the model that it works on, holds word embeddings."""
    rank, ranks = dist.get_rank(), _ranks("embedding")
    if ignore_virtual or rank not in ranks:
        return rank in ranks
    if rank == ranks[0]:
        return is_pipeline_first_stage()
    return rank != ranks[-1] or is_pipeline_last_stage()


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds position embeddings."""
    return dist.get_rank() in _ranks("position_embedding")


def is_rank_in_encoder_relative_position_embedding_group() -> bool:
    """Whether this rank holds relative position embeddings of the encoder."""
    return dist.get_rank() in _ranks("encoder_relative_position_embedding")


def is_rank_in_decoder_relative_position_embedding_group() -> bool:
    """Whether this rank holds relative position embeddings of the decoder."""
    return dist.get_rank() in _ranks("decoder_relative_position_embedding")


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a stage (None: this one) runs the encoder; without a split, or a pipeline, any does."""
    return _is_on_side(rank, lambda stage, split: stage < split)


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a stage (None: this one) runs the decoder; without a split, or a pipeline, any does."""
    return _is_on_side(rank, lambda stage, split: stage >= split)


def _is_on_side(rank, side):
    if get_pipeline_model_parallel_world_size() == 1 or _state.split_rank is None:
        return True
    return side(get_pipeline_model_parallel_rank() if rank is None else rank, _state.split_rank)


def is_pipeline_stage_at_split() -> bool:
    """Whether this stage runs the encoder, and the next one the decoder."""
    rank = get_pipeline_model_parallel_rank()
    return is_pipeline_stage_before_split(rank) and is_pipeline_stage_after_split(rank + 1)


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Whether this stage is the first one; of interleaved schedules, also whether it works on its first part."""
    if not ignore_virtual and _state.virtual_size is not None and _state.virtual_rank != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Whether this stage is the last one; of interleaved schedules, also whether it works on its last part."""
    virtual = _state.virtual_size
    if not ignore_virtual and virtual is not None and _state.virtual_rank != virtual - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def _size(kind):
    found = _state.sizes.get(kind)
    return dist.get_world_size(_group(kind)) if found is None else found


def _place(kind):
    found = _state.places.get(kind)
    return dist.get_rank(_group(kind)) if found is None else found


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Says it in place of the group; None: the group does."""
    _state.sizes["tensor"] = world_size


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Says it in place of the group; None: the group does."""
    _state.sizes["pipeline"] = world_size


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Says it in place of the group; None: the group does."""
    _state.places["tensor"] = rank


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Says it in place of the group; None: the group does."""
    _state.places["pipeline"] = rank


def get_tensor_model_parallel_world_size() -> int:
    """Ranks that share each layer."""
    return _size("tensor")


def get_pipeline_model_parallel_world_size() -> int:
    """Stages of the pipeline."""
    return _size("pipeline")


def get_data_parallel_world_size() -> int:
    """Ranks that hold the same part of the model."""
    return dist.get_world_size(_group("data"))


def get_tensor_model_parallel_rank() -> int:
    """This rank's place among those that share layers with it."""
    return _place("tensor")


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage."""
    return _place("pipeline")


def get_data_parallel_rank() -> int:
    """This rank's place among those that hold the same part of the model."""
    return dist.get_rank(_group("data"))


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The decoder's first stage."""
    return _state.split_rank


def set_pipeline_model_parallel_split_rank(pipeline_model_parallel_split_rank: int | None) -> None:
    """Sets the decoder's first stage; the groups stay as they are."""
    _state.split_rank = pipeline_model_parallel_split_rank


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Which of its parts of the model this stage works on."""
    return _state.virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets which of its parts of the model this stage works on."""
    _state.virtual_rank = rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Parts of the model that each stage holds; None: there are no such parts."""
    return _state.virtual_size


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Sets the number of parts of the model that each stage holds."""
    _state.virtual_size = size


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first of the ranks that share layers with this one."""
    size = get_tensor_model_parallel_world_size()
    return dist.get_rank() // size * size


def get_data_parallel_src_rank() -> int:
    """The global rank of the first of those that hold this rank's part of the model."""
    return _ranks("data")[0]


def get_pipeline_model_parallel_first_rank() -> int:
    """The global rank of the first stage."""
    return _ranks("pipeline")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """The global rank of the last stage."""
    return _ranks("pipeline")[get_pipeline_model_parallel_world_size() - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """The global rank of the next stage; behind the last one comes the first."""
    return _neighbour(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """The global rank of the stage before; before the first one comes the last."""
    return _neighbour(-1)


def _neighbour(step):
    stage = get_pipeline_model_parallel_rank() + step
    return _ranks("pipeline")[stage % get_pipeline_model_parallel_world_size()]
