"""Outcomes of a pytest run, from the JUnit file that it wrote. Standard library alone: GPU machines run it too."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from build_matrix.store import foreign

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
OUTCOMES = (PASSED, FAILED, SKIPPED)
DESELECTED = "deselected"
ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True)
class Case:
    """A test: the module it is in (`tests.L0.test_rope`), its name with parameters, and why it did not run.
    `left_out`: pytest was told to leave it out (-m, -k)."""

    module: str
    name: str
    outcome: str
    reason: str = ""
    left_out: bool = False


def read(path: Path) -> list[Case]:
    """Every test of the file, each once; those that were left out (tests/conftest.py names them) as skipped. Raises
    ValueError where the file is cut, or its own counts are not those of its tests."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ValueError(f"{path.name} is cut, or no JUnit file: {error}") from None
    found: dict[tuple[str, str], Case] = {}
    for element in root.iter("testcase"):
        case = _case(element)
        # One that failed, and whose fixtures then failed as well, is there twice.
        if (case.module, case.name) not in found or case.outcome == FAILED:
            found[case.module, case.name] = case
    stated = Counter()
    for suite in root.iter("testsuite"):
        stated.update({key: int(suite.get(key, 0)) for key in ("tests", "errors", "skipped")})
    # pytest counts a test that passed and whose fixtures then failed as two.
    skipped = sum(case.outcome == SKIPPED for case in found.values())
    if stated["skipped"] != skipped or not 0 <= stated["tests"] - len(found) <= stated["errors"]:
        says = f"{stated['tests']} tests, {stated['skipped']} skipped"
        raise ValueError(f"{path.name} states {says}, and holds {len(found)}, {skipped}")
    left_out = [case for case in _left_out(root) if (case.module, case.name) not in found]
    return [*found.values(), *left_out]


def _left_out(root: ElementTree.Element) -> Iterable[Case]:
    """Tests that a property of the file names: {reason: [node ids]}."""
    for element in root.iter("property"):
        if element.get("name") == DESELECTED:
            found = foreign.value(element.get("value", "{}"))
            if not isinstance(found, dict) or not all(isinstance(names, list) for names in found.values()):
                raise ValueError(f"the property {DESELECTED} is not what it should be")
            for reason, names in found.items():
                yield from (Case(*_address(str(node)), SKIPPED, reason, left_out=True) for node in names)


def _address(node: str) -> tuple[str, str]:
    """Module and name of a node id, as pytest writes them into JUnit files."""
    path, _, rest = node.partition("::")
    called, bracket, parameters = rest.partition("[")
    *classes, name = called.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *classes]), name + bracket + parameters


def whole(runs: Iterable[Iterable[Case]]) -> list[Case]:
    """The cases of several runs: one that a run left out and another ran is of the other."""
    found: dict[tuple[str, str], Case] = {}
    for case in (case for run in runs for case in run):
        there = found.get((case.module, case.name))
        if there is None or there.left_out:
            found[case.module, case.name] = case
    return list(found.values())


def _case(element: ElementTree.Element) -> Case:
    module, name = element.get("classname", ""), element.get("name", "")
    if element.find("failure") is not None or element.find("error") is not None:
        return Case(module, name, FAILED)
    skipped = element.find("skipped")
    if skipped is not None:
        reason = skipped.get("message") or skipped.get("type", "").replace("pytest.xfail", "expected to fail")
        return Case(module, name, SKIPPED, ADDRESS.sub("0x…", reason))
    return Case(module, name, PASSED)


def counts(cases: Iterable[Case]) -> dict[str, dict[str, int]]:
    """module -> how many passed, failed and were skipped."""
    found: dict[str, Counter] = {}
    for case in cases:
        found.setdefault(case.module, Counter())[case.outcome] += 1
    return {module: {o: counter[o] for o in OUTCOMES} for module, counter in sorted(found.items())}


def reasons(cases: Iterable[Case]) -> dict[str, int]:
    """Why tests did not run -> how many."""
    return dict(Counter(case.reason for case in cases if case.outcome == SKIPPED).most_common())
