"""Making the process groups of model parallel training, after all ranks have said that they mean the same."""

from __future__ import annotations

import json
import warnings

import torch.distributed as dist

from apex.parallel._waiting import CALLS, waiting
from apex.transformer._ucc_util import HAS_UCC

# Kinds of groups, in the order in which every rank makes them.
_KINDS = (
    *("data", "amax", "model", "tensor", "pipeline", "embedding", "position_embedding"),
    *("encoder_relative_position_embedding", "decoder_relative_position_embedding"),
)
INITIALIZE = "initialize_model_parallel"


class ExperimentalWarning(Warning):
    """Of backends that are hardly tried."""


class State:
    """What the module knows.

    groups: kind -> the process group that this rank is in. ranks: kind -> the global ranks of its group, or, of
    embeddings, of its pipeline's group, whether it is in it or not.
    """

    def __init__(self) -> None:
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.ranks: dict[str, list[int]] = {}
        self.virtual_size: int | None = None
        self.virtual_rank: int | None = None
        self.split_rank: int | None = None
        # What the setters say in place of the groups.
        self.sizes: dict[str, int | None] = {}
        self.places: dict[str, int | None] = {}


def check_torch_ucc_availability() -> None:
    """Raises ImportError where this torch does not speak UCC."""
    if not HAS_UCC:
        raise ImportError("the backend ucc needs a torch that was built with USE_UCC=1, or torch_ucc")


def agree(mine):
    """Raises on every rank unless all ranks say the same.

    They speak through the store of init_process_group: no group and no device is chosen yet.
    """
    if dist.get_backend() == "fake":
        return
    store = dist.PrefixStore(INITIALIZE, dist.distributed_c10d._get_default_store())
    rank, world = dist.get_rank(), dist.get_world_size()
    call = store.add(f"calls/{rank}", 1)
    store.set(f"{call}/{rank}", json.dumps(mine, default=repr))
    try:
        with waiting("the arguments of this call", CALLS, INITIALIZE):
            found = [text.decode() for text in store.multi_get([f"{call}/{other}" for other in range(world)])]
    except RuntimeError:  # this call takes place later, or never
        store.delete_key(f"{call}/{rank}")
        store.add(f"calls/{rank}", -1)
        raise
    said = {}
    for other, text in enumerate(found):
        said.setdefault(text, []).append(other)
    if len(said) > 1:
        told = "; ".join(f"ranks {ranks}: {text}" for text, ranks in said.items())
        raise RuntimeError(f"{INITIALIZE}: the ranks differ; all must pass the same. {told}")


def check_backend(backend):
    if backend == "ucc":
        check_torch_ucc_availability()
        warnings.warn("the backend ucc is experimental", ExperimentalWarning, stacklevel=3)
    elif not (isinstance(backend, str) and dist.is_backend_available(backend)):
        raise RuntimeError(f"{INITIALIZE}: this torch has no backend {backend!r}")


def make_groups(split, fp8, default_backend, p2p_backend):
    """(groups, ranks) of State, of a Split."""
    rank, groups, found = dist.get_rank(), {}, {}
    for kind in _KINDS:
        if kind == "amax" and not fp8:
            continue
        pipelines = split.pipeline_groups() if "embedding" in kind else None
        for i, ranks in enumerate(getattr(split, f"{kind}_groups")()):
            backend = p2p_backend if kind == "pipeline" else default_backend
            group = dist.new_group(ranks, backend=backend, group_desc=f"apex {kind}") if ranks else None
            if rank in ranks:
                groups[kind] = group
            if rank in (pipelines[i] if pipelines else ranks):
                found[kind] = ranks
    return groups, found
