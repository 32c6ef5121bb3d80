"""Who owns the package `apex` on this machine: the installed distributions that hold its files."""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from pathlib import Path

from apex._loader import layout

OURS = ("apex-cuda", "apex-rocm", "apex-cpu", "apex-npu")
ENGINE = "apex-transformer-engine"


@dataclass(frozen=True)
class Distribution:
    """An installed distribution whose files include the package `apex`.

    missing: files of its record that are not there
    summary: its own one-line description
    has_loader: it holds `apex/_loader`: a source install is called `apex`, as an unrelated one on PyPI is
    stands_for: the distribution that the alias `apex` (metadata alone) requires, such as "apex-cpu"; else ""
    """

    name: str
    version: str
    location: str
    missing: tuple[str, ...] = ()
    summary: str = ""
    has_loader: bool = False
    stands_for: str = ""

    @property
    def ours(self) -> bool:
        return self.name in OURS or self.has_loader


@dataclass(frozen=True)
class Installation:
    """The distributions, and the folder and state of the package that Python imports as `apex`.

    intact: whether `apex/__init__.py` is this project's own
    engines: the distributions that give the name transformer_engine: ENGINE, and those of the public engine
    """

    distributions: tuple[Distribution, ...]
    package: str
    intact: bool = True
    engines: tuple[str, ...] = ()


def normal(name: str) -> str:
    """A distribution's name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def describe() -> Installation:
    """The Installation that this process sees."""
    found: dict[str, Distribution] = {}
    engines = set()
    for distribution in importlib.metadata.distributions():
        name = normal(distribution.metadata["Name"] or "")
        if name == ENGINE or _is_public_engine(name, distribution):
            engines.add(name)
        described = _describe(distribution)
        if described:  # the first on sys.path is the one that counts
            found.setdefault(described.name, described)
    return Installation(tuple(found.values()), str(layout.PACKAGE), _intact(), tuple(sorted(engines)))


def _is_public_engine(name: str, distribution: importlib.metadata.Distribution) -> bool:
    """Of a distribution by its normal name. One that requires ours has the name alone."""
    if name != "transformer-engine" and not name.startswith("transformer-engine-"):
        return False
    return not any(text.startswith(ENGINE) for text in distribution.requires or ())


def _describe(distribution: importlib.metadata.Distribution) -> Distribution | None:
    name = normal(distribution.metadata["Name"] or "")
    files = distribution.files or ()
    own = [file for file in files if file.parts[:1] == ("apex",)]
    if not own and name not in (*OURS, "apex"):
        return None
    missing = tuple(
        str(file) for file in files if file.suffix != ".pyc" and not os.path.exists(str(file.locate()))
    )
    return Distribution(
        name,
        distribution.version,
        str(Path(str(distribution.locate_file(""))).resolve()),
        missing,
        distribution.metadata["Summary"] or "",
        any(file.parts[:2] == ("apex", "_loader") for file in own),
        "" if own else _stands_for(distribution),
    )


def _stands_for(distribution: importlib.metadata.Distribution) -> str:
    required = (normal(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in distribution.requires or ())
    return next((name for name in required if name in OURS), "")


def _intact() -> bool:
    try:
        return b"_SUBPACKAGES" in layout.read_bytes(layout.PACKAGE / "__init__.py")
    except OSError:
        return False
