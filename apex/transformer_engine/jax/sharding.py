"""Names of mesh axes over which arrays are split, for JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator

import jax

__all__ = ["MajorShardingType", "MeshResource", "ShardingResource", "ShardingType", "global_shard_guard"]


class MajorShardingType(enum.Enum):
    """How work is split: not at all, over the data, over tensors, or both."""

    SINGLE = 0
    DP = 1
    TP = 2
    DPTP = 3


class ShardingType(enum.Enum):
    """How a layer is split; COL splits its outputs, ROW its inputs."""

    SINGLE = (MajorShardingType.SINGLE, "single")
    DP = (MajorShardingType.DP, "dp")
    TP_COL = (MajorShardingType.TP, "tp_col")
    TP_ROW = (MajorShardingType.TP, "tp_row")
    DP_TP_COL = (MajorShardingType.DPTP, "dp_tp_col")
    DP_TP_ROW = (MajorShardingType.DPTP, "dp_tp_row")


@dataclasses.dataclass(frozen=True)
class MeshResource:
    """The mesh axis of each kind of split, or None: data, tensor, sharded data, pipeline and context parallelism."""

    dp_resource: str | None = None
    tp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None


ShardingResource = MeshResource  # its name before 1.0
_resource = MeshResource()


def global_mesh_resource() -> MeshResource:
    """The resource in force."""
    return _resource


@contextlib.contextmanager
def global_shard_guard(resource: MeshResource | None) -> Iterator[None]:
    """Puts a resource in force; None leaves the one that is."""
    global _resource
    before = _resource
    try:
        _resource = before if resource is None else resource
        yield
    finally:
        _resource = before


def max_over_ranks(value: jax.Array) -> jax.Array:
    """The largest `value` over those data and tensor axes that the surrounding shard_map splits."""
    axes = (_resource.dp_resource, _resource.tp_resource, _resource.fsdp_resource)
    bound = tuple(dict.fromkeys(axis for axis in axes if axis is not None and _is_bound(axis)))
    return jax.lax.pmax(value, bound) if bound else value


def _is_bound(axis: str) -> bool:
    try:
        jax.lax.axis_index(axis)
    except NameError:
        return False
    return True
