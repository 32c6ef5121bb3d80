"""Orders in which the stages of a pipeline work on microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apex.transformer import parallel_state
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_no_pipelining import forward_backward_no_pipelining
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_pipelining_with_interleaving import (
    _forward_backward_pipelining_with_interleaving,
)
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_pipelining_without_interleaving import (
    forward_backward_pipelining_without_interleaving,
)
from apex.transformer.pipeline_parallel.utils import get_num_microbatches

__all__ = ["get_forward_backward_func"]


class ExperimentalWarning(Warning):
    """Of what may change."""


def get_forward_backward_func(
    virtual_pipeline_model_parallel_size: int | None, pipeline_model_parallel_size: int
) -> Callable[..., list[Any]]:
    """The schedule for a pipeline of that size, whose stages hold that many parts of the model each (None: one).

    Raises:
        RuntimeError: several parts, and a number of microbatches that the pipeline size does not divide.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return forward_backward_no_pipelining
    if virtual_pipeline_model_parallel_size is None:
        return forward_backward_pipelining_without_interleaving
    microbatches = get_num_microbatches()
    if microbatches % pipeline_model_parallel_size:
        raise RuntimeError(
            f"an interleaved schedule needs a number of microbatches that is divisible by the pipeline size: "
            f"{microbatches} is not, by {pipeline_model_parallel_size}"
        )
    return _forward_backward_pipelining_with_interleaving
