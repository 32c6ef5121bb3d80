"""The ring of tests that runs on a change: build_matrix/check/rings.py writes the plan, `pytest --ring PLAN` follows
it.

PLAN, JSON: {"whole": [files of tests that run whole], "slice": [k, n], "cpu_level": 4, "together": [files],
"durations": {file: CPU seconds}}. What belongs to no later ring (LATER) runs: of files that are whole all of it, of the
others the k-th of n slices; a file of `together` is in one slice, one after the other, as its fixtures cost more than
its tests. Slices do not overlap, and n of them are everything of the ring.

`--cpu-seconds FILE` writes what every file took, with the processes that it waited for: {file: [CPU seconds of fixtures
that tests share, of tests of the ring, of the others]}.
"""

from __future__ import annotations

import collections
import json
import os
import zlib

import pytest

NO_GPU = "no GPU: torch.cuda.is_available() is False"
# What runs later than on a change.
LATER = ("warp64", "sanitized", "emulated", "full_cross", "kills", "minutes", "container")
SECONDS = "cpu_seconds"
FIXTURES, RING_TESTS, LATER_TESTS = range(3)
_spent = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
_now = [0.0, 0.0, 0.0]  # that of the file whose test runs


def skip_without_gpus(item) -> None:
    """Skips what is marked gpu or two_gpus where there are none. tests/L0/host counts them itself, in a process of its
    own: this one must not open the driver."""
    if not item.get_closest_marker("gpu") or "devices" in item.fixturenames:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def later(item, level: int) -> str:
    """The marker for which a test runs later than on a change; "" for one of the ring. `level`: the highest x86-64
    level of this machine."""
    found = [name for name in LATER if item.get_closest_marker(name)]
    mark = item.get_closest_marker("cpu_level")
    if mark and mark.kwargs["level"] < level:
        found.append("cpu_level")
    return found[0] if found else ""


def file_of(item) -> str:
    """tests/L0/test_rope.py"""
    return item.nodeid.partition("::")[0]


def choose(items, plan: dict) -> tuple[list, dict[str, list]]:
    """(what runs, the longest files first; {why not: tests})."""
    whole, (part, parts) = set(plan["whole"]), plan["slice"]
    place = {file: n % parts for n, file in enumerate(plan["together"])}
    chosen, left = [], collections.defaultdict(list)
    for item in items:
        file = file_of(item)
        mine = place[file] if file in place else zlib.crc32(item.nodeid.encode()) % parts
        if name := later(item, plan["cpu_level"]):
            left[f"not in the ring of a change: {name}"].append(item)
        elif file in whole or mine == part:
            chosen.append(item)
        else:
            left[f"in another slice than {part + 1} of {parts}"].append(item)
    known = plan["durations"]
    # Stable: a file's tests keep their order.
    chosen.sort(key=lambda item: (-known.get(file_of(item), 0.0), file_of(item)))
    return chosen, left


def cpu_seconds() -> float:
    """Of this process, and of the children that it waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    global _now
    _now, before = _spent[file_of(item)], cpu_seconds()
    of_fixtures = _now[FIXTURES]
    result = yield
    kind = LATER_TESTS if later(item, item.config.getoption("--cpu-level")) else RING_TESTS
    _now[kind] += cpu_seconds() - before - (_now[FIXTURES] - of_fixtures)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    before = cpu_seconds()
    result = yield
    if fixturedef.scope in ("module", "package", "session"):
        _now[FIXTURES] += cpu_seconds() - before
    return result


def add(more: dict[str, list[float]]) -> None:
    """What another process of this run spent."""
    for file, seconds in more.items():
        _spent[file] = [a + b for a, b in zip(_spent[file], seconds, strict=True)]


def write(path: str) -> None:
    """The file of --cpu-seconds."""
    rounded = {file: [round(s, 1) for s in seconds] for file, seconds in sorted(_spent.items())}
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rounded.items()) + "\n}\n"
        )
