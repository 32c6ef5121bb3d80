"""Loaded by the workers of test_farm_cluster.py: a kind of step that says which worker ran it."""

from distributed import get_worker

from build_matrix.farm import steps
from build_matrix.store import WorkUnit


def where(store, name):
    return WorkUnit("where", name, {}, lambda folder: (folder / "worker").write_text(get_worker().name))


steps.UNITS["where"] = where
