"""Wrong states of who owns the package `apex`: the first part of what the doctor looks at (problems.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from apex._loader import offers, remedies
from apex._loader.distributions import ENGINE, Distribution
from apex._loader.facts import BROKEN, DEGRADED, NOTE, Facts, Problem


def ours(facts: Facts) -> list[Distribution]:
    """This project's distributions that are installed."""
    installed = facts.installation.distributions if facts.installation else ()
    return [distribution for distribution in installed if distribution.ours]


def reinstall(facts: Facts) -> str:
    """The line that lays the installed distribution anew, or the one that would suit."""
    installed = ours(facts)
    if installed:
        return remedies.reinstall(installed[0].name, installed[0].version)
    return offers.install(facts.offer, force=True) if facts.offer else remedies.reinstall()


def foreign_package(facts: Facts) -> Iterator[Problem]:
    """The unrelated `apex` of PyPI, or a build of the public apex, which own the same package."""
    installation = facts.installation
    for distribution in installation.distributions if installation else ():
        if distribution.ours or distribution.stands_for:
            continue
        what = "another distribution owns the package apex"
        if distribution.version.startswith("0.9"):
            what = "the unrelated PyPI package `apex` (a Pyramid web toolkit) owns the same package"
        harm = BROKEN if installation and not installation.intact else DEGRADED
        yield Problem(
            harm,
            "foreign apex",
            f"{what}: {distribution.name} {distribution.version} in {distribution.location}",
            f"{remedies.PIP} uninstall -y {distribution.name} && {reinstall(facts)}",
        )


def alias_of_another(facts: Facts) -> Iterator[Problem]:
    """The alias `apex`, whose version programs read, stands for a distribution or version that is not here."""
    distributions = facts.installation.distributions if facts.installation else ()
    here = {d.name: d.version for d in distributions if d.ours}
    for alias in distributions:
        if alias.stands_for and here.get(alias.stands_for) != alias.version:
            has = ", ".join(f"{name} {version}" for name, version in here.items()) or "none of apex"
            yield Problem(
                NOTE,
                "alias of another apex",
                f"the distribution apex {alias.version} stands for {alias.stands_for}; installed: {has}",
                f"{remedies.PIP} uninstall -y apex",
            )


def half_deleted(facts: Facts) -> Iterator[Problem]:
    """Files of our distribution are gone, as after uninstalling a distribution that shares the package."""
    installation = facts.installation
    if installation is None:
        return
    gone = [
        distribution
        for distribution in installation.distributions
        if distribution.ours and distribution.missing
    ]
    for distribution in gone:
        yield Problem(
            BROKEN,
            "half-deleted apex",
            f"{len(distribution.missing)} files of {distribution.name} {distribution.version} are gone, "
            f"{distribution.missing[0]} among them",
            remedies.reinstall(distribution.name, distribution.version),
        )
    if not installation.intact and not gone:
        yield Problem(
            BROKEN,
            "half-deleted apex",
            f"{Path(installation.package) / '__init__.py'} is not this project's",
            reinstall(facts),
        )


def two_distributions(facts: Facts) -> Iterator[Problem]:
    """apex-cuda, apex-rocm, apex-cpu and apex-npu are one package; two of them overwrite each other's files, and
    uninstalling one takes the other's away."""
    names = sorted(distribution.name for distribution in ours(facts))
    if len(names) > 1:
        keep = offers.install(facts.offer, names) if facts.offer else remedies.reinstall(names[0])
        text = f"{' and '.join(names)} are installed; they hold the same files, and who uninstalls one breaks the other"
        yield Problem(DEGRADED, "two apex distributions", text, keep)


def shadowed(facts: Facts) -> Iterator[Problem]:
    """An installed wheel, and a package that is imported from elsewhere."""
    installation = facts.installation
    if installation is None:
        return
    here = Path(installation.package).resolve().parent
    for distribution in installation.distributions:
        if distribution.ours and here != Path(distribution.location):
            yield Problem(
                NOTE,
                "shadowed wheel",
                f"{distribution.name} is installed in {distribution.location}, apex is imported from {here}",
            )


def two_engines(facts: Facts) -> Iterator[Problem]:
    """The public Transformer Engine and apex-transformer-engine, which both are the package transformer_engine."""
    engines = facts.installation.engines if facts.installation else ()
    if ENGINE in engines and len(engines) > 1:
        others = ", ".join(name for name in engines if name != ENGINE)
        yield Problem(
            DEGRADED,
            "two transformer engines",
            f"{ENGINE} and {others} both give the name transformer_engine, and importing it fails; "
            "apex.transformer_engine is there all the same",
            f"{remedies.PIP} uninstall -y {ENGINE}",
        )


CHECKS = (foreign_package, alias_of_another, half_deleted, two_distributions, two_engines, shadowed)
