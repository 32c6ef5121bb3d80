"""The `toolchain` command: what is here, what is missing and how to get it, and moving pins."""

from __future__ import annotations

from collections.abc import Sequence

import click

from build_matrix.errors import BuildError, PackageIndexError, PinError, ToolchainMissing
from build_matrix.spec import matrix, pins
from build_matrix.store import Store
from build_matrix.toolchains import Toolchain, available, by_arch, find, headers, host_compiler, provision
from build_matrix.toolchains.package_index import newest_of


def names() -> list[str]:
    """Every toolchain of packs that the matrix names."""
    return list(dict.fromkeys(name for rule in matrix.load().packs for name in rule.toolchains))


def show() -> None:
    """One line a toolchain."""
    for name, found in available(names()).items():
        if isinstance(found, Toolchain):
            click.echo(f"{name:<16} {found.version:<24} sha256 {found.digest[:16]}")
        else:
            click.echo(f"{name:<16} {found}")
    for platform in matrix.load().platforms:
        if platform.toolchain:
            _show_cross(platform)


def _show_cross(platform: matrix.Platform) -> None:
    try:
        said = host_compiler.find(platform.name).describe()
    except ToolchainMissing as error:
        click.echo(f"{platform.toolchain:<16} {error}")
    else:
        click.echo(f"{platform.toolchain:<16} {said['version']:<24} sha256 {said['sha256'][:16]}")


def bring(name: str) -> None:
    """Provisions a toolchain. Raises BuildError when related_commits does not know it."""
    click.echo(f"{name}: {provision.words(name)}")
    provision.provision(name)
    find.cache_clear()
    host_compiler.find.cache_clear()


def lacking(archs: Sequence[str]) -> list[tuple[str, str, str]]:
    """(arch, why, the command) of those whose compiler is not here and cannot be brought by whoever runs this."""
    wanted = {arch: by_arch.missing(arch) for arch in archs}
    reasons = {name: provision.why_not(name) for name in set(wanted.values()) if name}
    return [
        (arch, str(ToolchainMissing(name, reasons[name])), reasons[name])
        for arch, name in wanted.items()
        if name and reasons[name]
    ]


def bring_missing(archs: Sequence[str]) -> None:
    """Brings the compilers that packs of `archs` lack, saying first which and how large. Raises ToolchainMissing, with
    the command, where one cannot be brought by whoever runs this, before any comes."""
    for arch, _, remedy in lacking(archs):
        raise ToolchainMissing(by_arch.missing(arch), remedy)
    for name in dict.fromkeys(name for arch in archs if (name := by_arch.missing(arch))):
        click.echo(
            f"{name} is not here, and comes now ({provision.size(name)}); --no-toolchain refuses it", err=True
        )
        bring(name)


def update() -> None:
    """Moves the pins of torch to what the index serves, and of toolchains to what is here; prints what
    moved."""
    for version in pins.torch_versions():
        for platform in matrix.load().platforms:
            if not platform.windows:  # for which nothing is compiled against torch
                _move_torch(version, platform.name)
    for name in names():
        try:
            found = find(name, pinned=False)
        except BuildError:
            continue
        pin = pins.toolchain(name)
        if pin and pin.sha != found.version:
            pins.move("toolchain", name, found.version)
            click.echo(f"{name}: {pin.sha} -> {found.version}")
    newest = newest_torch()
    if newest not in pins.torch_versions():
        click.echo(
            f"torch {newest} is on the index and has no pin: add it to related_commits and matrix.toml"
        )


def _move_torch(version: str, platform: str) -> None:
    """Moves the pins of torch's commit and of its headers, each where the index serves another."""
    for _ in ("commit", "headers"):
        try:
            headers.published(version, Store(), platform)
            return
        except PinError as error:
            if error.component.startswith(pins.HEADERS):
                pins.move(pins.HEADERS, f"torch-{version}-{platform}", error.have)
            else:
                pins.move("pytorch", f"torch-{version}", error.have)
            click.echo(f"{error.component}: {error.pinned} -> {error.have}")


def newest_torch() -> str:
    """The newest release of torch that the index of pip's configuration serves for Linux. Raises PackageIndexError."""
    versions = [m["version"] for f in newest_of("torch") if (m := headers.WHEEL.fullmatch(f.filename))]
    releases = [version for version in versions if version.replace(".", "").isdigit()]
    if not releases:
        raise PackageIndexError("no index of pip's configuration holds a release of torch for Linux")
    return max(releases, key=matrix.numbers)
