"""The schedule of stages that hold one part of the model each: forward passes to warm up, then one forward and one
backward in turn, so that a stage keeps as many microbatches as there are stages behind it, and one more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from apex.parallel._failures import failing_together
from apex.transformer import parallel_state
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import p2p_communication
from apex.transformer.pipeline_parallel.schedules._grad_sync import GradSync
from apex.transformer.pipeline_parallel.schedules._run import Options, Run
from apex.transformer.pipeline_parallel.schedules.common import Batch, FwdStepFunc
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_no_pipelining import one
from apex.transformer.pipeline_parallel.utils import Shape, get_model_type
from apex.transformer.utils import divide

__all__ = ["forward_backward_pipelining_without_interleaving"]

Shapes = Sequence[Shape | None]


def get_tensor_shapes(
    rank: int,
    model_type: ModelType,
    *,
    tensor_shape: Shape,
    decoder_sequence_length: int | None = None,
    sequence_parallel_enabled: bool = False,
) -> list[tuple[int, int, int]]:
    """Shapes of what a stage sends: of encoders one tensor, of decoders theirs and the encoder's.

    Args:
        rank: the stage.
        model_type: of the model.
        tensor_shape: (sequence, micro batch, hidden).
        decoder_sequence_length: of models with encoder and decoder, whose tensor_shape is the encoder's.
        sequence_parallel_enabled: each tensor parallel rank has a part of the sequence.

    Raises:
        RuntimeError: a shape of other than three sizes, no decoder_sequence_length.
        ValueError: a sequence that cannot be divided.
    """
    if tensor_shape is None or len(tensor_shape) != 3:
        raise RuntimeError(f"tensor_shape {tensor_shape}: (sequence, micro batch, hidden) is required")
    length, batch, hidden = tensor_shape
    lengths = [length]
    if model_type == ModelType.encoder_and_decoder and not parallel_state.is_pipeline_stage_before_split(
        rank
    ):
        if decoder_sequence_length is None:
            raise RuntimeError("decoder_sequence_length is required by models with encoder and decoder")
        lengths = [decoder_sequence_length, length]
    ranks = parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel_enabled else 1
    return [(divide(each, ranks), batch, hidden) for each in lengths]


def recv_forward(tensor_shapes: Shapes, **options: Any) -> list[Any]:
    """p2p_communication.recv_forward of each; None stays None, here and below."""
    return [
        None if shape is None else p2p_communication.recv_forward(shape, **options) for shape in tensor_shapes
    ]


def recv_backward(tensor_shapes: Shapes, **options: Any) -> list[Any]:
    """p2p_communication.recv_backward of each."""
    return [
        None if shape is None else p2p_communication.recv_backward(shape, **options)
        for shape in tensor_shapes
    ]


def _each(function, tensors, tensor_shapes, options):
    tensors = tensors if isinstance(tensors, list) else [tensors]
    return [
        None if shape is None else function(tensor, tensor_shape=shape, **options)
        for tensor, shape in zip(tensors, tensor_shapes, strict=False)
    ]


def send_forward(output_tensors: Any, tensor_shapes: Shapes, **options: Any) -> None:
    """p2p_communication.send_forward of each."""
    _each(p2p_communication.send_forward, output_tensors, tensor_shapes, options)


def send_backward(input_tensor_grads: Any, tensor_shapes: Shapes, **options: Any) -> None:
    """p2p_communication.send_backward of each."""
    _each(p2p_communication.send_backward, input_tensor_grads, tensor_shapes, options)


def send_forward_recv_backward(output_tensors: Any, tensor_shapes: Shapes, **options: Any) -> list[Any]:
    """p2p_communication.send_forward_recv_backward of each."""
    return _each(p2p_communication.send_forward_recv_backward, output_tensors, tensor_shapes, options)


def send_backward_recv_forward(input_tensor_grads: Any, tensor_shapes: Shapes, **options: Any) -> list[Any]:
    """p2p_communication.send_backward_recv_forward of each."""
    return _each(p2p_communication.send_backward_recv_forward, input_tensor_grads, tensor_shapes, options)


@failing_together()
def forward_backward_pipelining_without_interleaving(
    forward_step_func: FwdStepFunc,
    batch: Batch | None,
    model: nn.Module | list[nn.Module],
    *,
    forward_only: bool,
    tensor_shape: Shape | None = None,
    decoder_sequence_length: int | None = None,
    dtype: torch.dtype | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    disable_autocast: bool = False,
    deallocate_pipeline_outputs: bool = False,
    async_comm: bool = False,
    sequence_parallel_enabled: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    custom_grad_sync_func: Callable[[], Any] | None = None,
    sync_batch_comm: bool = True,
    num_micro_batches_with_partial_activation_checkpoints: int | None = None,
    scatter_gather_tensors_in_pipeline: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Runs a step; every rank calls it, with the same arguments but for batch and model.

    Args:
        forward_step_func, disable_autocast: see common.forward_step.
        batch: of this step, on stages that read it: see utils.get_kth_microbatch.
        model: one module, also in a list.
        forward_only: no backward passes.
        tensor_shape, decoder_sequence_length, sequence_parallel_enabled: see get_tensor_shapes. tensor_shape may be a
            list of shapes: then stages send as many tensors, and forward_step_func returns a list of them.
        dtype: of what stages send, to which outputs are cast, and of autocast, see forward_step; None: float32.
        grad_scaler: scales the losses.
        deallocate_pipeline_outputs: see common.free_output_tensor.
        custom_sync_context_handler: makes a context in which gradients are not reduced over the data parallel ranks;
            it is left for the last backward pass. None: torch's DistributedDataParallel reduces in that pass alone.
        custom_grad_sync_func: reduces gradients behind the passes, on all stages but the first.
        num_micro_batches_with_partial_activation_checkpoints: of as many microbatches as a stage keeps at a time, those
            before this one pass False as a third argument to forward_step_func, the others True.
        scatter_gather_tensors_in_pipeline: see p2p_communication.
        async_comm, sync_batch_comm, kwargs: without effect: what is received is waited for when it is needed, always.

    Returns:
        On the last stage what the loss function returned besides the loss, of each microbatch; elsewhere [].

    Raises:
        RuntimeError: arguments that do not fit, that differ between ranks, a stage that failed, on every rank of the
            model; the stage itself raises what was raised. A rank that is not there, and what was waited for.
    """
    model = one(model)
    kind = get_model_type(model)
    several = tensor_shape is not None and len(tensor_shape) > 0 and not isinstance(tensor_shape[0], int)

    def shapes(part):
        each = dict(
            decoder_sequence_length=decoder_sequence_length,
            sequence_parallel_enabled=sequence_parallel_enabled,
        )
        given = tensor_shape if several else [tensor_shape]
        return [found for one in given for found in get_tensor_shapes(part, kind, tensor_shape=one, **each)]

    shapes(0)
    options = Options(
        shapes,
        dtype,
        forward_only,
        grad_scaler,
        disable_autocast,
        deallocate_pipeline_outputs,
        scatter_gather_tensors_in_pipeline and not sequence_parallel_enabled,
        num_micro_batches_with_partial_activation_checkpoints,
    )
    sync = GradSync(
        [model],
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        custom_sync_context_handler,
        custom_grad_sync_func,
    )
    return Run(forward_step_func, batch, [model], options, sync).run()
