"""A weight that is kept in FP8 alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from apex.transformer_engine.common.recipe import Recipe
from apex.transformer_engine.pytorch import _casts, _formats
from apex.transformer_engine.pytorch._quantizers import Quantized

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.clone.default)


class Float8Tensor(torch.Tensor):
    """FP8 codes [outputs, inputs] and one number that they are multiplied with, shown as a tensor of `dtype`.

    Torch's functions see the values: what is made of it is a plain tensor. What writes into it (an optimizer,
    `copy_`, loading a checkpoint) writes the values, which are cast anew, by a scale of their own largest magnitude.
    """

    _codes: torch.Tensor
    _scale_inv: torch.Tensor
    _initial: torch.Tensor | None

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> Float8Tensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device, requires_grad=False
        )
        made._codes, made._scale_inv, made._initial = codes, scale_inv, None
        return made

    @classmethod
    def of(cls, values: torch.Tensor, recipe: Recipe, preserve: bool = False) -> Float8Tensor:
        """Casts values. preserve: they are kept on the CPU, too."""
        with torch.no_grad():
            dtype = _formats.dtype_of(recipe, values.device, True)
            codes, scale_inv = _cast(values.detach(), dtype)
            made = cls(codes, scale_inv, values.dtype)
        made._initial = values.detach().to("cpu") if preserve else None
        return made

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """The values, a plain tensor of `dtype`, without history."""
        with torch.no_grad():
            return _casts.dequantize(self._codes, self._scale_inv, self.dtype)

    def quantized(self) -> Quantized:
        """As products take it."""
        with torch.no_grad():
            return Quantized(self._codes, self._scale_inv, _casts.transpose(self._codes), self._scale_inv)

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The values as they were made, on the CPU, or None."""
        return self._initial

    def clear_high_precision_init_val(self) -> None:
        """Forgets them."""
        self._initial = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Float8Tensor({self._codes.dtype}, scale_inv={self._scale_inv.item()}, {self.dequantize()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        codes = self._codes.view(torch.uint8), self._codes.dtype  # torch pickles no storage of FP8 by itself
        return _unpickled, (codes, self._scale_inv, self.dtype, self.requires_grad, self._initial)

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Tensor:
        made = _rebuild(
            self._codes.clone(), self._scale_inv.clone(), self.dtype, self.requires_grad, self._initial
        )
        made.__dict__.update(
            {name: value for name, value in self.__dict__.items() if name not in made.__dict__}
        )
        memo[id(self)] = made
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_codes", "_scale_inv"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Any, dtype: Any, size: Any, stride: Any) -> Float8Tensor:
        return Float8Tensor(inner["_codes"], inner["_scale_inv"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAME and isinstance(args[0], cls):
            codes, scale_inv = args[0]._codes, args[0]._scale_inv
            if func is _aten.clone.default:
                codes, scale_inv = codes.clone(), scale_inv.clone()
            made = cls(codes, scale_inv, args[0].dtype)
            made._initial = args[0]._initial
            return made
        if func is _aten._to_copy.default:
            return _moved(args[0], **kwargs)
        plain = tree_map_only(cls, lambda tensor: tensor.dequantize(), (args, kwargs))
        written = _written(func, args, kwargs)
        if not written:
            return func(*plain[0], **plain[1])
        values = func(*plain[0], **plain[1])
        for target in written:
            source = plain[0][_index(args, target)]
            codes, scale_inv = _cast(source, target._codes.dtype)
            target._codes.copy_(codes)
            target._scale_inv.copy_(scale_inv)
        return written[0] if isinstance(values, torch.Tensor) else values


def _cast(values, dtype):
    """(codes, what they are multiplied with)"""
    scale = _casts.current_scale(_casts.amax(values), _formats.largest(dtype))
    codes = _casts.cast(values, scale, dtype, None, True, False)[0]
    return codes, torch.ones_like(scale) / scale


def _written(func, args, kwargs):
    """The FP8 tensors among the positional arguments that an op writes into."""
    found = []
    for place, argument in zip(func._schema.arguments, args, strict=False):
        if place.alias_info is not None and place.alias_info.is_write and isinstance(argument, Float8Tensor):
            found.append(argument)
    return found


def _index(args, target):
    return next(i for i, argument in enumerate(args) if argument is target)


def _moved(tensor, dtype=None, device=None, **options):
    """To another device, or to another dtype, which only the values' name is."""
    codes = tensor._codes.to(device=device or tensor.device, copy=True)
    made = Float8Tensor(codes, tensor._scale_inv.to(codes.device, copy=True), dtype or tensor.dtype)
    made._initial = tensor._initial
    return made


def _rebuild(codes, scale_inv, dtype, requires_grad, initial):
    made = Float8Tensor(codes, scale_inv, dtype)
    made._initial = initial
    return made.requires_grad_(requires_grad)


def _unpickled(codes, *others):
    return _rebuild(codes[0].view(codes[1]), *others)
