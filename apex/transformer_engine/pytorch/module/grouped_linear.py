"""te.GroupedLinear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from apex import _symbolic as symbolic
from apex.transformer_engine.pytorch import _parameters, _refusals
from apex.transformer_engine.pytorch._parallel import Sharing
from apex.transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class GroupedLinear(TransformerEngineBaseModule):
    """Several Linear layers of one size, each for its part of the rows, as the experts of a mixture are.

    Args:
        num_gemms: how many.
        tp_group, tp_size, parallel_mode: each rank has its part of the outputs ("column") or inputs ("row"); nothing
            is sent between ranks, which is the caller's part.
        The others: as of Linear.

    Attributes:
        weight0, weight1, ...: [out_features, in_features], of which this rank's part; bias0, ...: [out_features].

    Raises:
        ValueError: sizes that ranks do not divide; sequence_parallel over more than one rank.
        TypeError, NotImplementedError: an argument that there is not.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: _parameters.Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | None = None,
        **overlaps: Any,
    ) -> None:
        _refusals.check_overlaps("GroupedLinear", overlaps)
        place = _parameters.device_of(device)
        sharing = Sharing(parallel_mode, tp_group, tp_size, sequence_parallel)
        if sharing.sequence:
            raise ValueError("GroupedLinear sends nothing between ranks: sequence_parallel must be False")
        super().__init__(num_gemms, place, sharing, fuse_wgrad_accumulation)
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.in_features, self.out_features = sharing.parts((in_features, out_features))
        tracker = _parameters.named(get_rng_state_tracker, rng_tracker_name)
        for index in range(num_gemms):
            both, sizes = (f"weight{index}", f"bias{index}"), (in_features, out_features)
            _parameters.add_product(self, both, sizes, sharing, init_method, params_dtype, place, tracker)

    def forward(
        self, inp: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor | None]]:
        """[..., out_features] of inp [..., in_features]; with return_bias (output, the biases).

        m_splits: how many rows each layer takes, of all leading dimensions' together. Raises ValueError where they are
        not as many as layers, or do not add up to the rows.
        """
        node = symbolic.leaf(self, inp, m_splits, is_first_microbatch=is_first_microbatch)
        if node is not None:
            return node
        rows = inp.reshape(-1, inp.shape[-1])
        if len(m_splits) != self.num_gemms or sum(m_splits) != rows.shape[0]:
            raise ValueError(
                f"m_splits {list(m_splits)} must be {self.num_gemms} numbers that add up to {rows.shape[0]} rows"
            )
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
        parts = [
            self._multiply(
                *(part, getattr(self, f"weight{index}"), None if self.return_bias else biases[index]),
                *(is_first_microbatch, index),
            )
            for index, part in enumerate(rows.split(list(m_splits)))
        ]
        output = torch.cat(parts).reshape(*inp.shape[:-1], self.out_features)
        return (output, biases) if self.return_bias else output

    def extra_repr(self) -> str:
        return f"{self.num_gemms} of {self.in_features}, {self.out_features}, bias={self.use_bias}"
