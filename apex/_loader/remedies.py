"""The line that lays an installation anew: what every message about damage ends with."""

from __future__ import annotations

import shlex

from apex._loader import distributions, layout, release

PIP = "python -m pip"
TORCH = "https://download.pytorch.org/whl"
ANEW = "--force-reinstall --no-deps "


def install(distribution: str, version: str, root: str, how: str = "") -> str:
    """The line that installs a wheel of a release from an index root; with `how` ANEW over a damaged one."""
    return f"{PIP} install {how}{distribution}=={version} --index-url {quoted(root)}"


def quoted(root: str) -> str:
    """An address as a shell takes it: it is copied from what is printed. The words that stand for one stay."""
    stands = release.SOMEWHERE if root.startswith(release.SOMEWHERE) else ""
    return stands + shlex.quote(root[len(stands) :])


def of_source() -> str:
    """The line that lays a build from source anew."""
    return f"from its source tree: {PIP} install {ANEW}--no-build-isolation ."


def torch(label: str, how: str = "") -> str:
    """The line that installs a build of torch from PyTorch's own index: for cpu, cu130, rocm7.2."""
    return f"{PIP} install {how}torch --index-url {TORCH}/{label}"


def reinstall(name: str | None = None, version: str | None = None) -> str:
    """The line that lays a distribution anew over a damaged one: its own index, its own version.
    Default: the one that runs. One that was built from source has no index."""
    facts = layout.build_facts()
    name = name or facts.get("distribution") or "apex-cpu"
    version = version or (layout.version() if facts.get("distribution") == name else None)
    if name not in distributions.OURS:
        return of_source()
    known = release.known()
    root = known.root(known.accelerator(name.removeprefix("apex-"))) if known else ""
    if version and root:
        return install(name, version, root, ANEW)
    pin, index = f"=={version}" if version else "", f" --index-url {quoted(root)}" if root else ""
    return f"{PIP} install {ANEW}{name}{pin}{index}"
