"""te.TransformerLayer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from apex import _symbolic as symbolic
from apex._functional import is_autocast_enabled
from apex.transformer_engine.pytorch import _parameters, _refusals
from apex.transformer_engine.pytorch.attention import InferenceParams, MultiheadAttention
from apex.transformer_engine.pytorch.module import LayerNorm, LayerNormMLP, RMSNorm

_NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


class TransformerLayer(torch.nn.Module):
    """Attention and LayerNormMLP, each with dropout and a residual connection; in a decoder cross attention between.

    GPT's layer is the default; BERT's has apply_residual_connection_post_layernorm and output_layernorm, T5's is
    layer_type="decoder".

    Args:
        hidden_size, ffn_hidden_size: of the input, and between the products of the MLP.
        num_attention_heads, num_gqa_groups, kv_channels, attention_dropout, window_size: as of MultiheadAttention.
        fuse_qkv_params, qkv_weight_interleaved: likewise.
        self_attn_mask_type, enc_dec_attn_mask_type: their masks.
        layernorm_epsilon, normalization, zero_centered_gamma: of all norms.
        hidden_dropout: chance with which a number becomes 0 before it is added to the residual, in training.
        init_method, output_layer_init_method: fill the weights before, and those that end in the residual.
        layer_number: from 1 on.
        apply_residual_connection_post_layernorm: the residual is what the norm gave.
        output_layernorm: the norm is behind the layer, and not before attention.
        layer_type: "encoder" or "decoder".
        parallel_attention_mlp: attention and MLP both take the input, and one residual is added.
        drop_path_rate: chance with which a whole sample's part of the layer is left out, in training.
        attn_input_format: "sbhd" ([s, b, hidden]) or "bshd".
        activation: as of LayerNormMLP.
        set_parallel_mode: ranks of tp_group share the layer.
        seq_length, micro_batch_size: accepted; nothing depends on them.
        apply_query_key_layer_scaling, attention_softmax_in_fp32: likewise.

    Other arguments are as of Linear.

    Attributes:
        self_attention, inter_attention (of a decoder), layernorm_mlp, layernorm (with output_layernorm).

    Raises:
        ValueError: another layer_type; fuse_wgrad_accumulation without fuse_qkv_params; sizes that do not divide.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: _parameters.Init | None = None,
        output_layer_init_method: _parameters.Init | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        apply_query_key_layer_scaling: bool = False,
        attention_softmax_in_fp32: bool = True,
        **overlaps: Any,
    ) -> None:
        _refusals.check_overlaps("TransformerLayer", overlaps)
        super().__init__()
        if layer_type not in ("encoder", "decoder"):
            raise ValueError(f"layer_type must be 'encoder' or 'decoder', not {layer_type!r}")
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError(
                "fuse_wgrad_accumulation needs fuse_qkv_params=True: one weight, with one main_grad"
            )
        if parallel_attention_mlp and (layer_type == "decoder" or output_layernorm):
            raise ValueError(
                "parallel_attention_mlp goes with layer_type='encoder' and without output_layernorm"
            )
        self.layer_type, self.hidden_dropout, self.drop_path_rate = layer_type, hidden_dropout, drop_path_rate
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.parallel_attention_mlp, self.output_layernorm = parallel_attention_mlp, output_layernorm
        self.attn_input_format = attn_input_format
        size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        # Where ranks hold parts of a sequence, each draws its own dropout.
        self._tracker = get_rng_state_tracker if sequence_parallel and size > 1 else None
        shared: dict[str, Any] = dict(
            tp_group=tp_group,
            tp_size=tp_size,
            set_parallel_mode=set_parallel_mode,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            get_rng_state_tracker=get_rng_state_tracker,
            sequence_parallel=sequence_parallel,
            params_dtype=params_dtype,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            return_bias=not parallel_attention_mlp,
            bias=bias,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=apply_residual_connection_post_layernorm,
            device=device,
        )
        attention: dict[str, Any] = dict(
            kv_channels=kv_channels,
            attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon,
            layer_number=layer_number,
            num_gqa_groups=num_gqa_groups,
            fuse_qkv_params=fuse_qkv_params,
            qkv_weight_interleaved=qkv_weight_interleaved,
            qkv_format=attn_input_format,
            **shared,
        )
        sizes = hidden_size, num_attention_heads
        self.self_attention = MultiheadAttention(
            *sizes,
            input_layernorm=not output_layernorm,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            **attention,
        )
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                *sizes,
                input_layernorm=True,
                attention_type="cross",
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                **attention,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation, **shared
        )
        if output_layernorm:
            self.layernorm = _NORMS[normalization](
                hidden_size,
                eps=layernorm_epsilon,
                sequence_parallel=sequence_parallel,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                device=device,
            )

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Says which ranks share this layer, where it was made with tp_size alone."""
        for module in self.children():
            if hasattr(module, "set_tensor_parallel_group"):
                module.set_tensor_parallel_group(tp_group)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
    ) -> torch.Tensor:
        """[s, b, hidden_size] (or [b, s, hidden_size]) of hidden_states, of their dtype, in autocast of autocast's.

        encoder_output: what a decoder attends to; enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size: how.
        The others: as of MultiheadAttention.forward.
        """
        node = symbolic.leaf(
            *(self, hidden_states),
            attention_mask=attention_mask,
            self_attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            encoder_output=encoder_output,
            enc_dec_attn_mask=enc_dec_attn_mask,
            enc_dec_attn_mask_type=enc_dec_attn_mask_type,
            enc_dec_window_size=enc_dec_window_size,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
        )
        if node is not None:
            return node
        hidden_states = _as_autocast(hidden_states)
        common = dict(
            is_first_microbatch=is_first_microbatch, checkpoint_core_attention=checkpoint_core_attention
        )
        made = self.self_attention(
            hidden_states,
            attention_mask=attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            **common,
        )
        if self.parallel_attention_mlp:
            return self._parallel(made, hidden_states, is_first_microbatch)
        after_norm = self.apply_residual_connection_post_layernorm
        hidden = self._added(made, hidden_states, after_norm and not self.output_layernorm)
        if self.layer_type == "decoder":
            made = self.inter_attention(
                hidden,
                attention_mask=enc_dec_attn_mask,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                encoder_output=encoder_output,
                **common,
            )
            hidden = self._added(made, hidden, after_norm)
        hidden = self._added(self.layernorm_mlp(hidden, is_first_microbatch), hidden, after_norm)
        return self.layernorm(hidden) if self.output_layernorm else hidden

    def _added(self, made, residual, after_norm):
        """residual + dropout(output + bias). made: (output, bias) and, behind them, what the norm gave."""
        output, bias = made[0], made[1]
        if after_norm:
            residual = made[2]
        if bias is not None:
            output = output + bias.to(output.dtype)
        return residual + self._dropped(output)

    def _parallel(self, made, hidden, is_first_microbatch):
        """input + dropout(attention + MLP)"""
        mlp = self.layernorm_mlp(hidden, is_first_microbatch)
        residual = hidden
        if self.apply_residual_connection_post_layernorm:
            made = made[0]
            mlp, residual = mlp
        return residual + self._dropped(made + mlp)

    def _dropped(self, output):
        if self.hidden_dropout > 0.0 and self.training:
            with self._tracker().fork() if self._tracker is not None else contextlib.nullcontext():
                output = F.dropout(output, self.hidden_dropout)
        if self.drop_path_rate > 0.0 and self.training:
            output = self._drop_path(output)
        return output

    def _drop_path(self, output):
        """Whole samples become 0, and the others more, so that the mean stays."""
        keep = 1.0 - self.drop_path_rate
        shape = (1, output.shape[1], 1) if self.attn_input_format == "sbhd" else (output.shape[0], 1, 1)
        kept = torch.rand(shape, dtype=torch.float32, device=output.device) < keep
        return output / keep * kept


def _as_autocast(hidden):
    """What layers pass on, too, is of autocast's dtype where there is one, not what is between the layers alone."""
    kind = hidden.device.type
    if hidden.dtype == torch.float64 or not is_autocast_enabled(kind):
        return hidden
    return hidden.to(torch.get_autocast_dtype(kind))
