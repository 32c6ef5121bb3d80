"""What the modules of standalone GPT and BERT models share: initial weights, plain layers, tied word embeddings.

Initial weights depend on torch.initial_seed() and on the number of the layer alone: they are the same whatever ranks
the layers are split over, by tensor or by pipeline.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from apex.transformer import _collectives as collectives
from apex.transformer import layers, parallel_state
from apex.transformer.tensor_parallel import VocabParallelEmbedding
from apex.transformer.tensor_parallel.utils import current_device
from apex.transformer.testing.global_vars import get_args

InitMethod = Callable[[torch.Tensor], Any]
EMBEDDINGS = 0  # the number under which they are drawn; layers count from 1
POOLER, LM_HEAD = -1, -2


@contextlib.contextmanager
def drawn(number: int) -> Iterator[None]:
    """Weights that are made within are those of this number."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed((torch.initial_seed() + 7919 * (number + 2)) % 2**63)
    try:
        yield
    finally:
        generator.set_state(before)


def init_method_normal(sigma: float) -> InitMethod:
    """Fills a tensor in place with normal numbers of that standard deviation."""

    def fill(tensor):
        return nn.init.normal_(tensor, mean=0.0, std=sigma)

    return fill


def scaled_init_method_normal(sigma: float, num_layers: int) -> InitMethod:
    """The same, of sigma / sqrt(2 num_layers): of the layers whose outputs are added to residuals."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def attention_mask_func(attention_scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Scores, -10000 where the bool mask, which broadcasts to them, is true."""
    return attention_scores.masked_fill(attention_mask, -10000.0)


def module_size(m: nn.Module, only_trainable: bool = False) -> int:
    """Elements of the parameters, shared ones once; only_trainable: of those that require gradients."""
    chosen = (p for p in m.parameters() if p.requires_grad or not only_trainable)
    return sum(p.numel() for p in {p.data_ptr(): p for p in chosen}.values())


def placed(module: nn.Module) -> nn.Module:
    """The module where tensor parallel layers are, in their dtype."""
    args = get_args()
    return module.to("cpu" if args.use_cpu_initialization else current_device(), args.params_dtype)


def get_linear_layer(rows: int, columns: int, init_method: InitMethod) -> nn.Linear:
    """torch.nn.Linear(rows, columns), all of it on each rank; its bias is 0."""
    layer = nn.Linear(rows, columns, device="cpu", dtype=torch.float32)
    init_method(layer.weight)
    nn.init.zeros_(layer.bias)
    return placed(layer)


def get_embedding(count: int, size: int, init_method: InitMethod) -> nn.Embedding:
    """torch.nn.Embedding(count, size), all of it on each rank."""
    layer = nn.Embedding(count, size, device="cpu", dtype=torch.float32)
    init_method(layer.weight)
    return placed(layer)


def get_layer_norm() -> nn.Module:
    """apex's fused layer norm of hidden states; its output has the parameters' dtype, also of float32 residuals."""
    args = get_args()
    kind = layers.MixedFusedLayerNorm if args.fp32_residual_connection else layers.FusedLayerNorm
    norm = kind(
        args.hidden_size, eps=args.layernorm_epsilon, sequence_parallel_enabled=args.sequence_parallel
    )
    return placed(norm)


def column_options() -> dict[str, Any]:
    """What all ColumnParallelLinear layers of the models are told."""
    args = get_args()
    return dict(
        gather_output=False,
        no_async_tensor_model_parallel_allreduce=not args.async_tensor_model_parallel_allreduce,
        **row_options(),
    )


def row_options() -> dict[str, Any]:
    """What all layers with split weights are told, but for embeddings."""
    return dict(sequence_parallel_enabled=get_args().sequence_parallel, **weight_options())


def weight_options() -> dict[str, Any]:
    """Where and of which dtype split weights are."""
    args = get_args()
    return dict(params_dtype=args.params_dtype, use_cpu_initialization=bool(args.use_cpu_initialization))


class MegatronModule(nn.Module):
    """A module that knows its pipeline stage: whether it begins (`pre_process`) or ends (`post_process`) the model.

    The last stage multiplies by the word embeddings, of which it has a copy where it is not the first one, too. Sum up
    the gradients of both over parallel_state.get_embedding_group() before the step.
    """

    pre_process: bool
    post_process: bool
    language_model: Any

    def __init__(self, share_word_embeddings: bool = True) -> None:
        super().__init__()
        self.share_word_embeddings = share_word_embeddings

    def word_embeddings_weight(self) -> torch.Tensor:
        """[padded_vocab_size / ranks, hidden_size]. Raises RuntimeError on a later stage that shares none."""
        if self.pre_process:
            return self.language_model.embedding.word_embeddings.weight
        if not self.share_word_embeddings:
            raise RuntimeError("this stage has no word embeddings: share_word_embeddings is False")
        return self.word_embeddings.weight

    def initialize_word_embeddings(self, init_method_normal: Callable[[float], InitMethod]) -> None:
        """Gives later stages copies of the first one's embeddings; every stage calls it.

        Raises RuntimeError where share_word_embeddings is False.
        """
        if not self.share_word_embeddings:
            raise RuntimeError("initialize_word_embeddings: share_word_embeddings is False")
        args = get_args()
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return
        if parallel_state.is_pipeline_last_stage() and not self.pre_process:
            self.word_embeddings = VocabParallelEmbedding(
                args.padded_vocab_size, args.hidden_size, init_method=nn.init.zeros_, **weight_options()
            )
            self.word_embeddings.weight.shared = True
        if self.pre_process and not parallel_state.is_pipeline_first_stage(ignore_virtual=True):
            self.language_model.embedding.zero_parameters()
        if parallel_state.is_rank_in_embedding_group():
            group = parallel_state.get_embedding_group()
            collectives.all_reduce(self.word_embeddings_weight().data, group, "the word embeddings")
        split = parallel_state.get_pipeline_model_parallel_split_rank()
        if split is not None and self.pre_process and parallel_state.is_rank_in_position_embedding_group():
            positions = self.language_model.embedding.position_embeddings.weight.data
            group = parallel_state.get_position_embedding_group()
            collectives.all_reduce(positions, group, "the position embeddings")

    def state_dict_for_save_checkpoint(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """state_dict()."""
        return self.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
