"""Wheels through cibuildwheel: the farm's own wheel, built in a container by podman or docker.

pyproject.toml holds what cibuildwheel is told; here stand the cell, the image, and what the container sees of this
machine: the provisioned toolchains, the store of work units, and pip's configuration.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.containers import engine, pip_settings
from build_matrix.errors import BuildError, ContainerError, ToolchainMissing
from build_matrix.spec import matrix
from build_matrix.store import files
from build_matrix.store.store import default_root
from build_matrix.toolchains.base import provisioned_root
from build_matrix.wheels import provenance, wheel
from build_matrix.wheels.wheel_file import WheelFile

PROJECT, STORE = "/project", "/store"  # in the container; cibuildwheel fixes the first
SOURCES = (
    "apex", "build_matrix", "csrc", "ci/containers", "setup.py", "pyproject.toml", "LICENSE", "README.md",
    "related_commits", "version.txt",
)  # fmt: skip
NOT_SOURCES = shutil.ignore_patterns("__pycache__", *(f"*{suffix}" for suffix in files.OUTPUTS))
LOCAL_IMAGE = "localhost/apex-manylinux"


def build(
    accelerator: str,
    archs: Sequence[str],
    torches: Sequence[str],
    tags: Sequence[str],
    dist: Path,
    *,
    engine_name: str | None = None,
    image: str | None = None,
    jobs: int | None = None,
) -> list[Path]:
    """Builds one wheel for each Python of `tags` (cp311). Returns their paths in `dist`.

    Raises ContainerError without an engine or image, ToolchainMissing where a pack's compiler is not provisioned.
    """
    if sys.version_info < (3, 11):
        raise ContainerError(
            "cibuildwheel runs on Python 3.11 and later", "python3.11 -m nox -s build-cpu -- --container"
        )
    chosen = archs or matrix.load().archs(accelerator)
    name = engine.find(engine_name)
    settings = pip_settings.read()
    environment = os.environ | settings.variables | variables(accelerator, archs, torches, tags)
    environment["CIBW_CONTAINER_ENGINE"] = container_engine(name, chosen, settings, jobs)
    if image:
        environment["CIBW_MANYLINUX_X86_64_IMAGE"] = image
    default_root().mkdir(parents=True, exist_ok=True)
    with files.temporary("cibuildwheel") as folder:
        sources, output = folder / "sources", folder / "wheels"
        export(sources)
        command = [sys.executable, "-m", "cibuildwheel", "--platform=linux", f"--output-dir={output}"]
        if subprocess.run(command, cwd=sources, env=environment, stdout=sys.stderr).returncode:
            raise ContainerError(*_failed(name, environment.get("CIBW_MANYLINUX_X86_64_IMAGE")))
        return [deliver(path, dist) for path in sorted(output.glob("*.whl"))]


def _failed(name: str, image: str | None) -> tuple[str, str]:
    make = "bash ci/containers/local_image.sh"
    if image and not engine.has_image(name, image):
        return f"{name} has no image {image}", make
    why = "cibuildwheel failed; its output says why"
    if image:
        return why, ""
    return (
        f"{why}. Where no image registry is reached, an image can be made here",
        f"{make}, then say --image {LOCAL_IMAGE}",
    )


def variables(
    accelerator: str, archs: Sequence[str], torches: Sequence[str], tags: Sequence[str]
) -> dict[str, str]:
    """What cibuildwheel is told of one cell, as its variables."""
    settings = {"farm": accelerator, "arch": ",".join(archs), "torch": ",".join(torches)}
    return {
        "CIBW_BUILD": " ".join(f"{tag}-manylinux_x86_64" for tag in tags),
        "CIBW_ARCHS_LINUX": "x86_64",
        "CIBW_CONFIG_SETTINGS": " ".join(f"{key}={value}" for key, value in settings.items() if value),
    }


def container_engine(
    name: str, archs: Sequence[str], settings: pip_settings.PipSettings, jobs: int | None = None
) -> str:
    """cibuildwheel's container-engine: nothing of this machine is in sight but what is named here."""
    count = jobs or os.environ.get("APEX_JOBS")
    arguments = [
        "--network=host",  # the package index may be on this machine
        "--security-opt=label=disable",
        *engine.limits(),
        # By name: cibuildwheel prints what it is told, and an address may hold a password.
        *(f"--env={variable}" for variable in settings.variables),
        *(engine.volume(path) for path in settings.paths),
        f"--env=APEX_STORE={STORE}",
        engine.volume(default_root().resolve(), STORE, read_only=False),
        *([f"--env=APEX_JOBS={count}"] if count else []),
        *toolchains(archs),
    ]
    return f"{name}; create_args: {shlex.join(arguments)}; disable_host_mount: true"


def toolchains(archs: Sequence[str]) -> list[str]:
    """Options that show the provisioned toolchains of `archs` where the checkout in the container looks for them.

    Raises ToolchainMissing when an arch has none.
    """
    places: dict[str, Path] = {}
    for arch in archs:
        names = matrix.load().pack(arch).toolchains
        found = next(((name, place) for name in names if (place := provisioned(name))), None)
        if found is None:
            raise ToolchainMissing(f"a provisioned {names[-1]}", f"nox -s toolchain -- {names[-1]}")
        places[found[0]] = found[1]
    options = []
    for name, place in sorted(places.items()):
        hip = name.startswith("clang-hip")
        inside = f"{PROJECT}/.toolchains/{'rocm' if hip else name}"
        options.append(engine.volume(place.resolve(), inside))
        if hip:
            options.append(f"--tmpfs={inside}/tmp")  # clang runs in the chroot, and writes there
    return options


def provisioned(name: str) -> Path | None:
    """The folder of a toolchain that can be shown in a container: not one that is installed system-wide."""
    if not name.startswith("clang-hip"):
        place = provisioned_root() / name
        return place if place.is_dir() else None
    roots = [os.environ.get("APEX_ROCM_ROOT"), provisioned_root() / "rocm"]
    chroots = (Path(root) for root in roots if root)
    return next((root for root in chroots if any(root.glob("usr/lib/llvm-*/bin/clang"))), None)


def export(target: Path) -> None:
    """Copies what a wheel is made of: cibuildwheel takes a whole folder, and a checkout also holds outputs."""
    for name in SOURCES:
        source, place = REPOSITORY / name, target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, ignore=NOT_SOURCES)
        elif source.is_file():
            shutil.copyfile(source, place)
        elif name != "LICENSE":
            raise BuildError(f"{source} is missing: this is no whole checkout")


def deliver(path: Path, dist: Path) -> Path:
    """Writes the statement of provenance beside a wheel that came out of a container, and copies both into
    `dist`."""
    tag = path.name.split("-")[2]
    provenance.write(path, WheelFile(path).facts, tag)
    with files.temporary("delivery") as folder:
        for file in path.parent.glob(f"{path.name}*"):
            shutil.copyfile(file, folder / file.name)
        return wheel.publish(folder, dist)
