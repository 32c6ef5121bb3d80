"""Runs work units: on threads of this machine, or on a Dask cluster when one is named.

Units are independent of each other; what depends on their outputs is a unit of a later call. Most of a unit's
time is spent in a compiler's own process, so threads are enough.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from build_matrix.errors import BuildError
from build_matrix.store import Result, Store, WorkUnit

JOBS = "APEX_JOBS"


def jobs_of(asked: int | None = None) -> int:
    """How many compilers run at once: what was asked for, else APEX_JOBS, else the number of cores. Raises BuildError
    where the variable holds no such number."""
    said = os.environ.get(JOBS, "").strip()
    if said and not (said.isdecimal() and int(said)):
        raise BuildError(f"{JOBS}={said} is no number of compilers: say 1 or more, or unset it")
    return asked or int(said or 0) or os.cpu_count() or 1


def _end_compilers() -> None:
    """Ends the processes that threads of this one wait for: Ctrl-C in a terminal reaches them, a signal to this
    process alone does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGTERM)


class Engine:
    """`finished` holds every result in the order of completion of calls, for the report."""

    def __init__(self, store: Store, jobs: int | None = None, tell: Callable[[Result], None] | None = None):
        self.store = store
        store.check()
        self.jobs = jobs_of(jobs)
        self.tell = tell or (lambda result: None)
        self.finished: list[Result] = []

    def run(self, units: list[WorkUnit]) -> list[Result]:
        """Results in the order of `units`. The first fault ends it; units that are done stay in the store."""
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(self.store.build, unit) for unit in units]
            try:
                for future in as_completed(futures):
                    self.tell(future.result())
            except BaseException as error:
                for future in futures:
                    future.cancel()
                if not isinstance(error, Exception):  # a signal: a compiler may take minutes more
                    _end_compilers()
                raise
        results = [future.result() for future in futures]
        self.finished += results
        return results

    def one(self, unit: WorkUnit) -> Result:
        """The result of a single unit."""
        return self.run([unit])[0]
