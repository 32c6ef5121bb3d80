"""te.LayerNormLinear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from apex.transformer_engine.pytorch import _parameters, _refusals
from apex.transformer_engine.pytorch._parallel import Sharing
from apex.transformer_engine.pytorch.module._norm import _NormFirst, check_normalization
from apex.transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from apex.transformer_engine.pytorch.module.linear import Linear, weights_and_biases, whole


class LayerNormLinear(_NormFirst, Linear):
    """A norm of the input, then Linear.

    Args:
        in_features, out_features: sizes of the last dimension, of input and output.
        eps, zero_centered_gamma: as of LayerNorm.
        normalization: "LayerNorm" or "RMSNorm".
        return_layernorm_output: what the norm gave is returned, too; return_layernorm_output_gathered: of all ranks'
            parts of the sequence.
        The others: as of Linear.

    Attributes:
        layer_norm_weight, layer_norm_bias: [in_features]; the latter None for RMSNorm.
        weight, bias: as of Linear.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: _parameters.Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        rng_tracker_name: str | None = None,
        **overlaps: Any,
    ) -> None:
        _refusals.check_overlaps("LayerNormLinear", overlaps)
        check_normalization(normalization)
        if parallel_mode == "row":
            raise ValueError(
                "LayerNormLinear: parallel_mode must be None or 'column': the norm needs whole rows"
            )
        place = _parameters.device_of(device)
        sharing = Sharing(parallel_mode, tp_group, tp_size, sequence_parallel)
        TransformerEngineBaseModule.__init__(self, 1, place, sharing, fuse_wgrad_accumulation)
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self._make_norm(
            normalization, eps, zero_centered_gamma, in_features, params_dtype, place, sequence_parallel
        )
        self._split = weights_and_biases(
            *(self, in_features, out_features, parameters_split, init_method, params_dtype, place),
            _parameters.named(get_rng_state_tracker, rng_tracker_name),
        )
        self.in_features, self.out_features = sharing.parts((in_features, out_features))

    def forward(  # type: ignore[override]
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """[..., out_features] of inp [..., in_features]; behind it, where asked for, the bias and the norm's output."""
        return self._run(inp, is_first_microbatch)

    def _products(self, entered, is_first_microbatch, norm):
        return self._share(entered, is_first_microbatch, norm)

    def _returned_bias(self):
        return whole(self, "bias")
