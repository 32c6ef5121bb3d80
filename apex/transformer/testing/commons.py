"""Small models, steps and set-up that public tests of apex.transformer share."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import os
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apex.parallel._waiting import CALLS, waiting
from apex.transformer import tensor_parallel
from apex.transformer.pipeline_parallel.utils import average_losses_across_data_parallel_group
from apex.transformer.testing import global_vars

TEST_SUCCESS_MESSAGE = ">> passed the test :-)"


class _Stage(nn.Module):
    """A part of a pipeline: what `set_input_tensor` gives takes the place of forward's input."""

    def __init__(self, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor | None] | None) -> None:
        """The output of the stage before, or a list that begins with it; None: forward's input is taken."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def _input(self, x):
        return x if self.input_tensor is None else self.input_tensor


class MyLayer(nn.Module):
    """A linear layer, [..., hidden_size] to the same."""

    def __init__(self, hidden_size: int, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.layer = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class MyModel(_Stage):
    """A stage of one linear layer, [..., hidden_size] to the same."""

    def __init__(
        self,
        hidden_size: int,
        pre_process: bool = False,
        post_process: bool = False,
        *,
        add_encoder: bool = False,
        add_decoder: bool = False,
    ) -> None:
        super().__init__(pre_process, post_process)
        self.layer = MyLayer(hidden_size, pre_process, post_process)

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        return self.layer(self._input(x))


class ToyParallelMLP(_Stage):
    """A stage of one perceptron whose layers are split over the tensor parallel ranks.

    forward takes [sequence, batch, hidden_size], with sequence parallelism this rank's part of the sequence, and gives
    the same. Raises ValueError where the ranks do not divide 4 * hidden_size.
    """

    def __init__(
        self,
        hidden_size: int,
        pre_process: bool = False,
        post_process: bool = False,
        *,
        sequence_parallel_enabled: bool = False,
        add_encoder: bool = False,
        add_decoder: bool = False,
    ) -> None:
        super().__init__(pre_process, post_process)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.dense_h_to_4h = tensor_parallel.ColumnParallelLinear(
            hidden_size,
            4 * hidden_size,
            gather_output=False,
            skip_bias_add=True,
            sequence_parallel_enabled=sequence_parallel_enabled,
            no_async_tensor_model_parallel_allreduce=True,
        )
        self.dense_4h_to_h = tensor_parallel.RowParallelLinear(
            4 * hidden_size,
            hidden_size,
            input_is_parallel=True,
            sequence_parallel_enabled=sequence_parallel_enabled,
        )
        self.activation_func = nn.GELU()

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        hidden, bias = self.dense_h_to_4h(self._input(x))
        return self.dense_4h_to_h(self.activation_func(hidden + bias))[0]


def model_provider_func(
    hidden_size: int,
    pre_process: bool,
    post_process: bool,
    *,
    add_encoder: bool = False,
    add_decoder: bool = False,
) -> MyModel:
    """A stage, as build_model asks for it."""
    return MyModel(hidden_size, pre_process, post_process, add_encoder=add_encoder, add_decoder=add_decoder)


def mlp_provider_func(
    hidden_size: int,
    pre_process: bool,
    post_process: bool,
    *,
    add_encoder: bool = False,
    add_decoder: bool = False,
    sequence_parallel_enabled: bool = False,
) -> ToyParallelMLP:
    """A tensor parallel stage, as build_model asks for it."""
    return ToyParallelMLP(
        hidden_size,
        pre_process,
        post_process,
        sequence_parallel_enabled=sequence_parallel_enabled,
        add_encoder=add_encoder,
        add_decoder=add_decoder,
    )


def process_batch(batch: Any) -> Any:
    """The first of a list; what is no list, as it is."""
    return batch[0] if isinstance(batch, list) else batch


def _sum_of_outputs(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(the loss, {"avg": its mean over the data parallel ranks})."""
    loss = output.sum()
    return loss, {"avg": average_losses_across_data_parallel_group([loss])}


LossFunc = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def fwd_step_func(batch: Any, model: nn.Module) -> tuple[torch.Tensor, LossFunc]:
    """(the model's output, the function that makes a loss of it: the sum), as schedules ask for them."""
    return model(process_batch(batch)), _sum_of_outputs


@dataclasses.dataclass(frozen=True)
class ToyParallelMLPFwdBwdStepFunc:
    """fwd_step_func of ToyParallelMLP: batches are [batch, sequence, hidden_size]."""

    sequence_parallel_enabled: bool

    def __call__(self, batch: Any, model: nn.Module) -> tuple[torch.Tensor, LossFunc]:
        x = process_batch(batch)
        if isinstance(x, torch.Tensor):
            x = x.transpose(0, 1).contiguous()
            if self.sequence_parallel_enabled:
                x = tensor_parallel.scatter_to_sequence_parallel_region(x)
        return model(x), _sum_of_outputs


class IdentityLayer(nn.Module):
    """A parameter of that size, normal numbers times scale, which forward returns."""

    def __init__(self, size: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale * torch.randn(size))

    def forward(self) -> torch.Tensor:
        return self.weight


def set_random_seed(seed: int) -> None:
    """Seeds Python, NumPy where it is installed, torch, and what tensor parallel ranks draw for themselves."""
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def initialize_distributed(backend: str = "nccl") -> None:
    """torch.distributed.init_process_group with the environment's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    This rank's GPU becomes the current one: that of --local_rank, of LOCAL_RANK, or of the rank. Where there is no GPU,
    gloo takes the place of nccl. The timeout is 60 s. Raises RuntimeError for another backend than nccl, ucc and gloo.
    """
    if backend not in ("nccl", "ucc", "gloo"):
        raise RuntimeError(f"initialize_distributed: nccl, ucc and gloo are supported, and not {backend!r}")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        given = global_vars.get_args().local_rank
        local = int(os.environ.get("LOCAL_RANK", rank)) if given is None else given
        torch.cuda.set_device(local % torch.cuda.device_count())
    elif backend == "nccl":
        backend = "gloo"
    address = os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT", "6000")
    dist.init_process_group(
        backend,
        init_method="tcp://{}:{}".format(*address),
        world_size=ranks,
        rank=rank,
        timeout=datetime.timedelta(seconds=60),
    )


def print_separator(message: str) -> None:
    """A line with the message in its middle, on rank 0, when all ranks are there."""
    with waiting("a line that separates", CALLS, "print_separator"):
        dist.barrier()
        if dist.get_rank() == 0:
            print("\n" + f" {message} ".center(78, "-"), flush=True)
        dist.barrier()
