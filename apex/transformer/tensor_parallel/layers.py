"""Layers whose weights are split over the tensor parallel ranks.

Weights are drawn whole, in float32 on the CPU, and each rank keeps its part: they are the same whatever the split, on
the CPU and on GPUs, where ranks begin with the same torch.manual_seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex import _symbolic as symbolic
from apex.transformer.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from apex.transformer.tensor_parallel._linear import (
    LinearWithGradAccumulationAndAsyncCommunication,
    linear_with_grad_accumulation_and_async_allreduce,
    linear_with_grad_accumulation_and_async_allreduce_in16bit,
)
from apex.transformer.tensor_parallel._weights import (  # noqa: F401
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
    split_weight,
)
from apex.transformer.tensor_parallel.mappings import (
    _ReduceFromModelParallelRegion,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from apex.transformer.tensor_parallel.utils import VocabUtility, check_words, current_device
from apex.transformer.utils import divide

__all__ = [
    "ColumnParallelLinear",
    "LinearWithGradAccumulationAndAsyncCommunication",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_tensor_model_parallel_attributes",
    "linear_with_grad_accumulation_and_async_allreduce",
    "linear_with_grad_accumulation_and_async_allreduce_in16bit",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]


def _device(use_cpu_initialization):
    return torch.device("cpu") if use_cpu_initialization else current_device()


class VocabParallelEmbedding(nn.Module):
    """torch.nn.Embedding; each rank holds a part of the vocabulary.

    Args:
        num_embeddings: words of the whole vocabulary.
        embedding_dim: size of a word's vector.
        init_method: fills the whole weight, [num_embeddings, embedding_dim], in place.
        params_dtype: of the weight.
        use_cpu_initialization: the weight is on the CPU; False: on the current GPU, where there is one.

    Attributes:
        weight: [num_embeddings / ranks, embedding_dim].
        vocab_start_index, vocab_end_index: this rank's words, the last one left out.

    Raises:
        ValueError: the ranks do not divide the vocabulary.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: Callable[[torch.Tensor], Any] = nn.init.xavier_normal_,
        *,
        params_dtype: torch.dtype = torch.float32,
        use_cpu_initialization: bool = False,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        # As those of torch.nn.Embedding, for who reads them there.
        self.padding_idx = self.max_norm = self._weight = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.tensor_model_parallel_size = get_tensor_model_parallel_world_size()
        self.vocab_start_index, self.vocab_end_index = VocabUtility.vocab_range_from_global_vocab_size(
            num_embeddings, get_tensor_model_parallel_rank(), self.tensor_model_parallel_size
        )
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        shape, device = (num_embeddings, embedding_dim), _device(use_cpu_initialization)
        self.weight, _ = split_weight(shape, 0, init_method, 1, params_dtype, device)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """[..., embedding_dim] of words [...], the same on all ranks.

        Raises IndexError for words on the CPU that there are not; on a GPU this is not looked at where ranks split the
        vocabulary.
        """
        node = symbolic.leaf(self, input_)
        if node is not None:
            return node
        if self.tensor_model_parallel_size == 1:
            return F.embedding(input_, self.weight)
        check_words(input_, self.num_embeddings, "VocabParallelEmbedding")
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        local = (input_ - self.vocab_start_index).masked_fill(elsewhere, 0)
        found = F.embedding(local, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return _ReduceFromModelParallelRegion.apply(found, True)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.tensor_model_parallel_size}"


class _ParallelLinear(nn.Module):
    """What both linear layers have in common. dim: of the weight, which is split."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def _make(self, sizes, dim, bias, init_method, stride, keep, skip, dtype, on_cpu, fusion, in_16bit):
        self.input_size, self.output_size = sizes
        self.skip_bias_add, self.gradient_accumulation_fusion = skip, fusion
        device = _device(on_cpu)
        self.weight, whole = split_weight(sizes[::-1], dim, init_method, stride, dtype, device)
        self.master_weight = whole if keep else None
        self.register_parameter("bias", None)
        if bias:
            outputs = self.weight.shape[0]
            self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype, device=device))
        self._forward_impl = (
            linear_with_grad_accumulation_and_async_allreduce_in16bit
            if in_16bit
            else linear_with_grad_accumulation_and_async_allreduce
        )

    def extra_repr(self) -> str:
        part = "x".join(map(str, self.weight.shape))
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, here {part}"


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer, input weight^T + bias; each rank gives a part of the outputs.

    Args:
        input_size: size of the input's last dimension.
        output_size: of the output's, over all ranks.
        bias: False: there is none.
        gather_output: the output is gathered over the ranks.
        init_method: fills the whole weight, [output_size, input_size], in place. The bias is 0.
        stride: pieces of which a rank's part of the outputs consists; 3 for queries, keys and values behind each other.
        keep_master_weight_for_test: keeps the whole weight as `master_weight`.
        skip_bias_add: the bias is returned, and not added.
        no_async_tensor_model_parallel_allreduce: the input's gradient is summed when all products are done.
        params_dtype: of the parameters.
        use_cpu_initialization: the parameters are on the CPU; False: on the current GPU, where there is one.
        gradient_accumulation_fusion: the backward adds the weight's gradient to `weight.main_grad`.
        accumulation_in_fp16: main_grad is of the weight's dtype.
        sequence_parallel_enabled: the input is this rank's part of the first dimension, and is gathered.

    Attributes:
        weight: [output_size / ranks, input_size].
        bias: [output_size / ranks], or None.

    Raises:
        ValueError: the ranks, or the stride, do not divide output_size.
        RuntimeError: sequence parallelism with gather_output, or without no_async_tensor_model_parallel_allreduce.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Callable[[torch.Tensor], Any] = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        no_async_tensor_model_parallel_allreduce: bool = False,
        params_dtype: torch.dtype = torch.float32,
        use_cpu_initialization: bool = False,
        gradient_accumulation_fusion: bool = False,
        accumulation_in_fp16: bool = False,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.gather_output, self.sequence_parallel_enabled = gather_output, sequence_parallel_enabled
        self.async_tensor_model_parallel_allreduce = (
            not no_async_tensor_model_parallel_allreduce and ranks > 1
        )
        self.output_size_per_partition = divide(output_size, ranks)
        if sequence_parallel_enabled:
            self._check_sequence_parallel(ranks)
        self._make(
            (input_size, output_size), 0, bias, init_method, stride, keep_master_weight_for_test, skip_bias_add,
            params_dtype, use_cpu_initialization, gradient_accumulation_fusion, accumulation_in_fp16,
        )  # fmt: skip
        if self.bias is not None:
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)

    def _check_sequence_parallel(self, ranks):
        if ranks == 1:
            warnings.warn(
                "sequence_parallel_enabled with one tensor parallel rank: nothing is split", stacklevel=3
            )
        if self.gather_output:
            raise RuntimeError("sequence_parallel_enabled: pass gather_output=False as well")
        if self.async_tensor_model_parallel_allreduce:
            raise RuntimeError(
                "`async_tensor_model_parallel_allreduce` and `sequence_parallel_enabled` cannot be enabled at the same "
                "time. Pass no_async_tensor_model_parallel_allreduce=True: the input's gradient is then reduced and "
                "scattered, beside the same product"
            )

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output, the bias that was not added or None).

        input_: [sequence, batch, input_size]; with sequence parallelism [sequence / ranks, ...]. output: [sequence,
        batch, output_size], or output_size / ranks where it is not gathered.
        """
        node = symbolic.leaf(self, input_)
        if node is not None:
            return node
        communicates = self.async_tensor_model_parallel_allreduce or self.sequence_parallel_enabled
        output = self._forward_impl(
            input_ if communicates else copy_to_tensor_model_parallel_region(input_),
            self.weight,
            None if self.skip_bias_add else self.bias,
            self.gradient_accumulation_fusion,
            self.async_tensor_model_parallel_allreduce,
            self.sequence_parallel_enabled,
        )
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(output)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(_ParallelLinear):
    """A linear layer, input weight^T + bias; each rank takes a part of the inputs, and all sum up their outputs.

    Args:
        input_size: size of the input's last dimension, over all ranks.
        output_size: of the output's.
        bias: False: there is none.
        input_is_parallel: the input is this rank's part already, as ColumnParallelLinear(gather_output=False) gives it.
        init_method: fills the whole weight, [output_size, input_size], in place. The bias is 0.
        stride: as of ColumnParallelLinear, and so are keep_master_weight_for_test, skip_bias_add, params_dtype,
            use_cpu_initialization, gradient_accumulation_fusion and accumulation_in_fp16.
        sequence_parallel_enabled: each rank gets its part of the output's first dimension. The bias is then marked
            sequence_parallel_enabled: each rank has its own part's gradient, which is to be summed over the ranks.

    Attributes:
        weight: [output_size, input_size / ranks].
        bias: [output_size], or None; all of it on each rank.

    Raises:
        ValueError: the ranks, or the stride, do not divide input_size.
        RuntimeError: sequence parallelism without input_is_parallel.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Callable[[torch.Tensor], Any] = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        params_dtype: torch.dtype = torch.float32,
        use_cpu_initialization: bool = False,
        gradient_accumulation_fusion: bool = False,
        accumulation_in_fp16: bool = False,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__()
        self.input_is_parallel, self.sequence_parallel_enabled = input_is_parallel, sequence_parallel_enabled
        self.input_size_per_partition = divide(input_size, get_tensor_model_parallel_world_size())
        if sequence_parallel_enabled and not input_is_parallel:
            raise RuntimeError("sequence_parallel_enabled: pass input_is_parallel=True as well")
        self._make(
            (input_size, output_size), 1, bias, init_method, stride, keep_master_weight_for_test, skip_bias_add,
            params_dtype, use_cpu_initialization, gradient_accumulation_fusion, accumulation_in_fp16,
        )  # fmt: skip
        if self.bias is not None:
            self.bias.sequence_parallel_enabled = sequence_parallel_enabled

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output, the bias that was not added or None).

        input_: [sequence, batch, input_size], or input_size / ranks where input_is_parallel. output: [sequence, batch,
        output_size]; with sequence parallelism [sequence / ranks, ...].
        """
        node = symbolic.leaf(self, input_)
        if node is not None:
            return node
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_)
        fusion = self.gradient_accumulation_fusion
        output = self._forward_impl(input_, self.weight, None, fusion, False, False)
        if self.sequence_parallel_enabled:
            output = reduce_scatter_to_sequence_parallel_region(output)
        else:
            output = _ReduceFromModelParallelRegion.apply(output, True)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None
