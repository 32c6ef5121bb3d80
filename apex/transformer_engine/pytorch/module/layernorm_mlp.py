"""te.LayerNormMLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from apex._functional import call
from apex.transformer_engine.pytorch import _parameters, _refusals
from apex.transformer_engine.pytorch._casts import Activation
from apex.transformer_engine.pytorch._mlp import MLP
from apex.transformer_engine.pytorch._parallel import Sharing
from apex.transformer_engine.pytorch._state import current
from apex.transformer_engine.pytorch.module._norm import _NormFirst, check_normalization
from apex.transformer_engine.pytorch.module.base import TransformerEngineBaseModule

# (the function, whether the other half of the columns is multiplied with it)
ACTIVATIONS = {
    "gelu": ("gelu", False),
    "relu": ("relu", False),
    "qgelu": ("quick_gelu", False),
    "srelu": ("squared_relu", False),
    "geglu": ("gelu", True),
    "reglu": ("relu", True),
    "swiglu": ("silu", True),
    "qgeglu": ("quick_gelu", True),
    "sreglu": ("squared_relu", True),
}
_activation = torch.ops.apex.bias_activation_forward.default


class LayerNormMLP(_NormFirst, TransformerEngineBaseModule):
    """A norm of the input, a product, an activation, a second product.

    Args:
        hidden_size: size of the last dimension, of input and output.
        ffn_hidden_size: between the products.
        eps, zero_centered_gamma: as of LayerNorm.
        return_bias: the second bias is not added, but returned beside the output.
        bias: False: there are none.
        normalization: "LayerNorm" or "RMSNorm".
        activation: one of ACTIVATIONS: "gelu" (its tanh form), "relu", "qgelu" (x sigmoid(1.702 x)), "srelu"
            (max(x, 0)^2), and with a second half of fc1 that is multiplied with them "geglu", "reglu", "qgeglu",
            "sreglu", and "swiglu".
        init_method, output_layer_init_method: fill the first and the second weight in place; None: normal, 0.023.
        return_layernorm_output: what the norm gave is returned, too; return_layernorm_output_gathered: of all ranks'
            parts of the sequence.
        set_parallel_mode: ranks of tp_group share the layer: the first product by outputs, the second by inputs.
        seq_length, micro_batch_size: accepted, and not needed.
        The others: as of Linear.

    Attributes:
        layer_norm_weight, layer_norm_bias: [hidden_size]; the latter None for RMSNorm.
        fc1_weight, fc1_bias: [ffn_hidden_size, hidden_size], twice the rows where the activation has two halves.
        fc2_weight, fc2_bias: [hidden_size, ffn_hidden_size].

    Raises:
        NotImplementedError: another activation. ValueError, TypeError: as of Linear.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        init_method: _parameters.Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        output_layer_init_method: _parameters.Init | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        **overlaps: Any,
    ) -> None:
        _refusals.check_overlaps("LayerNormMLP", overlaps)
        check_normalization(normalization)
        if activation not in ACTIVATIONS:
            raise NotImplementedError(f"activation {activation!r}: there are {', '.join(ACTIVATIONS)}")
        place = _parameters.device_of(device)
        mode = ("column", "row") if set_parallel_mode else (None, None)
        sharing = Sharing(mode[0], tp_group, tp_size, sequence_parallel)
        super().__init__(2, place, sharing, fuse_wgrad_accumulation)
        self._second = Sharing(mode[1], tp_group, tp_size, sequence_parallel)
        self.use_bias, self.return_bias = bias, return_bias
        self.activation = activation
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self._make_norm(
            normalization, eps, zero_centered_gamma, hidden_size, params_dtype, place, sequence_parallel
        )
        halves = 2 if ACTIVATIONS[activation][1] else 1
        for name, share, sizes, init in (
            ("fc1", sharing, (hidden_size, halves * ffn_hidden_size), init_method),
            ("fc2", self._second, (ffn_hidden_size, hidden_size), output_layer_init_method),
        ):
            both = f"{name}_weight", f"{name}_bias"
            _parameters.add_product(
                self, both, sizes, share, init, params_dtype, place, get_rng_state_tracker
            )

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        super().set_tensor_parallel_group(tp_group)
        self._second.group = tp_group

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """[..., hidden_size]; behind it, where asked for, the second bias and the norm's output."""
        return self._run(inp, is_first_microbatch)

    def _returned_bias(self):
        return self.fc2_bias

    def _products(self, entered, is_first_microbatch, norm):
        late = self.return_bias or self._second.size > 1
        bias = None if late else self.fc2_bias
        if current.fuses(delayed=False):
            output = self._in_one(entered, bias, is_first_microbatch, norm)
        else:
            hidden = self._multiply(entered, self.fc1_weight, None, is_first_microbatch, 0)
            function, gated = ACTIVATIONS[self.activation]
            hidden = call("bias_activation", _activation, 1, (hidden, self.fc1_bias, function, gated))
            output = self._multiply(hidden, self.fc2_weight, bias, is_first_microbatch, 1)
        output = self._second.leave(output)
        if late and not self.return_bias and self.fc2_bias is not None:
            output = output + self.fc2_bias.to(output.dtype)
        return output

    def _in_one(self, entered, bias, is_first_microbatch, norm):
        """Both products; the activation and its gradient are made in the passes of their casts."""
        made, gamma, beta = norm or (None, None, None)
        plans = (
            self._plan(entered, self.fc1_weight, 0, is_first_microbatch, made),
            self._plan(entered, self.fc2_weight, 1, is_first_microbatch),
        )
        activation = Activation(*ACTIVATIONS[self.activation])
        tensors = gamma, beta, self.fc1_weight, self.fc1_bias, self.fc2_weight, bias
        return MLP.apply(entered, *tensors, plans, activation)
