"""How channels flow through a model that torch.fx traced: which axis of each value holds them, and what ties them.

What is not known to keep channels apart freezes them: their order does not change.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx, nn

from apex.contrib.sparsity._layers import POOL, Layers
from apex.contrib.sparsity._reshape import pooled, reshaped
from apex.contrib.sparsity._spaces import Site, Space, settle
from apex.contrib.sparsity._values import Attribute, Channels, Shape, Size

_UNARY = {
    "relu", "relu6", "gelu", "silu", "mish", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh",
    "leaky_relu", "elu", "selu", "celu", "softplus", "softsign", "logsigmoid", "softmax", "log_softmax",
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "contiguous",
    "clone", "detach", "float", "half", "bfloat16", "double", "to", "type", "type_as", "cuda", "cpu", "abs",
    "exp", "log", "sqrt", "rsqrt", "neg", "square", "clamp", "sin", "cos", "pow",
}  # fmt: skip
_CASTS = ("to", "type", "type_as")
# Their other arguments are no operands: sizes, dtypes, devices.
_SIZED = (*_CASTS, "view", "reshape", "expand", "expand_as")
_BINARY = {
    "add", "sub", "mul", "div", "truediv", "maximum", "minimum", "iadd", "isub", "imul", "itruediv",
}  # fmt: skip
_HARMLESS = {
    "dim", "size", "numel", "is_contiguous", "stride", "element_size", "ndimension",
}  # fmt: skip
_METADATA = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")


class Tracer(fx.Tracer):
    """Takes apex's layers as leaves, as it takes those of torch.nn."""

    def is_leaf_module(self, m, module_qualified_name):
        ours = m.__module__.startswith("apex.") and not isinstance(m, (nn.Sequential, nn.ModuleList))
        return ours or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module) -> fx.Graph:
    """The model's graph. Raises what torch.fx raises for a model that it cannot trace."""
    before = set(vars(model))
    try:
        return Tracer().trace(model)
    finally:
        # torch.fx keeps tensors that forward() makes in the model.
        for name in set(vars(model)) - before:
            delattr(model, name)


def _leaves(values):
    found: list = []
    fx.node.map_aggregate(values, lambda value: found.append(value) or value)
    return found


class Flow(Layers):
    """Follows the channels of a traced model.

    After it is made: `roots`, the spaces that remain; their sites say which parameters they are in.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph):
        self.modules = dict(model.named_modules())
        self.model = model
        self.spaces: list[Space] = []
        self.pinned: set[int] = set()
        self.values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            self.node = node
            self.values[node] = getattr(self, f"_{node.op}")(node)
        self.roots = settle(self.spaces, self.pinned)

    # ---- what the methods below share ----------------------------------------------------------------

    def _given(self, node):
        """The values of the node's arguments, in its argument structure, constants as they are."""
        return fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self.values[n])

    def _has_unknown(self, node):
        """Whether an argument is a value of which nothing is known."""
        return any(self.values[argument] is None for argument in node.all_input_nodes)

    def _stop(self, *values):
        """Nothing is known of what these go into."""
        for value in _leaves(list(values)):
            if isinstance(value, Channels):
                value.freeze(f"{self.node.name} does not keep channels apart")
            elif isinstance(value, Attribute):
                self.pinned.add(id(value.tensor))

    def _stop_all(self, node):
        args, kwargs = self._given(node)
        self._stop(*args, *kwargs.values())

    def _new(self, size, dim, rank, batch):
        self.spaces.append(Space(size))
        return Channels((self.spaces[-1],), dim, rank, batch)

    def _name(self, path):
        return path if isinstance(path, str) else self.node.name

    def _sites(self, channels, tensor, name, dim, kind, makes=False):
        """Notes that the channels lie in the tensor's dimension `dim`. `tensor` may be None."""
        offset = 0
        for part in channels.parts if tensor is not None else ():
            part.add(Site(self.node.name, name, tensor, dim, kind, part.size, offset, makes=makes))
            offset += part.size

    def _unite(self, one, two):
        """One order for two values of the same axis. False if they do not fit."""
        sizes = [[part.size for part in value.parts] for value in (one, two)]
        if one.dim != two.dim or one.flat != two.flat or sizes[0] != sizes[1]:
            return False
        for first, second in zip(one.parts, two.parts, strict=True):
            first.unite(second)
        return True

    # ---- nodes ---------------------------------------------------------------------------------------

    def _placeholder(self, node):
        return None

    def _output(self, node):
        self._stop_all(node)

    def _get_attr(self, node):
        value = self.model
        for atom in node.target.split("."):
            value = getattr(value, atom, None)
        return Attribute(value, node.target) if torch.is_tensor(value) else None

    def _call_module(self, node):
        module = self.modules[node.target]
        if isinstance(module, nn.MultiheadAttention):
            return self._attention(node, module)
        args, kwargs = self._given(node)
        x = args[0] if args else None
        handler = self._handler(module)
        if handler is None or kwargs or len(args) != 1:
            return self._stop_all(node)
        return handler(module, x if isinstance(x, Channels) else None)

    def _call_function(self, node):
        name = getattr(node.target, "__name__", "")
        if node.target is getattr and node.args[1] in _METADATA:
            value = self.values.get(node.args[0])
            return Shape(value) if node.args[1] == "shape" and isinstance(value, Channels) else None
        if node.target is operator.getitem:
            return self._item(node)
        return self._operation(node, name)

    def _call_method(self, node):
        return self._operation(node, node.target.removesuffix("_"))

    def _item(self, node):
        value, index = self.values.get(node.args[0]), node.args[1]
        if isinstance(value, tuple) and isinstance(index, int):
            return value[index]
        if isinstance(value, Shape):
            return Size(value.of, index)
        return self._stop_all(node)

    def _operation(self, node, name):
        """A function or method by its name."""
        args, kwargs = self._given(node)
        x = args[0] if args else None
        if name in ("cat", "concat", "concatenate"):
            return self._concatenate(node, args, kwargs)
        if name in _HARMLESS:
            return self._size(name, x, args)
        if "out" in kwargs or (name not in _SIZED and self._has_unknown(node)):
            return self._stop_all(node)
        if name in _BINARY:
            return self._binary(node, args)
        if isinstance(x, Attribute) and name in ("expand", "expand_as"):
            return x
        if not isinstance(x, Channels):
            return self._stop_all(node)
        others = [value for value in _leaves([args[1:], kwargs]) if isinstance(value, (Channels, Attribute))]
        if name in _UNARY and (not others or name in _CASTS):
            return x
        pool = POOL.fullmatch(name)
        made = pooled(x, int(pool[1])) if pool and not others else reshaped(name, x, args[1:], kwargs)
        return made if made is not None else self._stop_all(node)

    def _size(self, name, x, args):
        if name != "size" or not isinstance(x, Channels):
            return None
        return Size(x, args[1]) if len(args) > 1 else Shape(x)

    def _binary(self, node, args):
        channels = [value for value in args[:2] if isinstance(value, Channels)]
        if len(channels) == 2 and self._unite(*channels):
            return channels[0]
        others = [value for value in args[:2] if not isinstance(value, (Channels, int, float))]
        if len(channels) == 1 and all(
            isinstance(o, Attribute) and self._meets(channels[0], o) for o in others
        ):
            return channels[0]
        return self._stop_all(node)

    def _meets(self, x, attribute):
        """Whether an attribute that is added to (or multiplies) channels has one value for all, or is one of them."""
        shape = attribute.tensor.shape
        if x.flat or -x.dim > len(shape) or shape[x.dim] == 1:
            return not x.flat
        if shape[x.dim] != x.size:
            return False
        self._sites(x, attribute.tensor, attribute.name, len(shape) + x.dim, "K", makes=True)
        return True

    def _concatenate(self, node, args, kwargs):
        tensors, axis = args[0], kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else None
        alike = isinstance(first, Channels) and all(
            isinstance(x, Channels) and (x.dim, x.rank, x.flat) == (first.dim, first.rank, False)
            for x in tensors
        )
        if not alike or not isinstance(axis, int) or (axis >= 0 and first.rank is None):
            return self._stop_all(node)
        if (axis if axis < 0 else axis - first.rank) == first.dim:
            parts = tuple(part for x in tensors for part in x.parts)
            return dataclasses.replace(first, parts=parts)
        if not all(self._unite(first, x) for x in tensors[1:]):
            return self._stop_all(node)
        return dataclasses.replace(first, batch=object())
