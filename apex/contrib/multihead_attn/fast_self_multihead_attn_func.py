"""self_attn_func with the arguments of public apex's fast form."""

from __future__ import annotations

from apex.contrib.multihead_attn.self_multihead_attn_func import self_attn_func


class FastSelfAttnFunc:
    """Has the face of an autograd.Function; see SelfAttnFunc."""

    @staticmethod
    def apply(
        use_time_mask,
        is_training,
        heads,
        inputs,
        input_weights,
        output_weights,
        input_biases,
        output_biases,
        pad_mask,
        mask_additive,
        dropout_prob,
    ):
        """As self_attn_func, with scores scaled by d^-1/2."""
        return self_attn_func(
            use_time_mask, is_training, heads, None, inputs, input_weights, output_weights, input_biases,
            output_biases, pad_mask, mask_additive, dropout_prob,
        )  # fmt: skip

    @staticmethod
    def forward(ctx, *arguments):
        """As `apply`."""
        return FastSelfAttnFunc.apply(*arguments)


fast_self_attn_func = FastSelfAttnFunc.apply
