"""Making the process groups of model parallel training, after all ranks have said that they mean the same."""

from __future__ import annotations

import json
import warnings

import torch.distributed as dist

from apex.parallel import _failures
from apex.parallel._waiting import CALLS, waiting
from apex.parallel.process_groups import timeout_of
from apex.transformer._split import Split
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


class Call:
    """One call of initialize_model_parallel, of all ranks.

    They speak through the store of init_process_group: no group and no device is chosen yet.
    """

    def __init__(self):
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._store, self._number = None, 0
        if dist.get_backend() != "fake":  # whose ranks are not there
            self._store = dist.PrefixStore(INITIALIZE, dist.distributed_c10d._get_default_store())
            self._number = self._store.add(f"calls/{self._rank}", 1)

    def agree(self, mine):
        """Raises on every rank unless all ranks say the same."""
        try:
            said = self._say("arguments", json.dumps(mine, default=repr))
        except RuntimeError:  # this call takes place later, or never
            self._store.delete_key(self._key("arguments", self._rank))
            self._store.add(f"calls/{self._rank}", -1)
            raise
        ranks = {text: [rank for rank, other in enumerate(said) if other == text] for text in said}
        if len(ranks) > 1:
            told = "; ".join(f"ranks {who}: {text}" for text, who in ranks.items())
            raise RuntimeError(f"{INITIALIZE}: the ranks differ; all must pass the same. {told}")

    def finish(self):
        """Waits for all ranks to have made their groups: one that ended them before would break the others'."""
        self._say("groups", "made")
        _failures.restart(self._number)

    def _say(self, what, text):
        if self._store is None:
            return [text]
        self._store.set(self._key(what, self._rank), text)
        with waiting(f"the {what} of this call", CALLS, INITIALIZE):
            keys = [self._key(what, rank) for rank in range(self._world)]
            return [found.decode() for found in self._store.multi_get(keys)]

    def _key(self, what, rank):
        return f"{self._number}/{what}/{rank}"


def initialize(sizes, fp8, mpi, default_backend, p2p_backend, initialized):
    """(Split, groups, ranks of State) of all ranks' calls of initialize_model_parallel, which says what is raised."""
    call = Call()
    call.agree(
        {
            **sizes,
            "fp8": fp8,
            "mpi": mpi,
            "backends": [default_backend, p2p_backend],
            "initialized": initialized,
        }
    )
    if initialized:
        raise RuntimeError(
            f"{INITIALIZE}: already initialized; call destroy_model_parallel first, on every rank"
        )
    try:
        split = Split(dist.get_world_size(), **sizes)
    except RuntimeError as error:
        raise RuntimeError(f"{INITIALIZE}: {error}") from None
    for backend in (default_backend, p2p_backend, "mpi" if mpi else None):
        _check_backend(backend)
    groups, ranks = {}, {}
    try:
        with waiting("its process groups", CALLS, INITIALIZE):
            _make_groups(split, fp8, default_backend, p2p_backend, groups, ranks)
            if mpi:
                dist.new_group(backend="mpi")
        call.finish()
    except BaseException:
        end_groups(groups)
        raise
    return split, groups, ranks


def _check_backend(backend):
    if backend == "ucc":
        check_torch_ucc_availability()
        warnings.warn("the backend ucc is experimental", ExperimentalWarning, stacklevel=4)
    elif backend is not None and not (isinstance(backend, str) and dist.is_backend_available(backend)):
        raise RuntimeError(f"{INITIALIZE}: this torch has no backend {backend!r}")


def _make_groups(split, fp8, default_backend, p2p_backend, groups, found):
    """Puts the groups of a Split that this rank is in into `groups`, and their ranks into `found`."""
    rank, timeout = (
        dist.get_rank(),
        timeout_of(),
    )  # torch gives a new group half an hour, whatever the world's is
    for kind in _KINDS:
        if kind == "amax" and not fp8:
            continue
        pipelines = split.pipeline_groups() if "embedding" in kind else None
        for i, ranks in enumerate(getattr(split, f"{kind}_groups")()):
            backend = p2p_backend if kind == "pipeline" else default_backend
            options = dict(backend=backend, timeout=timeout, group_desc=f"apex {kind}")
            group = dist.new_group(ranks, **options) if ranks else None
            if rank in ranks:
                groups[kind] = group
            if rank in (pipelines[i] if pipelines else ranks):
                found[kind] = ranks


def end_groups(groups):
    """Ends the groups of State that torch still has."""
    if dist.is_available() and dist.is_initialized():
        for group in groups.values():
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
