"""What training loops over pipelines share: microbatches, wrapped models, norms, masks, prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex.parallel import DistributedDataParallel as ApexDistributedDataParallel
from apex.transformer import _collectives as collectives
from apex.transformer import parallel_state
from apex.transformer.enums import ModelType
from apex.transformer.microbatches import NumMicroBatchesCalculator, build_num_microbatches_calculator
from apex.transformer.pipeline_parallel._timers import _Timers
from apex.transformer.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from apex.transformer.tensor_parallel.utils import current_device

# By these names, as other frameworks look at them.
_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None
_GLOBAL_AUTORESUME = None
_GLOBAL_TIMERS: _Timers | None = None

Shape = Sequence[int]


def listify_model(model: nn.Module | list[nn.Module]) -> list[nn.Module]:
    """A list of modules as it is, one module in a list."""
    return model if isinstance(model, list) else [model]


def setup_microbatch_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> None:
    """Says how many microbatches make a step, on every rank: see microbatches.build_num_microbatches_calculator.

    Raises:
        RuntimeError: it was said before.
        ValueError: sizes that are not positive or do not divide.
    """
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        raise RuntimeError("the microbatch calculator is set up already: use update_num_microbatches")
    _reconfigure_microbatch_calculator(
        rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size
    )


def _reconfigure_microbatch_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> None:
    """The same, whatever was said before."""
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = build_num_microbatches_calculator(
        rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size
    )


def _calculator():
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        raise RuntimeError("how many microbatches make a step? call setup_microbatch_calculator first")
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR


def get_micro_batch_size() -> int:
    """Samples of a microbatch. RuntimeError, here and below, before setup_microbatch_calculator."""
    return _calculator().micro_batch_size


def get_num_microbatches() -> int:
    """Microbatches of a step, on each rank."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Samples of a step over all ranks."""
    return _calculator().get_current_global_batch_size()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True) -> None:
    """Says how many samples were consumed so far, for batches that grow; on every rank, between steps."""
    _calculator().update(consumed_samples, consistency_check)


def _split_batch_into_microbatch(
    batch: Sequence[torch.Tensor],
    *,
    _micro_batch_size: int | None = None,
    _global_batch_size: int | None = None,
) -> Iterator[list[torch.Tensor]]:
    """Views [micro batch size, ...] of each tensor of a batch, one microbatch after the other; None: the sizes set up.

    Public apex's gives the first microbatch alone its samples where a microbatch has several.
    """
    micro = get_micro_batch_size() if _micro_batch_size is None else _micro_batch_size
    samples = get_current_global_batch_size() if _global_batch_size is None else _global_batch_size
    for first in range(0, samples, micro):
        yield [x[first : first + micro] for x in batch]


def get_kth_microbatch(batch: Any, k: int) -> Any:
    """The samples of microbatch `k`.

    Args:
        batch: a list or tuple of tensors [samples of this rank's step, ...]; anything else, as None on stages that
            read no batch, is returned as it is.
        k: from 0.

    Returns:
        A list of views [micro batch size, ...].

    Raises:
        ValueError: a tensor is too short.
    """
    if not isinstance(batch, list | tuple):
        return batch
    size = get_micro_batch_size()
    for x in batch:
        if len(x) < (k + 1) * size:
            raise ValueError(
                f"a batch of {len(x)} samples has no whole microbatch {k}: {get_num_microbatches()} microbatches "
                f"of {size} samples are asked for"
            )
    return [x[k * size : (k + 1) * size] for x in batch]


def get_autoresume() -> Any:
    """None: there is no service that ends and resumes jobs."""
    return _GLOBAL_AUTORESUME


def _set_timers():
    """Makes what get_timers returns."""
    global _GLOBAL_TIMERS
    if _GLOBAL_TIMERS is not None:
        raise RuntimeError("the timers are there already")
    _GLOBAL_TIMERS = _Timers()


def get_timers() -> _Timers:
    """The timers of this process. RuntimeError before _set_timers."""
    if _GLOBAL_TIMERS is None:
        raise RuntimeError("there are no timers: call _set_timers first")
    return _GLOBAL_TIMERS


def print_rank_0(message: str) -> None:
    """Prints on rank 0 alone."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def is_last_rank() -> bool:
    """Whether this is the last rank of all."""
    return dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """Prints on the last rank alone."""
    if not dist.is_initialized() or is_last_rank():
        print(message, flush=True)


def param_is_not_shared(param: nn.Parameter) -> bool:
    """Whether a parameter counts here: another stage, whose copy of it is marked `shared`, does not hold it."""
    return not getattr(param, "shared", False)


def unwrap_model(
    model: Any,
    module_instances: Any = (DistributedDataParallel, ApexDistributedDataParallel),
) -> Any:
    """What is within wrappers of these classes, of one module or of each in a list."""
    if isinstance(model, list):
        return [unwrap_model(part, module_instances) for part in model]
    while isinstance(model, module_instances):
        model = model.module
    return model


def get_model_type(model: nn.Module) -> ModelType:
    """Its `model_type`; a model without has an encoder or a decoder."""
    return getattr(unwrap_model(model), "model_type", ModelType.encoder_or_decoder)


def calc_params_l2_norm(model: nn.Module | list[nn.Module], bf16: bool) -> float:
    """The norm of all parameters of the model, over all its ranks; each parameter counts once.

    Args:
        model: this rank's part.
        bf16: without effect: squares are summed in float32, or wider, for any parameters.
    """
    squares = torch.zeros((), dtype=torch.float64, device=current_device())
    for part in listify_model(model):
        for param in part.parameters():
            if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param):
                squares += torch.linalg.vector_norm(param.detach().double()).square().to(squares.device)
    group = parallel_state.get_model_parallel_group()
    return collectives.all_reduce(squares, group, "the norm of the parameters").item() ** 0.5


def average_losses_across_data_parallel_group(losses: Iterable[torch.Tensor]) -> torch.Tensor:
    """The means over the data parallel ranks of losses of one element each: [losses]."""
    averaged = torch.cat([loss.detach().clone().view(1) for loss in losses])
    group = parallel_state.get_data_parallel_group()
    collectives.all_reduce(averaged, group, "losses over the data parallel ranks")
    return averaged / dist.get_world_size(group)


def report_memory(name: str) -> None:
    """Prints the megabytes of this rank's GPU, on the first data parallel ranks; without a GPU, that there is none."""
    if parallel_state.get_data_parallel_rank() != 0:
        return
    text = " | no GPU"
    if torch.cuda.is_available():
        megabytes = (
            f" | {what}: {getattr(torch.cuda, function)() / 2**20}"
            for what, function in (
                ("allocated", "memory_allocated"),
                ("max allocated", "max_memory_allocated"),
                ("reserved", "memory_reserved"),
                ("max reserved", "max_memory_reserved"),
            )
        )
        text = "".join(megabytes)
    print(f"[Rank {dist.get_rank()}] {name} memory (MB){text}", flush=True)


def print_params_min_max_norm(optimizer: Any, iteration: int) -> None:
    """Prints smallest and largest value and norm of each of an optimizer's parameters, or of one that it wraps."""
    lines = ["iteration, rank, index, tensor-model-parallel, min, max, norm"]
    groups = getattr(optimizer, "optimizer", optimizer).param_groups
    for index, param in enumerate((p for group in groups for p in group["params"]), 1):
        values = param.detach()
        split = int(getattr(param, "tensor_model_parallel", False))
        lines.append(
            f"{iteration:7d}, {dist.get_rank():4d}, {index:4d}, {split:2d}, {values.min():.6E}, "
            f"{values.max():.6E}, {torch.linalg.vector_norm(values):.6E}"
        )
    print("\n".join(lines), flush=True)


def get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Masks and positions of texts that are read from left to right.

    Args:
        data: words, [batch, sequence].
        eod_token: the word that ends a document.
        reset_position_ids: positions begin at 0 in each document.
        reset_attention_mask: words see those of their own document only.
        eod_mask_loss: the loss leaves out the words that end documents.

    Returns:
        What attention leaves out, bool [batch or 1, 1, sequence, sequence]; weights of the loss, float32
        [batch, sequence]; positions, int64 [batch, sequence].
    """
    length = data.shape[1]
    places = torch.arange(length, dtype=torch.int64, device=data.device).expand_as(data)
    ends = data == eod_token
    hidden = (places[:1].unsqueeze(1) > places[:1].unsqueeze(2)).unsqueeze(1)
    if reset_attention_mask:
        document = ends.cumsum(1) - ends.long()  # a document's last word belongs to it
        hidden = hidden | (document.unsqueeze(1) != document.unsqueeze(2)).unsqueeze(1)
    weights = torch.ones(data.shape, dtype=torch.float32, device=data.device)
    if eod_mask_loss:
        weights.masked_fill_(ends, 0.0)
    if reset_position_ids:
        first = (ends * (places + 1)).roll(1, 1)
        first[:, :1] = 0
        places = places - first.cummax(1).values
    return hidden, weights, places
