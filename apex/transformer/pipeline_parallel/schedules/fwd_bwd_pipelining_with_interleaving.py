"""The schedule of stages that hold several parts of the model each, which come round several times: less time in which
stages wait, for more messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from apex.parallel._failures import failing_together
from apex.transformer import parallel_state
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel.schedules._grad_sync import GradSync
from apex.transformer.pipeline_parallel.schedules._run import Options, Run
from apex.transformer.pipeline_parallel.schedules.common import Batch, FwdStepFunc
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_pipelining_without_interleaving import (
    get_tensor_shapes,
)
from apex.transformer.pipeline_parallel.utils import Shape, get_num_microbatches

__all__ = ["_forward_backward_pipelining_with_interleaving"]


@failing_together()
def _forward_backward_pipelining_with_interleaving(
    forward_step_func: FwdStepFunc,
    batch: Batch | None,
    model: list[nn.Module],
    *,
    forward_only: bool,
    tensor_shape: Shape | None = None,
    dtype: torch.dtype | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    disable_autocast: bool = False,
    deallocate_pipeline_outputs: bool = False,
    async_comm: bool = False,
    sequence_parallel_enabled: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    custom_grad_sync_func: Callable[..., Any] | None = None,
    custom_param_sync_func: Callable[..., Any] | None = None,
    sync_batch_comm: bool = True,
    num_micro_batches_with_partial_activation_checkpoints: int | None = None,
    overlap_p2p_comm: bool = False,
    batch_p2p_comm: bool = True,
    scatter_gather_tensors_in_pipeline: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Runs a step, as forward_backward_pipelining_without_interleaving does, which says what is not said here.

    Args:
        model: this stage's parts, as build_model returns them.
        custom_sync_context_handler: left for the last backward pass of each part.
        custom_grad_sync_func: called with the parameters of each part, when its gradients are there.
        custom_param_sync_func: called with the parameters of each part, before its first forward pass: of the first two
            at once, of others while the part before works.
        async_comm, overlap_p2p_comm, sync_batch_comm, batch_p2p_comm, kwargs: without effect.

    Raises:
        RuntimeError: also a `model` that is no list of as many parts as there are, and a number of microbatches that
            the pipeline size does not divide.
    """
    if not isinstance(model, list):
        raise RuntimeError(f"a list of this stage's parts is required, not {type(model).__name__}")
    stages, microbatches = parallel_state.get_pipeline_model_parallel_world_size(), get_num_microbatches()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if stages == 1 or len(model) != chunks:
        raise RuntimeError(
            f"{len(model)} parts a stage, of {stages} stages and a virtual pipeline size of {chunks}: an interleaved "
            "schedule needs several stages, and as many parts on each as initialize_model_parallel was told"
        )
    if microbatches % stages:
        raise RuntimeError(
            "an interleaved schedule needs a number of microbatches that is divisible by the pipeline size: "
            f"{microbatches} is not, by {stages}"
        )
    given = dict(tensor_shape=tensor_shape, sequence_parallel_enabled=sequence_parallel_enabled)
    shapes = get_tensor_shapes(0, ModelType.encoder_or_decoder, **given)  # type: ignore[arg-type]
    options = Options(
        lambda part: shapes,
        dtype,
        forward_only,
        grad_scaler,
        disable_autocast,
        deallocate_pipeline_outputs,
        scatter_gather_tensors_in_pipeline and not sequence_parallel_enabled,
        num_micro_batches_with_partial_activation_checkpoints,
    )
    sync = GradSync(
        model,
        parallel_state.get_pipeline_model_parallel_rank(),
        stages,
        custom_sync_context_handler,
        custom_grad_sync_func,
        custom_param_sync_func,
    )
    return Run(forward_step_func, batch, model, options, sync).run()
