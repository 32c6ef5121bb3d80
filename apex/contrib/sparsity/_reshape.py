"""Ops that change the shape and keep channels apart: each gives what it makes of channels, or None where that is not
known."""

from __future__ import annotations

import dataclasses

from apex.contrib.sparsity._values import Channels, Shape, Size


def reshaped(name: str, x: Channels, rest: tuple, kwargs: dict) -> Channels | None:
    """The channels of x after a function or method `name` with the arguments after x."""
    if name == "flatten" and not set(kwargs) - {"start_dim", "end_dim"}:
        start, end = (*rest, *(0, -1)[len(rest) :])[:2]
        return flattened(x, kwargs.get("start_dim", start), kwargs.get("end_dim", end))
    if name in ("interpolate", "upsample"):
        return spatial(x)
    if name == "mean":
        dims = kwargs.get("dim", rest[0] if rest else None)
        return _mean(x, dims, kwargs.get("keepdim", rest[1] if len(rest) > 1 else False))
    if kwargs:
        return None
    if name in ("view", "reshape"):
        return _view(x, rest)
    if name in ("permute", "transpose", "swapaxes"):
        return _permuted(name, x, rest)
    return None


def spatial(x):
    return x if x.second else None


def pooled(x, dimensions):
    return x if x.second and x.dim == -dimensions - 1 else None


def flattened(x, start, end):
    if x.second and start == 1 and end in (-1, x.rank - 1):
        return dataclasses.replace(x, dim=-1, rank=2, flat=x.rank > 2)
    return None


def _mean(x, dims, keepdim):
    dims = [dims] if isinstance(dims, int) else dims
    if not x.second or not isinstance(dims, (list, tuple)) or not all(isinstance(d, int) for d in dims):
        return None
    over = {d % x.rank for d in dims}
    if over & {0, 1}:
        return None
    return x if keepdim else dataclasses.replace(x, rank=x.rank - len(over), dim=x.dim + len(over))


def _view(x, sizes):
    if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)):
        sizes = sizes[0]
    if not x.second or not sizes:
        return None
    if isinstance(sizes[0], Shape):
        y = sizes[0].of
        same = len(sizes) == 1 and y.second and y.size == x.size and y.batch is x.batch
        return dataclasses.replace(x, dim=y.dim, rank=y.rank) if same else None
    first = sizes[0]
    if not (isinstance(first, Size) and first.index == 0 and first.of.batch is x.batch) or len(sizes) < 2:
        return None
    if len(sizes) == 2 and sizes[1] == -1:
        return flattened(x, 1, -1)
    second = sizes[1]
    if isinstance(second, Size) and second.index == 1 and second.of.second:
        second = second.of.size
    return dataclasses.replace(x, dim=1 - len(sizes), rank=len(sizes)) if second == x.size else None


def _permuted(name, x, dims):
    dims = dims[0] if len(dims) == 1 else dims
    if x.rank is None or x.flat or not all(isinstance(d, int) for d in dims):
        return None
    order = [d % x.rank for d in dims]
    if name != "permute":
        one, two = order
        order = list(range(x.rank))
        order[one], order[two] = two, one
    dim = order.index(x.rank + x.dim) - x.rank
    return dataclasses.replace(x, dim=dim, batch=x.batch if order[0] == 0 else object())
