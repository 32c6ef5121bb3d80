"""The distribution apex-transformer-engine, which gives apex.transformer_engine the name transformer_engine.

It requires no distribution: which of apex-cpu, apex-cuda, apex-rocm and apex-npu is there is the user's choice. Its
version is the release's. Beside it, for programs that look for "transformer-engine" in the installer's records before
they import the module, there is a distribution of that name, which holds no file and requires the other; only who names
it gets it.
"""

from __future__ import annotations

from pathlib import Path

from build_matrix.spec import toml
from build_matrix.wheels import sbom, wheel

FOLDER = Path(__file__).with_name("apex-transformer-engine")
PROJECT = "apex-transformer-engine"
ALIAS = "transformer-engine"
PACKAGE = "transformer_engine"
TAG = "py3-none-any"


def write(folder: Path) -> Path:
    """Writes the wheel into `folder`."""
    version = project()["version"]
    path = folder / f"{PROJECT.replace('-', '_')}-{version}-{TAG}.whl"
    sources = sorted(FOLDER.rglob("*.py"))
    files = {source.relative_to(FOLDER).as_posix(): source.read_bytes() for source in sources}
    folder.mkdir(parents=True, exist_ok=True)
    wheel.write(path, PROJECT, version, TAG, files, described=metadata())
    return path


def write_alias(folder: Path) -> Path:
    """Writes the wheel of metadata alone into `folder`."""
    version = project()["version"]
    path = folder / f"{PACKAGE}-{version}-{TAG}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    wheel.write(path, ALIAS, version, TAG, {}, described=alias_metadata())
    return path


def project() -> dict[str, str]:
    """The project's table of its pyproject.toml."""
    return toml.read(FOLDER / "pyproject.toml")["project"]


def metadata() -> str:
    """Its METADATA."""
    return _described(PROJECT, project()["description"], "", [])


def alias_metadata() -> str:
    """That of the distribution which holds no file."""
    text = f"The name {ALIAS} for {PROJECT}, for programs that look for it in the installer's records"
    return _described(ALIAS, text, " It holds no file.", [f"{PROJECT}=={project()['version']}"])


def _described(name: str, text: str, more: str, required: list[str]) -> str:
    told = project()
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", name),
        ("Version", told["version"]),
        ("Summary", text),
        ("License-Expression", sbom.LICENSE),
        ("License-File", "LICENSE"),
        ("Requires-Python", told["requires-python"]),
        *(("Requires-Dist", other) for other in required),
    ]
    return "".join(f"{field}: {value}\n" for field, value in fields) + f"\n{text}.{more}\n"
