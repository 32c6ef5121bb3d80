"""torch's C++ headers of one release: of the installed torch when it is that very version, else out of its
wheel on the package index by range requests (about 11 MB of 500)."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from build_matrix.errors import PackageIndexError, PinError
from build_matrix.spec import matrix, pins
from build_matrix.store import Store, WorkUnit, archive, digest
from build_matrix.toolchains import package_index
from build_matrix.toolchains.range_zip import RangeZip

WHEEL = re.compile(
    r"torch-(?P<version>[^-]+)-(?P<python>cp\d+)-(?P<abi>cp\d+)-(?P<platform>manylinux\w*)\.whl"
)

VERSION = "torch/version.py"
LIMITS = archive.Limits(50_000, 32 << 20, 1 << 30)  # of headers: a release has eleven thousand, of 80 MB


@dataclass(frozen=True)
class TorchHeaders:
    """`version` as torch says it (2.13.0+cpu), `identity` a digest of all header files."""

    version: str
    git_version: str
    cuda: str | None
    include: Path
    identity: str
    installed: bool
    platform: str = matrix.NATIVE

    @property
    def minor(self) -> str:
        """2.13: the folder and the name of a binding."""
        return matrix.minor(self.version)

    @property
    def release(self) -> str:
        """2.13.0, without the local label of the build."""
        return self.version.partition("+")[0]

    def flags(self) -> list[str]:
        """What shows them to a compiler, as headers of the system, whose warnings do not count."""
        return ["-isystem", str(self.include), "-isystem", str(self.include / "torch/csrc/api/include")]


def installed_version() -> str | None:
    """The version of the torch that this interpreter would import, or None; torch is not imported."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def obtain(version: str, store: Store) -> TorchHeaders:
    """The headers of torch `version` (2.13.0, or 2.13.0+cpu as installed).

    Raises PinError when their git_version is not the pinned one, PackageIndexError when no wheel is to be
    had.
    """
    have = installed_version()
    if not (have and version in (have, have.partition("+")[0])):
        return published(version, store)
    headers = _installed()
    check_pin(headers.release, headers.git_version)
    return headers


def published(version: str, store: Store, platform: str = matrix.NATIVE) -> TorchHeaders:
    """The headers of the wheel on the package index, whichever torch is installed: the same on every machine. A few
    differ between platforms.

    Parts of a wheel cannot be compared with the index's digest of the whole: what they are is compared with the pins,
    of torch's commit and of all headers together, before one is written. Raises as `obtain` does.
    """
    release = version.partition("+")[0]
    asked = (release, platform, store.root, pins.torch(release), pins.headers(release, platform))
    if asked not in _PUBLISHED:
        _PUBLISHED[asked] = _published(release, store, platform)
    return _PUBLISHED[asked]


# Remembered by release, platform, store and pin: there are ten thousand files to compare with their digest.
_PUBLISHED: dict[tuple, TorchHeaders] = {}


def _published(release: str, store: Store, platform: str) -> TorchHeaders:
    result = store.build(unit(release, platform))
    about = json.loads((result.folder / "headers.json").read_text())
    about.pop("downloaded")
    _check_pins(release, platform, about["git_version"], about["identity"])
    return TorchHeaders(**about, include=result.folder / "torch/include", installed=False, platform=platform)


def check_pin(release: str, git_version: str) -> None:
    """Raises PinError where torch was built from another commit than the pinned one."""
    pin = pins.torch(release)
    if pin and pin.sha != git_version:
        raise PinError(f"torch {release}", pin.sha, git_version)


def _check_pins(release: str, platform: str, git_version: str, identity: str) -> None:
    check_pin(release, git_version)
    pin = pins.headers(release, platform)
    if pin and pin.sha != identity:
        raise PinError(f"{pins.HEADERS} of torch {release} for {platform}", pin.sha, identity)


def _installed() -> TorchHeaders:
    distribution = importlib.metadata.distribution("torch")
    package = Path(str(distribution.locate_file("torch")))
    record = distribution.read_text("RECORD") or ""
    # RECORD holds a digest of every header; only their lines count, so that identity does not depend on the
    # rest.
    lines = sorted(line for line in record.splitlines() if line.startswith("torch/include/"))
    said = say((package / "version.py").read_text())
    identity = digest.of_values(lines) if lines else digest.of_values(said)
    return TorchHeaders(**said, include=package / "include", identity=identity, installed=True)


def say(text: str) -> dict[str, str | None]:
    """version, git_version and cuda out of torch/version.py, without running it."""

    def value(name: str) -> str | None:
        match = re.search(rf"^{name}\s*(?::[^=]+)?=\s*(?:'([^']*)'|\"([^\"]*)\"|None)", text, re.MULTILINE)
        return (match[1] or match[2]) if match else None

    return {"version": value("__version__"), "git_version": value("git_version"), "cuda": value("cuda")}


def listed(
    platform: str = matrix.NATIVE, among: Iterable[package_index.IndexFile] | None = None
) -> Iterator[tuple[str, str, package_index.IndexFile]]:
    """(version, tag of the Python, file) of every wheel of torch for a platform on the index, or `among` some files."""
    for file in package_index.files("torch") if among is None else among:
        match = WHEEL.fullmatch(file.filename)
        if match and matrix.platform_of(match["platform"]) == platform and match["python"] == match["abi"]:
            yield match["version"], match["python"], file


def wheels_of(version: str, platform: str = matrix.NATIVE) -> dict[str, package_index.IndexFile]:
    """The wheels of a release for a platform, by the tag of their Python. Raises PackageIndexError where there is
    none."""
    found: dict[str, package_index.IndexFile] = {}
    for release, tag, file in listed(platform):
        if release == version:
            found.setdefault(tag, file)
    if not found:
        raise PackageIndexError(
            f"no index of pip's configuration holds a wheel of torch {version} for {platform}. PIP_INDEX_URL, or "
            "pip's configuration, names another index"
        )
    return found


def wheel_of(version: str, platform: str = matrix.NATIVE) -> package_index.IndexFile:
    """The wheel of a release for a platform whose Python is the oldest: headers are the same for every Python. Raises
    PackageIndexError where there is none."""
    found = wheels_of(version, platform)
    return found[min(found, key=lambda tag: int(tag[2:]))]


def unit(version: str, platform: str = matrix.NATIVE) -> WorkUnit:
    """The headers of one release, out of its wheel for a platform."""
    pin = pins.torch(version)
    # With a pin the wheel need not be looked up to know whether the store has the headers.
    inputs = (
        {"version": version, "git_version": pin.sha} if pin else {"wheel": wheel_of(version, platform).sha256}
    )
    if platform != matrix.NATIVE:
        inputs["platform"] = platform

    def make(folder: Path) -> None:
        remote = RangeZip(wheel_of(version, platform).url)
        found = dict(remote.read(_wanted, LIMITS))
        said = say(found.get(VERSION, b"").decode(errors="replace"))
        identity = digest.of_values({n: digest.of_bytes(found[n]) for n in found if n != VERSION})
        _check_pins(version, platform, said["git_version"] or "", identity)
        for name, contents in found.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
        about = {**said, "identity": identity, "downloaded": remote.downloaded}
        (folder / "headers.json").write_text(json.dumps(about))

    suffix = matrix.load().platform(platform).suffix
    return WorkUnit("headers", f"torch-{version}{suffix}", inputs, make)


def _wanted(name: str) -> bool:
    return name == VERSION or (name.startswith("torch/include/") and not name.endswith("/"))
