"""Reasons for which tests may not run where CI runs, and how many for each: ci/accepted_skips.toml. Another reason, or
more of one, is a suite that got thinner without anybody saying so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.check import junit
from build_matrix.spec import toml

ACCEPTED = REPOSITORY / "ci/accepted_skips.toml"


def load(path: Path = ACCEPTED) -> dict[str, int]:
    """Reason, in which * stands for anything -> how many tests, of everything, may not run for it."""
    return {entry["reason"]: entry["tests"] for entry in toml.read(path)["skip"]}


def faults(cases: Iterable[junit.Case], path: Path = ACCEPTED) -> list[str]:
    """What is not accepted; tests that a ring or -m left out are counted elsewhere."""
    known, count, found = load(path), Counter(), []
    for case in cases:
        if case.outcome != junit.SKIPPED or case.left_out:
            continue
        pattern = next((p for p in known if fnmatchcase(case.reason.strip(), p)), None)
        if pattern is None:
            found.append(case.reason)
        else:
            count[pattern] += 1
    said = [
        f"{n} tests did not run for a reason that {path.name} does not accept: {reason}"
        for reason, n in Counter(found).most_common()
    ]
    return said + [
        f"{n} tests did not run, where {path.name} accepts {known[pattern]}: {pattern}"
        for pattern, n in count.items()
        if n > known[pattern]
    ]
