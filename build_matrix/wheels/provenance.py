"""How a wheel was made, as an in-toto statement with SLSA's provenance (v1) in it.

It lies beside the wheel and holds no time: the same build gives the same statement.
"""

from __future__ import annotations

import json
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import GateError
from build_matrix.spec import matrix, pins
from build_matrix.store import digest, files, foreign
from build_matrix.toolchains import inputs

SUFFIX = ".intoto.json"
STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILD_TYPE, BUILDER = "urn:apex:build-matrix:wheel:v1", "urn:apex:build-matrix"
INPUTS = ("apex", "csrc", "related_commits", "version.txt", "build_matrix/matrix.toml")


def statement(wheel: Path, facts: dict, python: str, platform: str = matrix.NATIVE) -> dict:
    """Of the file `wheel`, with `facts` as its build.json holds them."""
    asked = {
        "accelerator": facts["accelerator"],
        "archs": facts["archs"],
        "torch": [torch["release"] for torch in facts["torch"]],
        "python": python,
        "platform": platform,
    }
    return {
        "_type": STATEMENT,
        "subject": [{"name": wheel.name, "digest": {"sha256": digest.of_file(wheel)}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": asked,
                "internalParameters": {"source_sha256": facts["source_sha256"]},
                "resolvedDependencies": [*_headers(facts), *_compilers(facts), *_sources()],
            },
            "runDetails": {"builder": {"id": BUILDER, "version": {"apex": facts["version"]}}},
        },
    }


def _headers(facts: dict) -> list[dict]:
    """By the digest of those that were read (inputs.py)."""
    found = [
        {
            "name": f"torch-{torch['release']} headers",
            "uri": f"git+https://github.com/pytorch/pytorch@{torch['git_version']}",
            "digest": {"gitCommit": torch["git_version"], "sha256": torch["headers_sha256"]},
        }
        for torch in facts["torch"]
    ]
    found += [
        {"name": f"CPython-{python['version']} headers", "digest": {"sha256": python["sha256"]}}
        for python in facts["headers"].get("python", {}).values()
    ]
    found += [
        {"name": f"{compiler} headers", "digest": {"sha256": read}}
        for compiler, read in facts["headers"].get(inputs.TOOLKIT, {}).items()
    ]
    if system := facts["headers"].get(inputs.SYSTEM):
        found.append({"name": inputs.SYSTEM_NAME, "digest": {"sha256": system}})
    return found


def _compilers(facts: dict) -> list[dict]:
    """By the digest of their programs; the packages that bring them stand in related_commits."""
    found = []
    for compiler in [facts["host_compiler"], *facts["toolchains"]]:
        if compiler:
            name = f"{compiler['name']} {compiler['version']}"
            packages = [
                f"pkg:pypi/{pin.component}@{pin.sha}"
                for pin in pins.load()
                if pin.project == "package" and _of(pin.branch, compiler)
            ]
            entry = {"name": name, "digest": {"sha256": compiler["sha256"]}}
            found.append(entry | ({"annotations": {"packages": packages}} if packages else {}))
    return found


def _of(toolchain: str, compiler: dict) -> bool:
    pin = pins.toolchain(toolchain)
    return toolchain.startswith(f"{compiler['name']}-") and pin is not None and pin.sha == compiler["version"]


def _sources() -> list[dict]:
    """Every file that is compiled or decides how."""
    found = [
        path
        for name in INPUTS
        for path in sorted([REPOSITORY / name, *(REPOSITORY / name).rglob("*")])
        if path.is_file() and "testing" not in path.parts and path.suffix not in files.OUTPUTS
    ]
    return [
        {"uri": f"file:{path.relative_to(REPOSITORY)}", "digest": {"sha256": digest.of_file(path)}}
        for path in found
    ]


def write(wheel: Path, facts: dict, python: str, platform: str = matrix.NATIVE) -> Path:
    """Writes the statement beside the wheel. Returns its path."""
    path = wheel.with_name(wheel.name + SUFFIX)
    path.write_text(json.dumps(statement(wheel, facts, python, platform), indent=1) + "\n")
    return path


def check(wheel: Path) -> bool:
    """Whether a statement lies beside the wheel. Raises GateError where it is of another file, or none."""
    path = wheel.with_name(wheel.name + SUFFIX)
    if not path.is_file():
        return False
    try:
        said = foreign.read(path)["subject"][0]["digest"]["sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        raise GateError(wheel.name, [f"{path.name} is cut, or no statement of provenance"]) from None
    if said != (have := digest.of_file(wheel)):
        raise GateError(wheel.name, [f"its sha256 is {have}; {path.name} states {said}"])
    return True
