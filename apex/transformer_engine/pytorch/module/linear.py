"""te.Linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from apex import _symbolic as symbolic
from apex.transformer.utils import divide
from apex.transformer_engine.pytorch import _parameters, _refusals
from apex.transformer_engine.pytorch._parallel import Sharing
from apex.transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class Linear(TransformerEngineBaseModule):
    """input weight^T + bias; in FP8 within fp8_autocast.

    Args:
        in_features, out_features: sizes of the last dimension, of input and output.
        sequence_parallel: outside of the layer each rank has its part of the first dimension.
        fuse_wgrad_accumulation: the weight's gradient is added to `weight.main_grad`.
        tp_group, tp_size: the ranks that share the layer; the size alone, where set_tensor_parallel_group comes later.
        get_rng_state_tracker: gives what has `fork()`, within which ranks draw different values; rng_tracker_name: of
            the state that they draw from, `fork(name)`.
        init_method: fills a weight in place; None: normal, 0.023.
        bias: False: there is none. Its values are 0.
        return_bias: the bias is not added, but returned beside the output.
        params_dtype: of the parameters; None: torch's default.
        parallel_mode: None, "column": ranks have parts of the outputs, "row": of the inputs.
        parameters_split: names' beginnings, ("q_", "k_"): equal parts of the outputs, each with a weight and a bias
            of its own; or a dict of such names and sizes.
        device: None: the current GPU, or the CPU where there is none.
        skip_weight_param_allocation and ub_...: of the public engine; only False.

    Attributes:
        weight: [out_features, in_features], of which this rank's part; and bias: [out_features], or None. With
            parameters_split <name>weight and <name>bias.

    Raises:
        ValueError: sizes that ranks or parts do not divide; fuse_wgrad_accumulation beside parameters_split.
        TypeError, NotImplementedError: an argument that there is not.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: _parameters.Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        rng_tracker_name: str | None = None,
        **overlaps: Any,
    ) -> None:
        _refusals.check_overlaps("Linear", overlaps)
        place = _parameters.device_of(device)
        sharing = Sharing(parallel_mode, tp_group, tp_size, sequence_parallel)
        super().__init__(1, place, sharing, fuse_wgrad_accumulation)
        self.use_bias, self.return_bias = bias, return_bias
        self._split = weights_and_biases(
            *(self, in_features, out_features, parameters_split, init_method, params_dtype, place),
            _parameters.named(get_rng_state_tracker, rng_tracker_name),
        )
        self.in_features, self.out_features = sharing.parts((in_features, out_features))

    def forward(
        self,
        inp: torch.Tensor,
        weight: None = None,
        bias: None = None,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """[..., out_features] of inp [..., in_features]; with return_bias (output, bias).

        is_first_microbatch: True: weights are cast, and main_grad begins at 0; False: the cast ones serve again;
        None: they are cast every time. weight, bias: as in the public engine no more: RuntimeError.
        """
        node = symbolic.leaf(self, inp, weight=weight, bias=bias, is_first_microbatch=is_first_microbatch)
        if node is not None:
            return node
        if weight is not None or bias is not None:
            raise RuntimeError("weight and bias cannot be passed to forward: they are the layer's own")
        entered = inp if self._sharing.size == 1 else self._sharing.enter(inp)
        output = self._share(entered, is_first_microbatch)
        return (output, whole(self, "bias")) if self.return_bias else output

    def _share(self, entered, is_first_microbatch, norm=None):
        """What the layer gives of what entered it, by `norm` first where there is one."""
        if self._sharing.size == 1:  # by few frames: eager, each shows beside the card's time
            bias = None if self.return_bias else whole(self, "bias")
            return self._multiply(entered, whole(self, "weight"), bias, is_first_microbatch, norm=norm)
        row = self._sharing.mode == "row"
        added = None if self.return_bias else whole(self, "bias")
        bias = None if row else added
        output = self._multiply(entered, whole(self, "weight"), bias, is_first_microbatch, norm=norm)
        output = self._sharing.leave(output)
        return output + added.to(output.dtype) if row and added is not None else output

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.use_bias}"


def weights_and_biases(layer, inputs, outputs, names, init, dtype, device, tracker):
    """Makes a layer's parameters; returns the beginnings of their names."""
    if layer.fuse_wgrad_accumulation and names is not None:
        raise ValueError(f"fuse_wgrad_accumulation needs one weight, not parameters_split={names!r}")
    if names is None:
        sizes = {"": outputs}
    elif isinstance(names, Mapping):
        sizes = dict(names)
        if sum(sizes.values()) != outputs:
            raise ValueError(f"parameters_split has {sum(sizes.values())} outputs, the layer {outputs}")
    else:
        sizes = {name: divide(outputs, len(names)) for name in names}
    for name, size in sizes.items():
        both = f"{name}weight", f"{name}bias"
        _parameters.add_product(layer, both, (inputs, size), layer._sharing, init, dtype, device, tracker)
    return tuple(sizes)


def whole(layer, kind):
    """The weight or the bias (or None) of a layer, of all of its parts."""
    if len(layer._split) == 1:
        return getattr(layer, layer._split[0] + kind)
    parts = [getattr(layer, name + kind) for name in layer._split]
    return None if parts[0] is None else torch.cat(parts)
