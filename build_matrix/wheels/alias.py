"""The distribution `apex`: metadata alone, for programs that ask importlib.metadata for the version of "apex".

It owns no file of the package, nor of the unrelated project that has this name on PyPI, and requires the distribution
whose name it stands for. Only the index has it, and only who names it installs it:

    pip install apex --index-url <index>/whl/cpu/
"""

from __future__ import annotations

from pathlib import Path

from build_matrix.wheels import sbom, wheel

PROJECT = "apex"
TAG = "py3-none-any"


def write(folder: Path, distribution: str, version: str) -> Path:
    """Writes the wheel that answers for `distribution` (apex-cpu) of `version` (1.10.0+cpu) into `folder`."""
    path = folder / f"{PROJECT}-{version}-{TAG}.whl"
    wheel.write(path, PROJECT, version, TAG, {}, described=metadata(distribution, version))
    return path


def metadata(distribution: str, version: str) -> str:
    """Its METADATA."""
    text = f"The name apex for {distribution}, for programs that look for it in the installer's records"
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", PROJECT),
        ("Version", version),
        ("Summary", text),
        ("License-Expression", sbom.LICENSE),
        ("License-File", "LICENSE"),
        ("Requires-Python", ">=3.10"),
        ("Requires-Dist", f"{distribution}=={version}"),
    ]
    return "".join(f"{name}: {value}\n" for name, value in fields) + f"\n{text}. It holds no file.\n"
