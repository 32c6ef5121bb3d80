"""BERT whose layers are split over ranks, by the arguments of apex.transformer.testing.global_vars."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex.transformer.enums import AttnMaskType
from apex.transformer.layers import FusedLayerNorm
from apex.transformer.tensor_parallel import set_tensor_model_parallel_attributes
from apex.transformer.testing._language_model import cross_entropy, get_language_model, parallel_lm_logits
from apex.transformer.testing._modules import (
    LM_HEAD,
    InitMethod,
    MegatronModule,
    drawn,
    get_linear_layer,
    init_method_normal,
    placed,
)
from apex.transformer.testing._transformer import openai_gelu
from apex.transformer.testing.global_vars import get_args


def bert_model_provider(
    pre_process: bool = True, post_process: bool = True, cpu_offload: bool = False
) -> BertModel:
    """A stage of BERT, as build_model asks for it, with the binary head unless --bert-no-binary-head."""
    head = get_args().bert_binary_head
    return BertModel(
        num_tokentypes=2 if head else 0,
        add_binary_head=head,
        pre_process=pre_process,
        post_process=post_process,
        cpu_offload=cpu_offload,
    )


def bert_extended_attention_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Bool [batch, 1, sequence, sequence], true where either word is padding, of [batch, sequence], 0 where it is."""
    present = attention_mask.unsqueeze(1) * attention_mask.unsqueeze(2)
    return (present < 0.5).unsqueeze(1)


def bert_position_ids(token_ids: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, ... for each sample, int64 [batch, sequence], of words of this shape."""
    positions = torch.arange(token_ids.size(1), dtype=torch.int64, device=token_ids.device)
    return positions.unsqueeze(0).expand_as(token_ids)


class BertLMHead(MegatronModule):
    """Logits of masked words: a linear layer, gelu, a norm, and the word embeddings.

    mpu_vocab_size: words of this rank. Other arguments as of the model.
    """

    def __init__(
        self,
        mpu_vocab_size: int,
        hidden_size: int,
        init_method: InitMethod,
        layernorm_epsilon: float,
        parallel_output: bool,
    ) -> None:
        super().__init__()
        args = get_args()
        self.parallel_output = parallel_output
        self.dense = get_linear_layer(hidden_size, hidden_size, init_method)
        for parameter in self.dense.parameters():  # it works on a part of the sequence, as the norm does
            parameter.sequence_parallel_enabled = args.sequence_parallel
        enabled = args.sequence_parallel
        self.layernorm = placed(
            FusedLayerNorm(hidden_size, eps=layernorm_epsilon, sequence_parallel_enabled=enabled)
        )
        self.gelu = openai_gelu if args.openai_gelu else F.gelu
        weight = self.layernorm.weight
        self.bias = nn.Parameter(torch.zeros(mpu_vocab_size, dtype=weight.dtype, device=weight.device))
        set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, hidden_states: torch.Tensor, word_embeddings_weight: torch.Tensor) -> torch.Tensor:
        """[sequence, batch, words / ranks], or words, of [sequence, batch, hidden_size]."""
        hidden = self.layernorm(self.gelu(self.dense(hidden_states)))
        return parallel_lm_logits(hidden, word_embeddings_weight, self.parallel_output, self.bias)


def post_language_model_processing(
    lm_output: torch.Tensor,
    pooled_output: torch.Tensor | None,
    lm_head: BertLMHead,
    binary_head: nn.Module | None,
    lm_labels: torch.Tensor | None,
    logit_weights: torch.Tensor,
    fp16_lm_cross_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(losses [sequence, batch], or without labels logits [batch, sequence, words / ranks]; binary logits or None)."""
    logits = lm_head(lm_output, logit_weights)
    binary_logits = None if binary_head is None else binary_head(pooled_output)
    if lm_labels is None:
        return logits.transpose(0, 1).contiguous(), binary_logits
    return cross_entropy(logits, lm_labels.t().contiguous(), fp16_lm_cross_entropy), binary_logits


class BertModel(MegatronModule):
    """A stage of BERT.

    Args:
        num_tokentypes: token types; 0: there are none.
        add_binary_head: the last stage also classifies pairs.
        parallel_output, pre_process, post_process, cpu_offload: as of GPTModel; so are sizes that do not divide.
    """

    def __init__(
        self,
        num_tokentypes: int = 2,
        add_binary_head: bool = True,
        parallel_output: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        cpu_offload: bool = False,
    ) -> None:
        super().__init__()
        args = get_args()
        self.forward_context: Any = (
            torch.autograd.graph.save_on_cpu if cpu_offload else contextlib.nullcontext
        )
        self.add_binary_head, self.parallel_output = add_binary_head, parallel_output
        self.pre_process, self.post_process = pre_process, post_process
        self.fp16_lm_cross_entropy = args.fp16_lm_cross_entropy
        self.language_model, self._language_model_key = get_language_model(
            num_tokentypes,
            add_binary_head,
            AttnMaskType.padding,
            pre_process=pre_process,
            post_process=post_process,
        )
        self.initialize_word_embeddings(init_method_normal)
        if post_process:
            init_method, words = (
                init_method_normal(args.init_method_std),
                self.word_embeddings_weight().size(0),
            )
            with drawn(LM_HEAD):
                self.lm_head = BertLMHead(
                    words, args.hidden_size, init_method, args.layernorm_epsilon, parallel_output
                )
                self.binary_head = (
                    get_linear_layer(args.hidden_size, 2, init_method) if add_binary_head else None
                )

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the stage before gave, or a list of it."""
        self.language_model.set_input_tensor(input_tensor)

    def forward(
        self,
        bert_model_input: torch.Tensor,
        attention_mask: torch.Tensor,
        tokentype_ids: torch.Tensor | None = None,
        lm_labels: torch.Tensor | None = None,
    ) -> Any:
        """On the last stage (losses [sequence, batch], binary logits [batch, 2] or None); hidden states on others.

        bert_model_input, tokentype_ids, lm_labels: int64 [batch, sequence]. attention_mask: the same shape, 0 where a
        word is padding. Without lm_labels logits [batch, sequence, words / ranks] take the losses' place.
        """
        with self.forward_context():
            output = self.language_model(
                bert_model_input,
                bert_position_ids(bert_model_input),
                bert_extended_attention_mask(attention_mask),
                tokentype_ids=tokentype_ids,
            )
            if not self.post_process:
                return output
            output, pooled = output if self.add_binary_head else (output, None)
            return post_language_model_processing(
                output,
                pooled,
                self.lm_head,
                self.binary_head,
                lm_labels,
                self.word_embeddings_weight(),
                self.fp16_lm_cross_entropy,
            )
