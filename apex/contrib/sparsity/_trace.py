"""The graphs of a model, one for each of its modes, traced so that nothing of the tracing stays in the model."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import sys

import torch
from torch import fx, nn

_CONTAINERS = (dict, list, set, collections.deque)


class Tracer(fx.Tracer):
    """Takes apex's layers as leaves, as those of torch.nn. read: the tensors that forward() read as they are."""

    def __init__(self, follow_buffers=False):
        super().__init__()
        self.proxy_buffer_attributes, self.read = follow_buffers, []

    def getattr(self, attr, attr_val, parameter_proxy_cache):
        found = super().getattr(attr, attr_val, parameter_proxy_cache)
        if torch.is_tensor(found):
            self.read.append(found)
        return found

    def is_leaf_module(self, m, module_qualified_name):
        ours = m.__module__.startswith("apex.") and not isinstance(m, (nn.Sequential, nn.ModuleList))
        return ours or super().is_leaf_module(m, module_qualified_name)


@dataclasses.dataclass
class Traced:
    """held: {node: the attribute in which forward() keeps its value}. unseen: buffers that forward() reads in Python,
    so that the graph does not show what it does with them."""

    graph: fx.Graph
    held: dict[fx.Node, str]
    unseen: list[torch.Tensor]


def _items(holder):
    return list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))


def _may_change(name, value):
    """Whether forward() may write to it: parameters are traced, tensors of inference mode cannot be changed."""
    plain = torch.is_tensor(value) and not isinstance(value, nn.Parameter) and not value.is_inference()
    return plain and "_mma_" not in str(name)


class _Kept:
    """Attributes of all modules, the lists and dicts in them, and values of buffers; `restore` puts them back."""

    def __init__(self, model):
        self.training = {module: module.training for module in model.modules()}
        self.holders: dict[int, tuple] = {}
        self.tensors: dict[int, tuple] = {}
        for module in self.training:
            self._keep(vars(module))

    def _keep(self, holder):
        if id(holder) in self.holders:
            return
        items = _items(holder)
        self.holders[id(holder)] = holder, items
        for name, value in items:
            if isinstance(value, _CONTAINERS):
                self._keep(value)
            elif _may_change(name, value):
                self.tensors[id(value)] = value, value._version, value.detach().clone()

    def restore(self):
        for holder, items in self.holders.values():
            now = _items(holder)
            if len(now) == len(items) and all(a[1] is b[1] for a, b in zip(now, items, strict=True)):
                continue
            holder.clear()
            if isinstance(holder, dict):
                holder.update(items)
            else:
                add = holder.add if isinstance(holder, set) else holder.append
                for _, value in items:
                    add(value)
        for module, training in self.training.items():
            module.training = training
        with torch.no_grad():
            for tensor, version, value in self.tensors.values():
                if tensor._version != version:
                    tensor.copy_(value)


@contextlib.contextmanager
def _random_states_kept():
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy and numpy.random.get_state()
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(arrays)


def _proxies(holder, name, seen):
    """(node, attribute) of the traced values in a container and those in it."""
    if id(holder) in seen:
        return
    seen.add(id(holder))
    for key, value in _items(holder):
        if isinstance(value, fx.Proxy):
            yield value.node, f"{name}.{key}"
        elif isinstance(value, (*_CONTAINERS, tuple)):
            yield from _proxies(value, f"{name}.{key}", seen)


def _traced(model, kept, mode, follow_buffers):
    try:
        for module, training in mode.items():
            module.training = training
        tracer = Tracer(follow_buffers)
        graph = tracer.trace(model)
        seen: set[int] = set()
        held = {
            node: attribute
            for name, module in model.named_modules()
            for node, attribute in _proxies(vars(module), name or "model", seen)
        }
        return Traced(graph, held, tracer.read)
    finally:
        kept.restore()


def traces(model: nn.Module) -> list[Traced]:
    """One of the model as it is, and of training and of evaluation where these differ. Raises what torch.fx raises for
    a model that it cannot trace; nothing stays changed."""
    if "forward" in vars(model):
        raise TypeError("forward() was replaced in the object, which torch.fx does not look at")
    kept = _Kept(model)
    modes = [kept.training]
    modes += [mode for flag in (True, False) if (mode := dict.fromkeys(kept.training, flag)) != modes[0]]
    found = []
    for mode in modes:
        with _random_states_kept():
            try:
                found.append(_traced(model, kept, mode, True))
            except Exception:  # forward() assigns to a buffer, or branches on one
                found.append(_traced(model, kept, mode, False))
    return found
