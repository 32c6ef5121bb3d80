"""Embeddings, transformer layers and logits of language models, as a stage of a pipeline holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from apex.transformer import tensor_parallel
from apex.transformer.enums import AttnMaskType, LayerType
from apex.transformer.tensor_parallel import VocabParallelEmbedding
from apex.transformer.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from apex.transformer.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from apex.transformer.testing._attention import own_random
from apex.transformer.testing._modules import (
    EMBEDDINGS,
    POOLER,
    InitMethod,
    MegatronModule,
    drawn,
    get_embedding,
    get_linear_layer,
    init_method_normal,
    scaled_init_method_normal,
    weight_options,
)
from apex.transformer.testing._transformer import ParallelTransformer
from apex.transformer.testing.global_vars import get_args


def parallel_lm_logits(
    input_: torch.Tensor,
    word_embeddings_weight: torch.Tensor,
    parallel_output: bool,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[sequence, batch, words / ranks] of hidden states [sequence, batch, hidden_size].

    parallel_output: False: logits are gathered, [sequence, batch, words]. bias: [words / ranks].
    """
    args = get_args()
    overlaps = args.async_tensor_model_parallel_allreduce
    if not (overlaps or args.sequence_parallel):
        input_ = copy_to_tensor_model_parallel_region(input_)
    logits = linear_with_grad_accumulation_and_async_allreduce(
        input_,
        word_embeddings_weight,
        bias,
        False,
        overlaps and not args.sequence_parallel,
        args.sequence_parallel,
    )
    return logits if parallel_output else gather_from_tensor_model_parallel_region(logits)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, fp16_lm_cross_entropy: bool) -> torch.Tensor:
    """The loss of each word, float32, of logits [..., words / ranks] and labels [...]."""
    if fp16_lm_cross_entropy and logits.dtype != torch.float16:
        raise TypeError(f"--fp16-lm-cross-entropy: the logits are {logits.dtype}")
    return tensor_parallel.vocab_parallel_cross_entropy(
        logits if fp16_lm_cross_entropy else logits.float(), labels
    )


def post_language_model_processing(
    lm_output: torch.Tensor,
    labels: torch.Tensor | None,
    logit_weights: torch.Tensor,
    parallel_output: bool,
    fp16_lm_cross_entropy: bool,
) -> torch.Tensor:
    """The losses [sequence, batch] of labels of this shape; without labels, the logits of parallel_lm_logits."""
    logits = parallel_lm_logits(lm_output, logit_weights, parallel_output)
    return logits if labels is None else cross_entropy(logits, labels, fp16_lm_cross_entropy)


class Pooler(MegatronModule):
    """tanh of a linear layer, of the hidden states of one word: [batch, hidden_size]."""

    def __init__(self, hidden_size: int, init_method: InitMethod) -> None:
        super().__init__()
        self.dense = get_linear_layer(hidden_size, hidden_size, init_method)
        self.sequence_parallel = get_args().sequence_parallel

    def forward(self, hidden_states: torch.Tensor, sequence_index: int = 0) -> torch.Tensor:
        """Of [sequence, batch, hidden_size], with sequence parallelism this rank's part of the sequence."""
        if self.sequence_parallel:  # all ranks go on with the same
            hidden_states = gather_from_sequence_parallel_region(hidden_states, to_model_parallel=False)
        return torch.tanh(self.dense(hidden_states[sequence_index]))


class Embedding(MegatronModule):
    """Embeddings of words, which are split over the ranks, of positions and of token types; dropout."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        max_sequence_length: int,
        embedding_dropout_prob: float,
        init_method: InitMethod,
        num_tokentypes: int = 0,
    ) -> None:
        super().__init__()
        args = get_args()
        self.hidden_size, self.init_method, self.num_tokentypes = hidden_size, init_method, num_tokentypes
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, hidden_size, init_method, **weight_options()
        )
        self.position_embeddings = get_embedding(max_sequence_length, hidden_size, init_method)
        self.tokentype_embeddings: nn.Embedding | None = None
        if num_tokentypes > 0:
            self.tokentype_embeddings = get_embedding(num_tokentypes, hidden_size, init_method)
        self.fp32_residual_connection, self.sequence_parallel = (
            args.fp32_residual_connection,
            args.sequence_parallel,
        )
        self.embedding_dropout = nn.Dropout(embedding_dropout_prob)

    def zero_parameters(self) -> None:
        """Fills all embeddings with 0, and marks them `shared`: of a later stage, before the first one's are added."""
        for parameter in self.parameters():
            parameter.data.zero_()
            parameter.shared = True

    def add_tokentype_embeddings(self, num_tokentypes: int) -> None:
        """Adds embeddings of token types. Raises RuntimeError where there are some."""
        if self.tokentype_embeddings is not None:
            raise RuntimeError("there are embeddings of token types already")
        self.num_tokentypes = num_tokentypes
        self.tokentype_embeddings = get_embedding(num_tokentypes, self.hidden_size, self.init_method)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        tokentype_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[sequence, batch, hidden_size], with sequence parallelism this rank's part, of words [batch, sequence].

        Raises ValueError where token types are given and there are no embeddings for them, or the other way round.
        """
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        if (tokentype_ids is None) != (self.tokentype_embeddings is None):
            raise ValueError("tokentype_ids and embeddings of token types: one is here without the other")
        if self.tokentype_embeddings is not None:
            embeddings = embeddings + self.tokentype_embeddings(tokentype_ids)
        embeddings = embeddings.transpose(0, 1).contiguous()
        if self.fp32_residual_connection:
            embeddings = embeddings.float()
        if self.sequence_parallel:
            embeddings = scatter_to_sequence_parallel_region(embeddings)
        drops = self.training and self.embedding_dropout.p > 0
        with own_random(drops and self.sequence_parallel):
            return self.embedding_dropout(embeddings)


class TransformerLanguageModel(MegatronModule):
    """A stage: embeddings where it is the first one, layers of an encoder, a decoder or both, a pooler at the end."""

    def __init__(
        self,
        init_method: InitMethod,
        output_layer_init_method: InitMethod,
        encoder_attn_mask_type: AttnMaskType,
        num_tokentypes: int = 0,
        add_encoder: bool = True,
        add_decoder: bool = False,
        decoder_attn_mask_type: AttnMaskType = AttnMaskType.causal,
        add_pooler: bool = False,
        pre_process: bool = True,
        post_process: bool = True,
    ) -> None:
        super().__init__()
        if not (add_encoder or add_decoder):
            raise ValueError("a stage has an encoder, a decoder or both")
        args = get_args()
        self.pre_process, self.post_process = pre_process, post_process
        self.add_encoder, self.add_decoder, self.add_pooler = add_encoder, add_decoder, add_pooler
        self.encoder_hidden_state: torch.Tensor | None = None
        self.encoder: ParallelTransformer | None = None
        self.decoder: ParallelTransformer | None = None
        if pre_process:
            with drawn(EMBEDDINGS):
                self.embedding = Embedding(
                    args.hidden_size,
                    args.padded_vocab_size,
                    args.max_position_embeddings,
                    args.hidden_dropout,
                    init_method,
                    num_tokentypes,
                )
        methods = init_method, output_layer_init_method
        if add_encoder:
            self.encoder = ParallelTransformer(
                *methods, LayerType.encoder, encoder_attn_mask_type, True, pre_process, post_process
            )
        if add_decoder:
            self.decoder = ParallelTransformer(
                *methods, LayerType.decoder, decoder_attn_mask_type, True, pre_process, post_process
            )
        if post_process and add_pooler:
            with drawn(POOLER):
                self.pooler = Pooler(args.hidden_size, init_method)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the stage before gave: a tensor, None, or a list of one; of decoders also (decoder's, encoder's)."""
        given = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        if len(given) > (1 if self.encoder is not None else 2) or not given:
            raise ValueError(f"set_input_tensor: {len(given)} tensors do not fit this stage")
        if self.encoder is not None:
            self.encoder.set_input_tensor(given[0])
        elif self.decoder is not None:
            self.decoder.set_input_tensor(given[0] if len(given) == 2 else None)
            self.encoder_hidden_state = given[-1]

    def forward(
        self,
        enc_input_ids: torch.Tensor | None,
        enc_position_ids: torch.Tensor | None,
        enc_attn_mask: torch.Tensor | None,
        dec_input_ids: torch.Tensor | None = None,
        dec_position_ids: torch.Tensor | None = None,
        dec_attn_mask: torch.Tensor | None = None,
        enc_dec_attn_mask: torch.Tensor | None = None,
        tokentype_ids: torch.Tensor | None = None,
        inference_params: Any = None,
        pooling_sequence_index: int = 0,
        enc_hidden_states: torch.Tensor | None = None,
        output_enc_hidden: bool = False,
    ) -> Any:
        """Hidden states [sequence, batch, hidden_size]: the encoder's, or (decoder's, encoder's); then the pooler's.

        Words and positions are [batch, sequence]. enc_hidden_states stand for the encoder's output; output_enc_hidden:
        the decoder does not run.
        """
        encoded = enc_hidden_states
        if encoded is None and self.encoder is not None:
            x = self.embedding(enc_input_ids, enc_position_ids, tokentype_ids) if self.pre_process else None
            encoded = self.encoder(x, enc_attn_mask, inference_params=inference_params)
        elif encoded is None:
            encoded = self.encoder_hidden_state
        pools = self.post_process and self.add_pooler
        pooled = (self.pooler(encoded, pooling_sequence_index),) if pools else ()
        if self.decoder is None or output_enc_hidden:
            return (encoded, *pooled) if pooled else encoded
        x = self.embedding(dec_input_ids, dec_position_ids) if self.pre_process else None
        decoded = self.decoder(x, dec_attn_mask, encoded, enc_dec_attn_mask, inference_params)
        return decoded, encoded, *pooled


def get_language_model(
    num_tokentypes: int,
    add_pooler: bool,
    encoder_attn_mask_type: AttnMaskType,
    init_method: InitMethod | None = None,
    scaled_init_method: InitMethod | None = None,
    add_encoder: bool = True,
    add_decoder: bool = False,
    decoder_attn_mask_type: AttnMaskType = AttnMaskType.causal,
    pre_process: bool = True,
    post_process: bool = True,
) -> tuple[TransformerLanguageModel, str]:
    """(the model, "language_model", its name in checkpoints). Arguments as TransformerLanguageModel's.

    init_method, scaled_init_method: of weights, and of those whose outputs are added to residuals; None: normal ones,
    by --init-method-std.
    """
    args = get_args()
    model = TransformerLanguageModel(
        init_method or init_method_normal(args.init_method_std),
        scaled_init_method or scaled_init_method_normal(args.init_method_std, args.num_layers),
        encoder_attn_mask_type,
        num_tokentypes,
        add_encoder,
        add_decoder,
        decoder_attn_mask_type,
        add_pooler,
        pre_process,
        post_process,
    )
    return model, "language_model"
