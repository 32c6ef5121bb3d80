"""How channels flow through a model that torch.fx traced: which axis of each value holds them, and what ties them.

What is not known to keep channels apart freezes them: their order does not change.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx, nn

from apex.contrib.sparsity._layers import POOL, Layers, why_unknown
from apex.contrib.sparsity._reshape import pooled, reshaped
from apex.contrib.sparsity._spaces import Site, Space, settle
from apex.contrib.sparsity._trace import Traced
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


def _leaves(values):
    found: list = []
    fx.node.map_aggregate(values, lambda value: found.append(value) or value)
    return found


def _traced_in(values):
    return any(isinstance(value, (Channels, Attribute, Shape, Size)) for value in _leaves(values))


def _floating_buffers(module):
    return [b for n, b in module.named_buffers(recurse=False) if b.is_floating_point() and "_mma_" not in n]


def _broadcast(one, two):
    """The channels of both in what is made of two tensors of one axis: the larger number of dimensions counts."""
    if one.rank is None or two.rank is None:
        return dataclasses.replace(one, rank=None, batch=object())
    larger = one if one.rank >= two.rank else two
    return (
        larger if one.rank != two.rank or one.batch is two.batch else dataclasses.replace(one, batch=object())
    )


def _with_attribute(x, attribute):
    """The channels of x after a parameter or buffer was added, which may have more dimensions, or a larger first."""
    shape = attribute.tensor.shape
    if attribute.expanded or x.rank is None:
        return dataclasses.replace(x, rank=None, batch=object())
    if len(shape) < x.rank or (len(shape) == x.rank and shape[0] == 1):
        return x
    return dataclasses.replace(x, rank=len(shape), batch=object())


class Flow(Layers):
    """Follows the channels of a model through its graphs, one of each mode.

    fixed: {(id of a tensor, None or "rows"): why it stays as it is}. After it is made: `roots`, the spaces that remain,
    whose sites say which parameters they are in, and `unsure`, sentences about what could not be looked into.
    """

    def __init__(self, model: nn.Module, graphs: list[Traced], fixed: dict[tuple, str]):
        self.modules = dict(model.named_modules())
        self.model = model
        self.spaces: list[Space] = []
        self.pinned: dict[tuple, str] = dict(fixed)
        self.values: dict[fx.Node, Any] = {}
        self.unsure: list[str] = []
        self.reached: set[int] = set()
        for traced in graphs:
            self._follow(traced)
        self._stop_unreached()
        self.roots = settle(self.spaces, self.pinned)
        staying: dict[str, dict[str, None]] = {}
        for site in (site for root in self.roots for site in root.sites):
            if (id(site.tensor), None) in fixed:
                staying.setdefault(fixed[id(site.tensor), None], {})[site.name] = None
        self.unsure += [f"{', '.join(list(names)[:4])} {why}" for why, names in staying.items()]

    def _follow(self, traced):
        for node in traced.graph.nodes:
            self.node = node
            self.values[node] = getattr(self, f"_{node.op}")(node)
        for node, attribute in traced.held.items():
            value = self.values[node]
            if isinstance(value, Channels):
                self._stop(value, why=f"is kept by forward() in {attribute}")
                self.unsure.append(f"{node.name} is kept by forward() in {attribute}, where all may read it")
        for tensor in traced.unseen:
            self.reached.add(id(tensor))
            self.pinned[id(tensor), None] = "may be read by forward() in Python"

    def _stop_unreached(self):
        """Layers that no graph reaches, as heads that other methods call, may read any channels."""
        names = []
        for name, module in self.modules.items():
            own = [*module.parameters(recurse=False), *_floating_buffers(module)]
            if id(module) not in self.reached and any(id(tensor) not in self.reached for tensor in own):
                names.append(name or type(module).__name__)
        if names:
            why = f"forward() does not reach {', '.join(names[:4])}, which may read any channels"
            self.unsure.append(why)
            for space in self.spaces:
                space.freeze(why)

    # ---- what the methods below share ----------------------------------------------------------------

    def _given(self, node):
        """The values of the node's arguments, in its argument structure, constants as they are."""
        return fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self.values[n])

    def _has_unknown(self, node):
        """Whether an argument is a value of which nothing is known."""
        return any(self.values[argument] is None for argument in node.all_input_nodes)

    def _stop(self, *values, why=None):
        """Nothing is known of what these go into."""
        for value in _leaves(list(values)):
            if isinstance(value, Channels):
                value.freeze(why or f"{self.node.name} does not keep channels apart")
            elif isinstance(value, Attribute):
                self.pinned[id(value.tensor), None] = "is used otherwise too"

    def _stop_at(self, x, module, why="is called with channels that are not known"):
        """A layer of which nothing is known: what it reads stays, and so do all of its tensors."""
        self._stop(x)
        for tensor in (*module.parameters(), *module.buffers()):
            self.pinned[id(tensor), None] = why

    def _stop_input(self, x, weight):
        """A layer reads what is not known: its weight's input channels stay, those of other calls of it as well."""
        self._stop(x)
        if weight is not None:
            self.pinned[id(weight), 1] = "is called with channels that are not known"

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
        self.reached.add(id(value))
        return Attribute(value, node.target) if torch.is_tensor(value) else None

    def _call_module(self, node):
        module = self.modules[node.target]
        self.reached.update(map(id, module.modules()))
        attention, handler = isinstance(module, nn.MultiheadAttention), self._handler(module)
        why = why_unknown(module) if attention or handler else None
        if why is not None:
            self._stop_at(None, module, why)
            self.unsure.append(f"{node.target} {why}")
            return self._stop_all(node)
        if attention:
            return self._attention(node, module)
        args, kwargs = self._given(node)
        x = args[0] if args else None
        if handler is None or kwargs or len(args) != 1:
            self._stop_at(None, module)
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
            return self._binary(node, args, kwargs)
        if isinstance(x, Attribute) and name in ("expand", "expand_as"):
            return dataclasses.replace(x, expanded=True)
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

    def _binary(self, node, args, kwargs):
        operands = [*args, *(kwargs[name] for name in ("input", "other") if name in kwargs)]
        rest = {name: value for name, value in kwargs.items() if name not in ("input", "other")}
        if len(operands) != 2 or not set(rest) <= {"alpha", "rounding_mode"} or _traced_in(rest):
            return self._stop_all(node)
        channels = [value for value in operands if isinstance(value, Channels)]
        if len(channels) == 2 and self._unite(*channels):
            return _broadcast(*channels)
        others = [value for value in operands if not isinstance(value, (Channels, int, float))]
        if len(channels) != 1 or not all(
            isinstance(o, Attribute) and self._meets(channels[0], o) for o in others
        ):
            return self._stop_all(node)
        return _with_attribute(channels[0], others[0]) if others else channels[0]

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
        tensors = args[0] if args else kwargs.get("tensors")
        axis = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
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
