"""The line that lays an installation anew: what every message about damage ends with."""

from __future__ import annotations

from apex._loader import distributions, layout, release

PIP = "python -m pip"


def reinstall(name: str | None = None, version: str | None = None) -> str:
    """The line that lays a distribution anew over a damaged one: its own index, its own version.
    Default: the one that runs. One that was built from source has no index."""
    facts = layout.build_facts()
    name = name or facts.get("distribution") or "apex-cpu"
    version = version or (layout.version() if facts.get("distribution") == name else None)
    if name not in distributions.OURS:
        return f"from its source tree: {PIP} install --force-reinstall --no-deps --no-build-isolation ."
    pin = f"=={version}" if version else ""
    known = release.known()
    root = f" --index-url {known.root(known.accelerator(name.removeprefix('apex-')))}" if known else ""
    return f"{PIP} install --force-reinstall --no-deps {name}{pin}{root}"
