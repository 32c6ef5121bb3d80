"""The distribution apex-transformer-engine, which gives apex.transformer_engine the name transformer_engine.

It requires no distribution: which of apex-cpu, apex-cuda and apex-rocm is there is the user's choice. Its version is
the release's.
"""

from __future__ import annotations

from pathlib import Path

from build_matrix.spec import toml
from build_matrix.wheels import sbom, wheel

FOLDER = Path(__file__).with_name("apex-transformer-engine")
PROJECT = "apex-transformer-engine"
PACKAGE = "transformer_engine"
TAG = "py3-none-any"


def write(folder: Path) -> Path:
    """Writes the wheel into `folder`."""
    version = project()["version"]
    path = folder / f"{PROJECT.replace('-', '_')}-{version}-{TAG}.whl"
    files = {f"{PACKAGE}/{source.name}": source.read_bytes() for source in (FOLDER / PACKAGE).glob("*.py")}
    folder.mkdir(parents=True, exist_ok=True)
    wheel.write(path, PROJECT, version, TAG, files, described=metadata())
    return path


def project() -> dict[str, str]:
    """The project's table of its pyproject.toml."""
    return toml.read(FOLDER / "pyproject.toml")["project"]


def metadata() -> str:
    """Its METADATA."""
    told = project()
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", PROJECT),
        ("Version", told["version"]),
        ("Summary", told["description"]),
        ("License-Expression", sbom.LICENSE),
        ("License-File", "LICENSE"),
        ("Requires-Python", told["requires-python"]),
    ]
    return "".join(f"{name}: {value}\n" for name, value in fields) + f"\n{told['description']}.\n"
