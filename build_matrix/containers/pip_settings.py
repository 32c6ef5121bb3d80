"""pip's configuration on this machine, as a container needs it: variables, and the local files that they name."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from build_matrix.errors import BuildError

# Where packages come from, and how they are reached; not where they are put.
KEPT = (
    "index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert", "client-cert", "proxy",
    "constraint", "timeout", "default-timeout", "retries",
)  # fmt: skip
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


@dataclass(frozen=True)
class PipSettings:
    """`variables` of the environment, and `paths` that they name on this machine."""

    variables: Mapping[str, str]
    paths: tuple[Path, ...]


def read() -> PipSettings:
    """As pip itself sees them: configuration files, then the environment. Raises BuildError where pip cannot say."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, text=True, capture_output=True)
    if listed.returncode:
        why = (listed.stderr.strip().splitlines() or ["it does not say why"])[-1]
        raise BuildError(f"`{' '.join(command)}` failed, and a container needs what it says: {why}")
    return of(listed.stdout.splitlines(), os.environ)


def of(lines: Iterable[str], environment: Mapping[str, str]) -> PipSettings:
    """Of the lines of `pip config list` (global.index-url='https://…') and an environment."""
    files, variables = {}, {}
    for line in lines:
        name, found, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if found and key in KEPT and section in ("global", "install", ":env:"):
            (variables if section == ":env:" else files)[key] = ast.literal_eval(value)
    chosen = {f"PIP_{key.upper().replace('-', '_')}": value for key, value in (files | variables).items()}
    paths = [path for name, value in chosen.items() for path in _local(value, index="INDEX" in name)]
    chosen |= {name: environment[name] for name in PROXIES if environment.get(name)}
    return PipSettings(chosen, tuple(dict.fromkeys(paths)))


def _local(value: str, index: bool) -> list[Path]:
    """The files and folders of this machine in a value: absolute paths and file: addresses that exist."""
    found = []
    for word in value.split():
        if word.startswith("file:"):
            word = urllib.request.url2pathname(urllib.parse.urlsplit(word).path)
        path = Path(word)
        if path.is_absolute() and path.exists():
            # Pages of an index name files, which may lie beside its root: simple/ and files/.
            found.append(path.parent if index and path.parent != path.parent.parent else path)
    return found
