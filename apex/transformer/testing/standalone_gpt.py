"""GPT whose layers are split over ranks, by the arguments of apex.transformer.testing.global_vars."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from apex.transformer.enums import AttnMaskType
from apex.transformer.testing._language_model import get_language_model, post_language_model_processing
from apex.transformer.testing._modules import MegatronModule, init_method_normal
from apex.transformer.testing.global_vars import get_args


def gpt_model_provider(
    pre_process: bool = True, post_process: bool = True, cpu_offload: bool = False
) -> GPTModel:
    """A stage of GPT, as build_model asks for it. cpu_offload or --cpu-offload: see GPTModel."""
    return GPTModel(
        pre_process=pre_process, post_process=post_process, cpu_offload=cpu_offload or get_args().cpu_offload
    )


class GPTModel(MegatronModule):
    """A stage of GPT.

    Args:
        num_tokentypes: token types; 0: there are none.
        parallel_output: logits stay split by words.
        pre_process: this is the first stage, which has embeddings.
        post_process: this is the last stage, which has logits and losses.
        cpu_offload: activations wait in the CPU's memory for the backward pass.

    The arguments' padded_vocab_size says how many words there are; the tensor parallel ranks must divide it, heads and
    ffn_hidden_size, or ValueError is raised.
    """

    def __init__(
        self,
        num_tokentypes: int = 0,
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
        self.parallel_output, self.pre_process, self.post_process = parallel_output, pre_process, post_process
        self.fp16_lm_cross_entropy = args.fp16_lm_cross_entropy
        self.language_model, self._language_model_key = get_language_model(
            num_tokentypes, False, AttnMaskType.causal, pre_process=pre_process, post_process=post_process
        )
        self.initialize_word_embeddings(init_method_normal)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the stage before gave, or a list of it."""
        self.language_model.set_input_tensor(input_tensor)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None = None,
        tokentype_ids: torch.Tensor | None = None,
        inference_params: Any = None,
    ) -> torch.Tensor:
        """The losses [sequence, batch], float32, on the last stage; hidden states for the next one on others.

        Args:
            input_ids, position_ids: words and their positions, [batch, sequence].
            attention_mask: bool, true where a key is left out, [batch or 1, 1, sequence, sequence]; None: what comes
                later is left out, as it is by the fused softmax in any case.
            labels: the words that follow, [batch, sequence]; None: returns logits [sequence, batch, words / ranks].
            tokentype_ids: [batch, sequence], of models that have token types.
            inference_params: None, or what keeps keys and values between calls: it has key_value_memory_dict (a dict,
                empty at first), max_sequence_len, max_batch_size, sequence_len_offset and batch_size_offset.
        """
        with self.forward_context():
            output = self.language_model(
                input_ids,
                position_ids,
                attention_mask,
                tokentype_ids=tokentype_ids,
                inference_params=inference_params,
            )
            if not self.post_process:
                return output
            return post_language_model_processing(
                output,
                None if labels is None else labels.t().contiguous(),
                self.word_embeddings_weight(),
                self.parallel_output,
                self.fp16_lm_cross_entropy,
            )
