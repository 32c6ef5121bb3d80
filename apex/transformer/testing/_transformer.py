"""Transformer layers that are split over tensor parallel ranks, and the layers of a pipeline's stage."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.enums import AttnMaskType, AttnType, LayerType, ModelType
from apex.transformer.functional import fused_bias_gelu
from apex.transformer.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from apex.transformer.testing._attention import ParallelAttention, own_random
from apex.transformer.testing._modules import (
    InitMethod,
    MegatronModule,
    column_options,
    drawn,
    get_layer_norm,
    row_options,
)
from apex.transformer.testing.global_vars import get_args
from apex.transformer.utils import divide


def openai_gelu(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of gelu."""
    return F.gelu(x, approximate="tanh")


class ParallelMLP(MegatronModule):
    """hidden_size to ffn_hidden_size, gelu, and back.

    With bias_gelu_fusion gelu is the tanh form, in one pass with the bias; without, the erf form, or what --openai-gelu
    says.
    """

    def __init__(self, init_method: InitMethod, output_layer_init_method: InitMethod) -> None:
        super().__init__()
        args = get_args()
        self.dense_h_to_4h = ColumnParallelLinear(
            args.hidden_size,
            args.ffn_hidden_size,
            init_method=init_method,
            skip_bias_add=True,
            **column_options(),
        )
        self.bias_gelu_fusion = args.bias_gelu_fusion
        self.activation_func = openai_gelu if args.openai_gelu else F.gelu
        self.dense_4h_to_h = RowParallelLinear(
            args.ffn_hidden_size,
            args.hidden_size,
            input_is_parallel=True,
            init_method=output_layer_init_method,
            skip_bias_add=True,
            **row_options(),
        )

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output, bias to be added) of [sequence, batch, hidden_size]."""
        hidden, bias = self.dense_h_to_4h(hidden_states)
        hidden = (
            fused_bias_gelu(hidden, bias) if self.bias_gelu_fusion else self.activation_func(hidden + bias)
        )
        return self.dense_4h_to_h(hidden)


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float, training: bool
) -> torch.Tensor:
    """residual + dropout(x + bias)."""
    return residual + F.dropout(x + bias, p=prob, training=training)


def get_bias_dropout_add(
    training: bool,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """bias_dropout_add(x, bias, residual, prob), for training or not."""

    def of_mode(x, bias, residual, prob):
        return bias_dropout_add(x, bias, residual, prob, training)

    return of_mode


class ParallelTransformerLayer(MegatronModule):
    """Attention, in decoders attention to an encoder's output too, and a perceptron, each behind a norm."""

    def __init__(
        self,
        init_method: InitMethod,
        output_layer_init_method: InitMethod,
        layer_number: int,
        layer_type: LayerType = LayerType.encoder,
        self_attn_mask_type: AttnMaskType = AttnMaskType.padding,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        args = get_args()
        if drop_path_rate > 0.0 or args.num_experts is not None:
            raise ValueError(
                "these layers have no drop paths (drop_path_rate) and no mixture of experts (--num-experts)"
            )
        self.layer_number, self.layer_type = layer_number, layer_type
        self.apply_residual_connection_post_layernorm = args.apply_residual_connection_post_layernorm
        self.hidden_dropout = args.hidden_dropout
        methods = init_method, output_layer_init_method
        self.input_layernorm = get_layer_norm()
        self.self_attention = ParallelAttention(*methods, layer_number, attn_mask_type=self_attn_mask_type)
        self.post_attention_layernorm = get_layer_norm()
        if layer_type == LayerType.decoder:
            self.inter_attention = ParallelAttention(*methods, layer_number, AttnType.cross_attn)
            self.post_inter_attention_layernorm = get_layer_norm()
        self.mlp = ParallelMLP(*methods)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: torch.Tensor | None = None,
        inference_params: Any = None,
    ) -> torch.Tensor:
        """[sequence, batch, hidden_size], with sequence parallelism this rank's part of the sequence, to the same."""
        x, normed = hidden_states, self.input_layernorm(hidden_states)
        x = self._add(x, normed, *self.self_attention(normed, attention_mask, None, inference_params))
        normed = self.post_attention_layernorm(x)
        if self.layer_type == LayerType.decoder:
            x = self._add(x, normed, *self.inter_attention(normed, enc_dec_attn_mask, encoder_output))
            normed = self.post_inter_attention_layernorm(x)
        return self._add(x, normed, *self.mlp(normed))

    def _add(self, x, normed, output, bias):
        residual = normed if self.apply_residual_connection_post_layernorm else x
        return bias_dropout_add(output, bias, residual, self.hidden_dropout, self.training)


class NoopTransformerLayer(MegatronModule):
    """Copies hidden states: of a stage that has no layers, but whose output is not to be its input."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: torch.Tensor | None = None,
        inference_params: Any = None,
    ) -> torch.Tensor:
        return hidden_states.clone()


def get_num_layers(args: argparse.Namespace, is_encoder_and_decoder_model: bool) -> int:
    """Layers of this stage, over all of its parts. Raises ValueError where the stages do not divide them."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return args.num_layers
    embedding_alone = bool(args.standalone_embedding_stage)
    stages = parallel_state.get_pipeline_model_parallel_world_size() - embedding_alone
    if is_encoder_and_decoder_model:
        split = args.pipeline_model_parallel_split_rank
        if split is None:
            raise ValueError("a pipeline with encoder and decoder needs --pipeline-model-parallel-split-rank")
        before = parallel_state.is_pipeline_stage_before_split()
        encoders = split - embedding_alone
        stages = encoders if before else stages - encoders
    if embedding_alone and parallel_state.get_pipeline_model_parallel_rank() == 0:
        return 0
    return divide(args.num_layers, stages)


def _numbers(args, layer_type, model_type):
    """The numbers, from 1 on, of the layers of the part of the model that is being made."""
    both = model_type == ModelType.encoder_and_decoder
    count, virtual = (
        get_num_layers(args, both),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    )
    stage = parallel_state.get_pipeline_model_parallel_rank() - bool(args.standalone_embedding_stage)
    if (
        both
        and layer_type == LayerType.decoder
        and parallel_state.get_pipeline_model_parallel_world_size() > 1
    ):
        stage = parallel_state.get_pipeline_model_parallel_rank() - args.pipeline_model_parallel_split_rank
    first = stage * count
    if virtual is not None:
        if both:
            raise ValueError("interleaved schedules take no model with encoder and decoder")
        count = divide(count, virtual)
        part = parallel_state.get_virtual_pipeline_model_parallel_rank()
        first = part * divide(args.num_layers, virtual) + stage * count
    return range(first + 1, first + count + 1)


class ParallelTransformer(MegatronModule):
    """The layers of this stage, and of the last one a norm behind them."""

    def __init__(
        self,
        init_method: InitMethod,
        output_layer_init_method: InitMethod,
        layer_type: LayerType = LayerType.encoder,
        self_attn_mask_type: AttnMaskType = AttnMaskType.padding,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        args = get_args()
        self.pre_process, self.post_process, self.post_layer_norm = pre_process, post_process, post_layer_norm
        self.input_tensor: torch.Tensor | None = None
        self.recompute_granularity, self.recompute_method = args.recompute_granularity, args.recompute_method
        self.recompute_num_layers = args.recompute_num_layers
        self.sequence_parallel = args.sequence_parallel
        self.draws_own_numbers = (
            args.sequence_parallel and max(args.hidden_dropout, args.attention_dropout) > 0
        )
        self.distribute_saved_activations = args.distribute_saved_activations and not args.sequence_parallel
        self.layers = nn.ModuleList()
        model_type = getattr(args, "model_type", ModelType.encoder_or_decoder)
        for number in _numbers(args, layer_type, model_type):
            with drawn(number if layer_type == LayerType.encoder else args.num_layers + number):
                self.layers.append(
                    ParallelTransformerLayer(
                        init_method,
                        output_layer_init_method,
                        number,
                        layer_type,
                        self_attn_mask_type,
                        drop_path_rate * (number - 1) / max(1, args.num_layers - 1),
                    )
                )
        if not self.layers:
            self.layers.append(NoopTransformerLayer(1))
        self.num_layers = len(self.layers)
        if post_process and post_layer_norm:
            self.final_layernorm = get_layer_norm()

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """What the stage before gave, for forward on later stages."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: torch.Tensor | None = None,
        inference_params: Any = None,
    ) -> torch.Tensor:
        """[sequence, batch, hidden_size] to the same; on stages without pre_process, of set_input_tensor's."""
        x = hidden_states if self.pre_process else self.input_tensor
        if x is None:
            raise RuntimeError("a later stage of a pipeline: call set_input_tensor first")
        recompute = self.recompute_granularity == "full" and torch.is_grad_enabled()
        if recompute and inference_params is not None:
            raise ValueError("inference_params: nothing is run again in inference; use torch.no_grad()")
        rest = attention_mask, encoder_output, enc_dec_attn_mask
        with own_random(self.training and self.draws_own_numbers):
            for layers, again in self._runs(recompute):
                if again:
                    run = _in_turn(layers)
                    x = tensor_parallel.checkpoint(run, self.distribute_saved_activations, x, *rest)
                else:
                    x = _in_turn(layers)(x, *rest, inference_params)
        return self.final_layernorm(x) if self.post_process and self.post_layer_norm else x

    def _runs(self, recompute):
        """(layers that run in turn, whether they run again in the backward pass)."""
        layers, size = list(self.layers), self.recompute_num_layers
        if not recompute:
            return [(layers, False)]
        if self.recompute_method == "uniform":
            return [(layers[i : i + size], True) for i in range(0, len(layers), size)]
        return [([layer], number < size) for number, layer in enumerate(layers)]


def _in_turn(layers):
    def run(x, *rest):
        for layer in layers:
            x = layer(x, *rest)
        return x

    return run
