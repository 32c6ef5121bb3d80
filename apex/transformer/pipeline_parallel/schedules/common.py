"""Models of pipelines, and the passes of one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.transformer import parallel_state
from apex.transformer.enums import ModelType
from apex.transformer.log_util import get_transformer_logger
from apex.transformer.pipeline_parallel.p2p_communication import FutureTensor
from apex.transformer.pipeline_parallel.utils import (
    get_model_type,
    get_num_microbatches,
    listify_model,
    unwrap_model,
)
from apex.transformer.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from apex.transformer.tensor_parallel.utils import current_device

_logger = get_transformer_logger(__name__)

Batch: TypeAlias = Any  # tensors, FutureTensors, lists or tuples of them
LossFunc: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, Any]]
FwdStepFunc: TypeAlias = Callable[..., tuple[Any, LossFunc]]  # of microbatch and model


def build_model(
    model_provider_func: Callable[..., nn.Module],
    wrap_with_ddp: bool = True,
    virtual_pipeline_model_parallel_size: int | None = None,
    model_type: ModelType = ModelType.encoder_or_decoder,
    *args: Any,
    **kwargs: Any,
) -> list[nn.Module]:
    """This stage's parts of the model, on the current GPU, or the CPU where there is none.

    Args:
        model_provider_func: called for each part with args, kwargs and pre_process and post_process, which say whether
            the part is the model's first and last one; of models with encoder and decoder, whether it is the first or
            last one of either, and with add_encoder and add_decoder, which say of which it is.
        wrap_with_ddp: wrap each in torch's DistributedDataParallel over the data parallel ranks. A part without a
            parameter that requires a gradient stays as it is.
        virtual_pipeline_model_parallel_size: parts a stage, of interleaved schedules; None: one.
        model_type: what the model says of itself as `model_type`.
        args, kwargs: for model_provider_func.

    Returns:
        A list of one module, or of as many as there are parts.

    Raises:
        RuntimeError: no model parallel groups; a pipeline of encoder and decoder without split rank, or interleaved.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = virtual_pipeline_model_parallel_size if stages > 1 else None
    if chunks is None:
        models = [model_provider_func(*args, **kwargs, **_place(model_type, stages))]
    elif model_type == ModelType.encoder_and_decoder:
        raise RuntimeError(
            "models with encoder and decoder have no interleaved schedule: pass no virtual size"
        )
    else:
        models = _chunks(chunks, lambda: model_provider_func(*args, **kwargs, **_place(model_type, stages)))
    device = current_device()
    for model in models:
        model.to(device)
        model.model_type = model_type
        for param in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    if parallel_state.get_data_parallel_rank() == 0:
        place = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        _logger.info(
            f"{_calc_number_of_params(models)} parameters on (tensor, pipeline) parallel rank {place}"
        )
    return [_wrap(model, device) for model in models] if wrap_with_ddp else models


def _chunks(count, make):
    before = parallel_state.get_virtual_pipeline_model_parallel_rank()
    models = []
    try:
        for chunk in range(count):
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            models.append(make())
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_rank(before)
    return models


def _place(model_type, stages):
    """What model_provider_func is told of a part."""
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    if model_type == ModelType.encoder_or_decoder:
        return dict(pre_process=first, post_process=last)
    split = parallel_state.get_pipeline_model_parallel_split_rank()
    if stages > 1 and split is None:
        raise RuntimeError(
            "a pipeline of encoder and decoder needs the decoder's first stage: pass "
            "pipeline_model_parallel_split_rank_ to initialize_model_parallel"
        )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return dict(
        pre_process=first or stage == split,
        post_process=last or (split is not None and stage == split - 1),
        add_encoder=parallel_state.is_pipeline_stage_before_split(),
        add_decoder=parallel_state.is_pipeline_stage_after_split(),
    )


def _wrap(model, device):
    if not any(param.requires_grad for param in model.parameters()):
        return model
    ids = None if device.type == "cpu" else [device]
    return DistributedDataParallel(
        model, device_ids=ids, process_group=parallel_state.get_data_parallel_group()
    )


def _calc_number_of_params(model: list[nn.Module]) -> int:
    """Elements of all parameters of the modules."""
    return sum(param.numel() for part in model for param in part.parameters())


def _get_params_for_weight_decay_optimization(
    model: nn.Module | list[nn.Module],
    *,
    no_weight_decay_modules: tuple[type, ...] = (FusedLayerNorm, FusedRMSNorm),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameter groups for an optimizer: those that decay, and biases and what norms hold, which do not."""
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module in (m for part in listify_model(model) for m in part.modules()):
        for name, param in module.named_parameters(recurse=False):
            stays = name == "bias" or isinstance(module, no_weight_decay_modules)
            (others if stays else decaying).append(param)
    return {"params": decaying}, {"params": others, "weight_decay": 0.0}


def free_output_tensor(
    output_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None,
    deallocate_pipeline_outputs: bool = False,
) -> None:
    """Gives up the memory of what was sent and is now a place in the graph only; `custom_backward` goes on from there.

    Tensors that are leaves or views keep theirs.
    """
    if not deallocate_pipeline_outputs or output_tensors is None:
        return
    tensors = [output_tensors] if isinstance(output_tensors, torch.Tensor) else output_tensors
    for tensor in tensors:
        if tensor is not None and tensor.grad_fn is not None and not tensor._is_view():
            tensor.data = torch.zeros(1, dtype=tensor.dtype, device=tensor.device)


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """backward() of an output whose memory was given up: torch.autograd.backward would compare its shape.

    Args:
        output: of one element.
        grad_output: of the shape that it had; None for a loss.

    Raises:
        ValueError: the output has its memory still.
    """
    if output.numel() != 1:
        raise ValueError(
            f"an output of {output.numel()} elements was not given up: call free_output_tensor first"
        )
    if grad_output is None:
        grad_output = torch.ones_like(output)
    _run_engine((output,), (grad_output,))


def _run_engine(tensors, grads):
    """torch.autograd.backward, which does not compare shapes."""
    torch.autograd.Variable._execution_engine.run_backward(
        tensors, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def device_of(*models: nn.Module) -> torch.device:
    """Where a stage works: on the device of its parameters, or, without any, on the current one."""
    param = next((p for model in models for p in model.parameters()), None)
    return current_device() if param is None else param.device


def _get(tensor):
    return tensor.get() if isinstance(tensor, FutureTensor) else tensor


def _listed(tensors):
    return [_get(tensor) for tensor in (tensors if isinstance(tensors, list) else [tensors])]


def forward_step(
    forward_step_func: FwdStepFunc,
    batch: Batch | None,
    model: nn.Module,
    input_tensor: Any,
    losses_reduced: list[Any],
    dtype: torch.dtype | None,
    disable_autocast: bool = False,
    checkpoint_activations_micro_batch: bool | None = None,
) -> Any:
    """One forward pass of this stage, or of the part of it that the virtual rank says.

    Args:
        forward_step_func: (batch, model) -> (output, function of the output -> (loss, what is to be returned)).
        batch: the microbatch.
        model: has `set_input_tensor`, which gets the list of what the stage before gave, or [None].
        input_tensor: that tensor, or a list.
        losses_reduced: on the last stage, what the loss function returns besides is appended.
        dtype: of autocast, where it is float16 or bfloat16.
        disable_autocast: no autocast.
        checkpoint_activations_micro_batch: if not None, a third argument of forward_step_func.

    Returns:
        The output, or the loss divided by the number of microbatches; a list where input_tensor is one. In decoders of
        models with encoder and decoder, a list that ends with the encoder's output.
    """
    inputs = _listed(input_tensor)
    unwrapped = unwrap_model(model)
    unwrapped.set_input_tensor(inputs)
    more = () if checkpoint_activations_micro_batch is None else (checkpoint_activations_micro_batch,)
    halves = dtype in (torch.float16, torch.bfloat16)
    with torch.autocast(
        device_of(unwrapped).type, dtype if halves else None, halves and not disable_autocast
    ):
        output, loss_func = forward_step_func(batch, model, *more)
        if parallel_state.is_pipeline_last_stage():
            loss, reduced = loss_func(output)
            output = loss / get_num_microbatches()
            losses_reduced.append(reduced)
    both = get_model_type(unwrapped) == ModelType.encoder_and_decoder
    if both and parallel_state.is_pipeline_stage_after_split():
        return [output, inputs[-1]]
    if not isinstance(input_tensor, list):
        return output
    return list(output) if isinstance(output, list | tuple) else [output]


def backward_step(
    input_tensor: Any,
    output_tensor: Any,
    output_tensor_grad: Any,
    model_type: ModelType = ModelType.encoder_or_decoder,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
    deallocate_pipeline_outputs: bool = False,
) -> Any:
    """One backward pass of this stage, from what its forward pass returned.

    Args:
        input_tensor, output_tensor: what forward_step took and returned.
        output_tensor_grad: gradients of the output, alike; None for the loss.
        model_type: without effect: each output goes with its gradient.
        grad_scaler: scales the loss.
        deallocate_pipeline_outputs: the output's memory may have been given up.

    Returns:
        Gradients of the input, alike; None where the output does not depend on it.
    """
    inputs, outputs, grads = _listed(input_tensor), _listed(output_tensor), _listed(output_tensor_grad)
    for x in inputs:
        if x is not None and x.requires_grad:
            x.retain_grad()
    if grads[0] is None:
        loss = outputs[0] if grad_scaler is None else grad_scaler.scale(outputs[0])
        torch.autograd.backward(loss)
    else:
        _backward_of_outputs(outputs, grads)
    found = [None if x is None else x.grad for x in inputs]
    return found if isinstance(input_tensor, list) else found[0]


def _backward_of_outputs(outputs, grads):
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if output is not None and output.requires_grad and grad is not None
    ]
    if pairs:
        freed = any(output.shape != grad.shape for output, grad in pairs)
        (_run_engine if freed else torch.autograd.backward)(*zip(*pairs, strict=True))
