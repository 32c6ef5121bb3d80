"""A weight that is kept in FP8 alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from apex.transformer_engine.common.recipe import Recipe
from apex.transformer_engine.pytorch import _casts, _formats, constants
from apex.transformer_engine.pytorch._quantizers import Quantized
from apex.transformer_engine.pytorch.constants import DType

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.clone.default)
_CAST = (torch.float32, torch.float16, torch.bfloat16)  # what is cast from and to as it is
_KINDS = (torch.uint8, torch.int8, *_formats.OCP, *_formats.FNUZ)


class Float8Tensor(torch.Tensor):
    """FP8 codes and one number that they are multiplied with, shown as a tensor of `dtype`.

    Torch's functions see the values: what is made of it is a plain tensor. What writes into it (an optimizer,
    `copy_`, loading a checkpoint) writes the values, which are cast anew: by a scale of their own largest magnitude, or
    where it was made with fp8_meta by the scale that stands there, where the magnitude is recorded. A copy of another
    one of its format, without fp8_meta, has the same codes and scale: nothing is rounded twice.

    Args:
        data: codes [...], uint8 or one of torch's FP8 dtypes.
        fp8_meta, fp8_meta_forward, fp8_meta_index: a layer's fp8_meta, the direction, and which of its tensors this is.
        fp8_dtype: the format of codes that are uint8.
        fp8_scale_inv: a number, or float32 of one element; None: that of fp8_meta.
        dtype: shown.

    Raises:
        TypeError, ValueError: data of another dtype; neither fp8_scale_inv nor an fp8_meta with a scale for the index.
    """

    _codes: torch.Tensor
    _scale_inv: torch.Tensor
    _initial: torch.Tensor | None
    _scaling: tuple[Any, int] | None

    @staticmethod
    def __new__(
        cls,
        data: torch.Tensor,
        fp8_attrs: dict[str, Any] | None = None,
        fp8_meta: dict[str, Any] | None = None,
        fp8_meta_forward: bool = True,
        fp8_meta_index: int | None = None,
        fp8_dtype: DType | torch.dtype = DType.kFloat8E4M3,
        fp8_scale_inv: torch.Tensor | float | None = None,
        dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
    ) -> Float8Tensor:
        if fp8_attrs is not None:
            raise ValueError(
                "fp8_attrs: of the public engine's inner parts; give fp8_dtype and fp8_scale_inv"
            )
        if not isinstance(data, torch.Tensor) or data.dtype not in _KINDS:
            raise TypeError(f"Float8Tensor: data must be uint8 or FP8, not {getattr(data, 'dtype', data)}")
        codes = data.view(constants.fp8_dtype(fp8_dtype, data.device)) if data.dtype in _KINDS[:2] else data
        needed = fp8_scale_inv is None
        scaling = _scaling_of(fp8_meta, fp8_meta_forward, fp8_meta_index, needed)
        if fp8_scale_inv is None and scaling is not None:
            fp8_scale_inv = scaling[0].scale_inv[scaling[1]].clone()
        if fp8_scale_inv is None:
            raise ValueError("Float8Tensor: without fp8_meta it needs an fp8_scale_inv")
        scale_inv = torch.as_tensor(fp8_scale_inv, dtype=torch.float32, device=codes.device)
        scale_inv = _number("fp8_scale_inv", scale_inv)
        made = cls._of_parts(codes, scale_inv, dtype, scaling)
        return made.requires_grad_(requires_grad)

    @classmethod
    def _of_parts(
        cls,
        codes: torch.Tensor,
        scale_inv: torch.Tensor,
        dtype: torch.dtype,
        scaling: tuple[Any, int] | None = None,
    ) -> Float8Tensor:
        """Of codes of a dtype of FP8 and float32 of no dimension."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device, requires_grad=False
        )
        made._codes, made._scale_inv, made._initial, made._scaling = codes, scale_inv, None, scaling
        return made

    @classmethod
    def of(cls, values: torch.Tensor, recipe: Recipe, preserve: bool = False) -> Float8Tensor:
        """Casts values. preserve: they are kept on the CPU, too."""
        with torch.no_grad():
            dtype = _formats.dtype_of(recipe, values.device, True)
            codes, scale_inv = _cast(values.detach(), dtype)
            made = cls._of_parts(codes, scale_inv, values.dtype)
        made._initial = values.detach().to("cpu") if preserve else None
        return made

    @classmethod
    def to_float8(
        cls,
        tensor: torch.Tensor,
        *,
        fp8_meta: dict[str, Any] | None = None,
        fp8_meta_forward: bool = True,
        fp8_meta_index: int | None = None,
        fp8_dtype: DType | torch.dtype | None = None,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        scale_inv: torch.Tensor | None = None,
    ) -> Float8Tensor:
        """tensor [...] float32, float16 or bfloat16 in FP8; its gradient is that of what comes.

        scale: float32 of one element; None: that of fp8_meta, or 1. amax, scale_inv: where the largest magnitude
        and 1 / scale are written, too; amax None: the history of fp8_meta. fp8_dtype: None: E4M3.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _CAST:
            raise TypeError(
                f"to_float8 takes float32, float16 and bfloat16, not {getattr(tensor, 'dtype', tensor)}"
            )
        scale = None if scale is None else _number("scale", scale)
        scale_inv = None if scale_inv is None else _number("scale_inv", scale_inv)
        scaling = _scaling_of(fp8_meta, fp8_meta_forward, fp8_meta_index, scale is None)
        wanted = DType.kFloat8E4M3 if fp8_dtype is None else fp8_dtype
        dtype = constants.fp8_dtype(wanted, tensor.device)
        return _ToFloat8.apply(tensor, dtype, scaling, scale, amax, scale_inv)

    @classmethod
    def make_like(cls, tensor: Float8Tensor, *, data: torch.Tensor, **changed: Any) -> Float8Tensor:
        """Codes `data`, with the scale, dtype and format of a tensor; changed: as of the constructor."""
        given = dict(fp8_dtype=tensor._fp8_dtype, fp8_scale_inv=tensor._scale_inv.clone(), dtype=tensor.dtype)
        return cls(data, **(given | changed))

    @property
    def _data(self) -> torch.Tensor:
        """The codes as uint8, in the same memory."""
        return self._codes.view(torch.uint8)

    @property
    def _fp8_dtype(self) -> DType:
        return constants.TE_DType[self._codes.dtype]

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """The values, a plain tensor of `dtype` (None: its own). Its gradient goes to this tensor."""
        return _FromFloat8.apply(self, dtype or self.dtype)

    def from_float8(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As dequantize."""
        return self.dequantize(dtype=dtype)

    def quantize_(self, tensor: torch.Tensor) -> Float8Tensor:
        """Writes values, as copy_ does."""
        with torch.no_grad():
            return self.copy_(tensor)  # type: ignore[return-value]

    def transpose_2d(self, *, force_compute: bool = False, fill_cache: bool = False) -> torch.Tensor:
        """The codes' transpose [columns, rows], uint8; of a matrix. Raises ValueError.

        It is made anew by each call, whatever force_compute and fill_cache say.
        """
        if self.dim() != 2:
            raise ValueError(f"transpose_2d: the tensor must be a matrix; its shape is {list(self.shape)}")
        with torch.no_grad():
            return _casts.transpose(self._codes).view(torch.uint8)

    def _values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values without history."""
        with torch.no_grad():
            codes, dtype = self._codes if self.dim() else self._codes.reshape(1), dtype or self.dtype
            made = _casts.dequantize(codes, self._scale_inv, dtype if dtype in _CAST else torch.float32)
            return made.reshape(self.shape).to(dtype)

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
        return f"Float8Tensor({self._codes.dtype}, scale_inv={self._scale_inv.item()}, {self._values()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        codes = self._codes.view(torch.uint8), self._codes.dtype  # torch pickles no storage of FP8 by itself
        return _unpickled, (codes, self._scale_inv, self.dtype, self.requires_grad, self._initial)

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Tensor:
        made = _rebuild(
            self._codes.clone(), self._scale_inv.clone(), self.dtype, self.requires_grad, self._initial
        )
        memo[id(self)] = made
        others = {name: value for name, value in self.__dict__.items() if name not in made.__dict__}
        made.__dict__.update(copy.deepcopy(others, memo))
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_codes", "_scale_inv"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Any, dtype: Any, size: Any, stride: Any) -> Float8Tensor:
        return Float8Tensor._of_parts(inner["_codes"], inner["_scale_inv"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAME and isinstance(args[0], cls):
            codes, scale_inv = args[0]._codes, args[0]._scale_inv
            if func is _aten.clone.default:
                codes, scale_inv = codes.clone(), scale_inv.clone()
            made = cls._of_parts(codes, scale_inv, args[0].dtype, args[0]._scaling)
            made._initial = args[0]._initial
            return made
        if func is _aten._to_copy.default:
            return _moved(args[0], **kwargs)
        if func is _aten.copy_.default and _takes_codes(*args[:2]):
            args[0]._codes.copy_(args[1]._codes)
            args[0]._scale_inv.copy_(args[1]._scale_inv)
            return args[0]
        plain = tree_map_only(cls, lambda tensor: tensor._values(), (args, kwargs))
        values = func(*plain[0], **plain[1])
        written = [
            (target, source)
            for target, source in zip(_written(func, args, kwargs), _written(func, *plain), strict=True)
            if isinstance(target, cls)
        ]
        for target, source in written:
            codes, scale_inv = _cast(source, target._codes.dtype, target._scaling)
            target._codes.copy_(codes)
            target._scale_inv.copy_(scale_inv)
        targets = {id(source): target for target, source in written}
        return tree_map_only(torch.Tensor, lambda made: targets.get(id(made), made), values)


def _number(name, tensor):
    """Of one element, as one of no dimension, in the same memory."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a float32 tensor of one element, not {tensor!r}")
    if tensor.numel() != 1:
        raise ValueError(f"{name} must have one element, not the shape {list(tensor.shape)}")
    return tensor.view(())


def _scaling_of(meta, forward, index, needed):
    """(the state of a layer's direction, which tensor of it) of a layer's fp8_meta; None without one.

    A meta that has no state yet is as none, unless its scale is needed.
    """
    if meta is None:
        return None
    if index is None:
        raise ValueError("fp8_meta needs an fp8_meta_index")
    key = "scaling_fwd" if forward else "scaling_bwd"
    state = meta.get(key)
    if state is None or state.scale is None:
        if needed:
            raise ValueError(
                f'fp8_meta has no "{key}" with a scale, only {sorted(meta)}: give the fp8_meta of a layer, or a scale'
            )
        return None
    if not 0 <= int(index) < state.scale.numel():
        raise ValueError(f'fp8_meta_index is {int(index)}, but "{key}" has {state.scale.numel()} tensors')
    return state, int(index)


def _cast(values, dtype, scaling=None, scale=None, amax=None):
    """(codes, what they are multiplied with)

    By `scale`, else by that of a state, where the magnitude is recorded; else by one of their own magnitude.
    """
    values = values if values.dtype in _CAST else values.to(torch.float32)
    matrix = values if values.dim() else values.reshape(1)
    if scaling is not None:
        state, index = scaling
        scale = state.scale[index] if scale is None else scale
        amax = state.amax_history[0, index] if amax is None else amax
    if scale is None:
        scale = _casts.current_scale(_casts.amax(matrix), _formats.largest(dtype))
    scale = scale.to(values.device, torch.float32).reshape(())
    codes = _casts.cast(matrix, scale, dtype, amax, True, False)[0]
    return codes.reshape(values.shape), torch.ones_like(scale) / scale


class _ToFloat8(torch.autograd.Function):
    """apply(values, dtype, scaling, scale, amax, scale_inv)"""

    @staticmethod
    def forward(ctx, values, dtype, scaling, scale, amax, scale_inv):
        if scale is None and scaling is None:
            scale = torch.ones((), dtype=torch.float32, device=values.device)
        codes, inverse = _cast(values.detach(), dtype, scaling, scale, amax)
        if scale_inv is not None:
            scale_inv.copy_(inverse.reshape(scale_inv.shape))
        return Float8Tensor._of_parts(codes, inverse, values.dtype, scaling)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None, None, None


class _FromFloat8(torch.autograd.Function):
    """apply(a Float8Tensor, dtype)"""

    @staticmethod
    def forward(ctx, tensor, dtype):
        ctx.dtype = tensor.dtype
        return tensor._values(dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None


def _written(func, args, kwargs):
    """The tensors that an op writes into: also those of lists, and of out=."""
    found = []
    for i, place in enumerate(func._schema.arguments):
        if place.alias_info is not None and place.alias_info.is_write:
            argument = args[i] if i < len(args) else kwargs.get(place.name)
            found += argument if isinstance(argument, (list, tuple)) else [argument]
    return found


def _takes_codes(target, source):
    """Whether a copy may have the codes and the scale of its source: they say the same in both, and no state asks."""
    alike = isinstance(target, Float8Tensor) and isinstance(source, Float8Tensor)
    return (
        alike
        and target._scaling is None
        and target._codes.dtype == source._codes.dtype
        and target.shape == source.shape
    )


def _moved(tensor, dtype=None, device=None, **options):
    """To another device, or to another dtype, which only the values' name is; plain where it has no such numbers."""
    if dtype is not None and dtype not in (*_CAST, torch.float64):
        return tensor._values().to(device=device, dtype=dtype)
    codes = tensor._codes.to(device=device or tensor.device, copy=True)
    scale_inv = tensor._scale_inv.to(codes.device, copy=True)
    made = Float8Tensor._of_parts(codes, scale_inv, dtype or tensor.dtype, tensor._scaling)
    made._initial = tensor._initial
    return made


def _rebuild(codes, scale_inv, dtype, requires_grad, initial):
    made = Float8Tensor._of_parts(codes, scale_inv, dtype)
    made._initial = initial
    return made.requires_grad_(requires_grad)


def _unpickled(codes, *others):
    return _rebuild(codes[0].view(codes[1]), *others)


torch.serialization.add_safe_globals(
    [_unpickled]
)  # it makes tensors alone: torch.load(weights_only=True) takes them
