"""The programs that run containers and make images, and what they need on this machine."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

from build_matrix.errors import ContainerError

CAP_SYS_RESOURCE = 24
# Fewer than podman asks for, and enough for a compiler a core.
MODEST = {"nofile": (resource.RLIMIT_NOFILE, 1024), "nproc": (resource.RLIMIT_NPROC, 10000)}


def find(name: str | None = None) -> str:
    """podman or docker: `name`, else the one that CIBW_CONTAINER_ENGINE names, else the first that answers.

    Raises ContainerError when it does not.
    """
    named = name or os.environ.get("CIBW_CONTAINER_ENGINE", "").partition(";")[0].strip()
    faults = []
    for engine in [named] if named else ["podman", "docker"]:
        fault = why_not(engine)
        if fault is None:
            return engine
        faults.append(fault)
    raise ContainerError("; ".join(faults), "apt-get install podman runc, or start docker's daemon")


def why_not(engine: str) -> str | None:
    """Why an engine cannot run a container here, or None."""
    if engine not in ("podman", "docker"):
        return f"{engine} is no engine; there are podman and docker"
    if not shutil.which(engine):
        return f"{engine} is not installed"
    answer = subprocess.run([engine, "info"], text=True, capture_output=True)
    return f"{engine} does not answer: {answer.stderr.strip()[-300:]}" if answer.returncode else None


def limits() -> list[str]:
    """Options for a root that may not raise its limits, as in a container or a small virtual machine: podman asks
    for more files and processes than it has, and its runtime then refuses to start."""
    if os.geteuid() or _capable(CAP_SYS_RESOURCE):
        return []
    found = []
    for name, (number, modest) in MODEST.items():
        hard = resource.getrlimit(number)[1]
        value = modest if hard == resource.RLIM_INFINITY else min(hard, modest)
        found.append(f"--ulimit={name}={value}:{value}")
    return found


def _capable(capability: int) -> bool:
    status = Path("/proc/self/status").read_text()
    (effective,) = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(int(effective, 16) >> capability & 1)


def has_image(engine: str, image: str) -> bool:
    """Whether the engine has an image of that name here."""
    return subprocess.run([engine, "image", "inspect", image], capture_output=True).returncode == 0


def volume(path: Path, inside: str | None = None, read_only: bool = True) -> str:
    """The option that shows a file or folder of this machine in a container, at the same place unless told.

    Raises ContainerError for a path that the option cannot spell.
    """
    for place in filter(None, [str(path), inside]):
        if ":" in place or "," in place:
            raise ContainerError(f"{place} cannot be shown in a container: its name holds a : or a comma")
    return f"--volume={path}:{inside or path}" + (":ro" if read_only else "")
