"""Runs a plan on Dask: on processes of this machine, or on the cluster of a scheduler that is named.

A worker that dies loses the step it was at and nothing else: Dask gives that step to another, and what had been
made lies in the store.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator

import dask
from distributed import Client, LocalCluster, WorkerPlugin, as_completed

from build_matrix.errors import BuildError, FarmError
from build_matrix.farm import costs, steps
from build_matrix.farm.plan import Plan
from build_matrix.farm.steps import Done
from build_matrix.store import Store, files
from build_matrix.store.engine import jobs_of

PATIENCE = "10s"
SETTINGS = {
    # A step is minutes of a compiler: none is given to a worker before it can begin it.
    "distributed.scheduler.worker-saturation": 1.0,
    # Compilers are processes of their own; the memory of a worker is no reason to end it.
    "distributed.worker.memory.terminate": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.target": False,
}


class Quiet(WorkerPlugin):
    """Faults of steps are told once, at the end; a worker of this machine need not print each with a traceback, nor
    that Ctrl-C reached it, too: its farm ends it."""

    name = "apex-quiet"

    def setup(self, worker) -> None:
        logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)
        if threading.current_thread() is threading.main_thread():  # a process of its own
            # Not SIG_IGN, which the compilers that it starts would inherit.
            signal.signal(signal.SIGINT, lambda number, frame: None)


@contextlib.contextmanager
def local(jobs: int | None = None, processes: bool = True, offers: Collection[str] = ()) -> Iterator[Client]:
    """Workers of this machine, one step each at a time; `jobs` of them, by default one a core. Each `offers`
    the resources that are named."""
    count = jobs_of(jobs)
    options = {"threads_per_worker": 1, "processes": processes, "resources": dict.fromkeys(offers, 1)}
    if processes:  # threads talk in memory
        options["host"] = "127.0.0.1"
    with (
        dask.config.set(SETTINGS),
        # The scheduler's pages: at a free port, and for this machine alone.
        LocalCluster(n_workers=count, dashboard_address="127.0.0.1:0", **options) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(count, timeout="60s")
        client.register_plugin(Quiet())
        yield client


@contextlib.contextmanager
def existing(address: str) -> Iterator[Client]:
    """The cluster of the scheduler at `address` (tcp://...). Raises BuildError when none answers."""
    try:
        client = Client(address, timeout=PATIENCE)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"no Dask scheduler answers at {address}: {error}. `dask scheduler` starts one, and says its address"
        ) from error
    with client:
        yield client


def slots(client: Client) -> int:
    """Steps that can run at once."""
    return sum(worker["nthreads"] for worker in client.scheduler_info(n_workers=-1)["workers"].values())


def offered(client: Client) -> set[str]:
    """The resources that workers offer: sm_90, gfx942, ..."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    return {name for worker in workers for name in worker.get("resources", {})}


def run(
    plan: Plan, client: Client, store: Store, tell: Callable[[Done], None] = lambda done: None
) -> list[Done]:
    """Runs every step whose needs can be met; `tell` hears of each as it is done. Raises FarmError at the end
    when steps failed: what does not need them was made all the same. Raises BuildError at once when a step wants
    a resource that no worker offers: it would wait for ever; and StoreError where nothing can be stored."""
    store.check()
    if missing := {step.resource for step in plan.steps if step.resource} - offered(client):
        name = min(missing)
        raise BuildError(
            f"no worker of the cluster offers {', '.join(sorted(missing))}: on a machine with such a card run "
            f"`dask worker SCHEDULER --resources {name}=1` in a checkout"
        )
    known = costs.Costs(store)
    rank = costs.ranks(plan.steps, {step.id: known.of(step) for step in plan.steps})
    checkout, run_id = steps.checkout_digest(), uuid.uuid4().hex[:8]
    futures: dict[str, object] = {}
    for step in plan.steps:
        futures[step.id] = client.submit(
            steps.run,
            step,
            store.place,
            checkout,
            *(futures[name] for name in step.needs),
            key=f"{step.id} {run_id}",  # a scheduler keeps results by key: those of an earlier run are not ours
            priority=rank[step.id],
            resources={step.resource: 1} if step.resource else None,
            pure=False,
        )
    names = {future: name for name, future in futures.items()}
    done: dict[str, Done] = {}
    failed: dict[str, BaseException] = {}
    try:
        for future in as_completed(list(futures.values())):
            name = names[future]
            if (error := future.exception()) is None:
                done[name] = future.result()
                tell(done[name])
            else:
                failed[name] = error.with_traceback(future.traceback())
    except BaseException:
        client.cancel(list(futures.values()), force=True)
        raise
    if failed:
        raise _fault(plan, failed)
    return [done[step.id] for step in plan.steps]


def measure(plan: Plan, store: Store, workers: Collection[int]) -> None:
    """Runs a plan from nothing on each of those numbers of this machine's workers, and writes down in `store` what it
    and its units took. What is made goes; nothing of `store` is used."""
    for count in workers:
        with files.temporary("measure") as folder, local(count) as client:
            elsewhere, begun = Store(folder), time.monotonic()
            done = run(plan, client, elsewhere)
            took = time.monotonic() - begun
            for line in elsewhere.journal():
                store.note(line)
        costs.note(store, plan.steps, done, count, took)


def _fault(plan: Plan, failed: dict[str, BaseException]) -> FarmError:
    """Dask gives a step that needs a failed one the other's fault; only the first of each chain is told."""
    first = [step for step in plan.steps if step.id in failed and not any(n in failed for n in step.needs)]
    told = []
    for step in first:
        error = failed[step.id]
        named = isinstance(error, (BuildError, OSError))
        told.append((step.id, _words(error) if named else "".join(traceback.format_exception(error)).strip()))
    code = next((e.exit_code for e in failed.values() if isinstance(e, BuildError)), 1)
    return FarmError(told, len(failed) - len(first), code)


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {error}"
