"""Where a CPU build of torch comes from when none is installed: pip's own configuration, else PyTorch's
public index.

Nothing is downloaded before it has been said which file it is and how large.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass

from build_matrix.errors import PackageIndexError
from build_matrix.spec import matrix
from build_matrix.toolchains import package_index
from build_matrix.toolchains.pythons import own_tag

PUBLIC = "https://download.pytorch.org/whl/cpu"
WHEEL = re.compile(
    r"torch-(?P<version>\d[\d.]*)(?P<local>\+\w+)?-(?P<python>cp\d+)-(?P=python)-\S*x86_64\.whl"
)


@dataclass(frozen=True)
class Supply:
    """A wheel of torch that could be installed, its bytes, and its digest, empty where the index states none."""

    filename: str
    url: str
    size: int
    sha256: str = ""

    @property
    def cpu(self) -> bool:
        """Whether it is a build for the CPU alone."""
        return "+cpu" in self.filename


def find() -> Supply:
    """The newest CPU build for this Python; where there is none, the newest build. Raises
    PackageIndexError."""
    known = _newest(package_index.configured_files("torch"), cpu=True)
    known = known or _newest(package_index.files_at(f"{PUBLIC}/torch/"), cpu=True)
    known = known or _newest(package_index.configured_files("torch"), cpu=False)
    if known is None:
        raise PackageIndexError(f"no index holds a torch for {own_tag()}; install torch, then run this again")
    return Supply(known.filename, known.url, package_index.size(known.url), known.sha256)


def _newest(files: list[package_index.IndexFile], cpu: bool) -> package_index.IndexFile | None:
    newest = max(matrix.numbers(version) for version in matrix.load().torch)
    fitting = []
    for file in files:
        match = WHEEL.fullmatch(file.filename)
        # pip would not mind that it is yanked: it is installed by its address.
        if match and not file.yanked and match["python"] == own_tag() and (match["local"] == "+cpu") == cpu:
            number = matrix.numbers(match["version"])
            if number[:2] <= newest[:2]:
                fitting.append((number, file))
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def install(supply: Supply) -> None:
    """Installs it, and what it requires by pip's own configuration, into the environment that runs this. pip compares
    it with the digest that the index states. Raises PackageIndexError where pip fails."""
    address = f"{supply.url}#sha256={supply.sha256}" if supply.sha256 else supply.url
    command = [sys.executable, "-m", "pip", "install", "--quiet", address]
    if code := subprocess.run(command).returncode:
        raise PackageIndexError(
            f"torch did not come: {' '.join(command)} ended with {code}; it says why above"
        )
