"""The build backend of pyproject.toml: setuptools', and the farm's own wheels where they are asked for.

    pip install .                                               setup.py, as setuptools builds it
    pip wheel . -C farm=rocm -C arch=gfx942 -C torch=2.13.0     the wheel of `python -m build_matrix wheel`

cibuildwheel takes the second form. Several archs or torches are joined by commas; what is not named is all of the
matrix. torch's headers come from the package index, whichever torch is installed.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  hooks that a front end looks up here
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
)

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.spec import toml

OPTIONS = ("--build-option", "--global-option")
Settings = Mapping[str, "str | list[str]"]


@dataclass(frozen=True)
class Asked:
    """A wheel of the farm, as config settings name it."""

    accelerator: str
    archs: tuple[str, ...] = ()
    torches: tuple[str, ...] = ()


def asked(settings: Settings | None) -> Asked | None:
    """What the config settings ask of the farm; None where they do not. Raises BuildError for half a request."""
    words = {name: _words((settings or {}).get(name, "")) for name in ("farm", "arch", "torch")}
    if not words["farm"]:
        if words["arch"] or words["torch"]:
            raise BuildError("-C arch and -C torch belong to a wheel of the farm: say -C farm=rocm too")
        return None
    if len(words["farm"]) > 1 or words["farm"][0] not in ("cpu", "cuda", "rocm", "npu"):
        raise BuildError(f"-C farm={','.join(words['farm'])}: say one of cpu, cuda, rocm, npu")
    return Asked(words["farm"][0], words["arch"], words["torch"])


def _words(value: str | list[str]) -> tuple[str, ...]:
    text = value if isinstance(value, str) else ",".join(value)
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """What the farm needs is in the environment of a build only when it builds the wheel."""
    if _asked(config_settings) is None:
        return build_meta.get_requires_for_build_wheel(config_settings)
    return toml.read(REPOSITORY / "pyproject.toml")["dependency-groups"]["farm"]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings | None = None) -> str:
    """PEP 517's hook: METADATA of the wheel that `build_wheel` would make, without making it."""
    wanted = _asked(config_settings)
    if wanted is None:
        return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    from build_matrix.spec import identity, matrix
    from build_matrix.wheels import wheel

    accelerator = matrix.load().accelerator(wanted.accelerator)
    version = f"{identity.version()}+{accelerator.label}"
    folder = Path(metadata_directory) / f"{accelerator.distribution.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(wheel.metadata(accelerator.distribution, version), encoding="utf-8")
    return folder.name


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 517's hook. Ends the process in words where the farm names a fault."""
    wanted = _asked(config_settings)
    if wanted is None:
        return build_meta.build_wheel(wheel_directory, _options_apart(config_settings), metadata_directory)
    try:
        from build_matrix.farm import report
        from build_matrix.spec import matrix
        from build_matrix.store import Store
        from build_matrix.store.engine import Engine
        from build_matrix.toolchains import pythons
        from build_matrix.wheels import build
    except ModuleNotFoundError as error:
        from build_matrix.commands import alone

        sys.exit(alone.needs("pip wheel . -C farm", error))
    try:
        engine = Engine(Store(), tell=report.tell)
        if matrix.load().accelerator(wanted.accelerator).pure:
            return build.pure_wheel(wanted.accelerator, engine, Path(wheel_directory)).name
        python = pythons.find(pythons.own_tag())
        request = build.request(wanted.accelerator, wanted.archs, wanted.torches, python)
        request = dataclasses.replace(request, published=True)
        path = build.one_wheel(request, python, engine, Path(wheel_directory))
    except BuildError as error:
        sys.exit(f"apex: {error}")
    return path.name


def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 660's hook: setuptools' own."""
    return build_meta.build_editable(wheel_directory, _options_apart(config_settings), metadata_directory)


def _options_apart(settings: Settings | None) -> Settings | None:
    """`--build-option=--cpp_ext --cuda_ext` as two options, whichever front end and setuptools pass it on."""
    given = {}
    for name, value in (settings or {}).items():
        texts = [value] if isinstance(value, str) else value
        given[name] = [w for text in texts for w in shlex.split(text)] if name in OPTIONS else value
    return given if settings else settings


def _asked(settings: Settings | None) -> Asked | None:
    try:
        return asked(settings)
    except BuildError as error:
        sys.exit(f"apex: {error}")
