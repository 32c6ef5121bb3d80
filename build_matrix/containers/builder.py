"""buildah, or docker with buildx: makes an image of a Containerfile, and runs a command in one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.containers import engine
from build_matrix.errors import BuildError, ContainerError
from build_matrix.store import files

EPOCH = 315532800  # 1980-01-01, as the dates in wheels
DATE = "SOURCE_DATE_EPOCH"


def date() -> int:
    """The date of an image and its layers, in seconds since 1970: SOURCE_DATE_EPOCH, else that of the checkout's
    commit, else 1980. Raises BuildError where the variable is no number."""
    said = os.environ.get(DATE, "").strip()
    if said and not said.isdecimal():
        raise BuildError(f"{DATE}={said} is no number of seconds since 1970: say one, or unset it")
    if said:
        return int(said)
    command = ["git", "-C", str(REPOSITORY), "log", "-1", "--format=%ct"]
    try:
        return int(subprocess.run(command, text=True, capture_output=True, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return EPOCH  # no checkout of git


@dataclass(frozen=True)
class Recipe:
    """What an image is made of."""

    containerfile: Path
    context: Path
    tag: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    shown: Sequence[Path] = ()  #: files and folders of this machine that the build reads

    def options(self) -> list[str]:
        """Those that both builders take."""
        found = ["--file", str(self.containerfile), "--tag", self.tag, "--network=host"]
        found += [f"--build-arg={name}={value}" for name, value in self.arguments.items()]
        found += [f"--label={name}={value}" for name, value in sorted(self.labels.items())]
        return found + [f"--secret=id={name},src={path}" for name, path in self.secrets.items()]


class Builder(ABC):
    """What makes images and runs them."""

    @abstractmethod
    def build(self, recipe: Recipe) -> None:
        """Makes the image. Raises ContainerError; the builder's own output has said why."""

    @abstractmethod
    def run(self, image: str, command: Sequence[str], given: str = "") -> subprocess.CompletedProcess:
        """Runs a command in a container that is removed afterwards, `given` on its standard input."""

    def save(self, image: str, archive: Path) -> None:
        """Writes the image as an OCI archive, in place of one that is there when it is whole."""
        with files.temporary("image", archive.parent) as folder:  # a name of nobody else's, that is not there
            self._save(image, folder / archive.name)
            (folder / archive.name).replace(archive)

    @abstractmethod
    def _save(self, image: str, archive: Path) -> None:
        """The same, to a file that is not there."""

    @abstractmethod
    def labels(self, image: str) -> dict[str, str]:
        """The labels of an image."""

    def _call(self, what: str, *command: str) -> None:
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise ContainerError(f"{what} failed; {command[0]} has said why")

    def _ask(self, *command: str) -> str:
        answer = subprocess.run(command, text=True, capture_output=True)
        if answer.returncode:
            raise ContainerError(f"`{' '.join(command)}` failed: {answer.stderr.strip()[-500:]}")
        return answer.stdout.strip()


class Buildah(Builder):
    """Needs no daemon and no engine. The same inputs give the same image: layers hold one fixed time, `date`."""

    def build(self, recipe: Recipe) -> None:
        more = ["--format=oci", "--layers=false", f"--timestamp={date()}"]
        more += [engine.volume(path) for path in recipe.shown]
        self._call(recipe.tag, "buildah", "build", *recipe.options(), *more, str(recipe.context))

    def run(self, image: str, command: Sequence[str], given: str = "") -> subprocess.CompletedProcess:
        container = self._ask("buildah", "from", image)
        try:
            whole = ["buildah", "run", "--network=host", container, "--", *command]
            return subprocess.run(whole, input=given, text=True, capture_output=True)
        finally:
            self._ask("buildah", "rm", container)

    def _save(self, image: str, archive: Path) -> None:
        self._call(str(archive), "buildah", "push", image, f"oci-archive:{archive}")

    def labels(self, image: str) -> dict[str, str]:
        text = self._ask("buildah", "inspect", "--type=image", image)
        return json.loads(text)["OCIv1"]["config"].get("Labels") or {}


class Buildx(Builder):
    """docker with BuildKit."""

    def build(self, recipe: Recipe) -> None:
        if recipe.shown:
            names = ", ".join(map(str, recipe.shown))
            raise ContainerError(
                f"pip's configuration names {names} of this machine, which docker buildx does not show in a build",
                "apt-get install buildah, or serve them over http",
            )
        epoch = f"--build-arg={DATE}={date()}"
        self._call(
            recipe.tag, "docker", "buildx", "build", "--load", epoch, *recipe.options(), str(recipe.context)
        )

    def run(self, image: str, command: Sequence[str], given: str = "") -> subprocess.CompletedProcess:
        whole = ["docker", "run", "--rm", "--interactive", "--network=host", image, *command]
        return subprocess.run(whole, input=given, text=True, capture_output=True)

    def _save(self, image: str, archive: Path) -> None:
        self._call(str(archive), "docker", "save", "--output", str(archive), image)

    def labels(self, image: str) -> dict[str, str]:
        return json.loads(self._ask("docker", "image", "inspect", image))[0]["Config"].get("Labels") or {}


def find(name: str | None = None) -> Builder:
    """buildah, else docker; or the one that is named. Raises ContainerError when it is not here."""
    for known, kind in (("buildah", Buildah), ("docker", Buildx)):
        if name in (None, known) and shutil.which(known):
            if known == "docker" and (fault := engine.why_not("docker")):
                raise ContainerError(fault, "apt-get install buildah")
            return kind()
    missing = f"{name} is not installed" if name else "neither buildah nor docker is installed"
    raise ContainerError(missing, "apt-get install buildah")
