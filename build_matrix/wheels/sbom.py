"""The software bill of materials of a wheel: CycloneDX JSON, in its dist-info (PEP 770).

Names what was compiled in (torch's headers), what it was compiled with, and every library and code object by digest.
It holds no time and no random number: the same contents give the same bytes.
"""

from __future__ import annotations

import json
import uuid
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from build_matrix.store import digest
from build_matrix.toolchains import inputs

if TYPE_CHECKING:
    from cyclonedx.model.component import Component

NAME = "sboms/apex.cdx.json"
LICENSE = "BSD-3-Clause"
BINARY = (".so", ".dll", ".cubin", ".ptx", ".co", ".xz")
EPOCH = datetime(1980, 1, 1, tzinfo=timezone.utc)  # as the dates in the archive


def render(facts: dict, files: dict[str, bytes]) -> bytes:
    """`facts` as build.json holds them, `files` the wheel's contents by name."""
    from cyclonedx.model.bom import Bom
    from cyclonedx.output.json import JsonV1Dot6

    apex, torches, headers = _apex(facts), _torches(facts), _other_headers(facts)
    identity = digest.of_values([facts, {name: digest.of_bytes(data) for name, data in files.items()}])
    bom = Bom(
        components=[*torches, *headers, *_compilers(facts), *_binaries(files)],
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, identity),
    )
    bom.metadata.timestamp = EPOCH
    bom.metadata.component = apex
    bom.register_dependency(apex, [*torches, *headers])
    return (
        json.dumps(json.loads(JsonV1Dot6(bom).output_as_string()), indent=1, sort_keys=True) + "\n"
    ).encode()


def _apex(facts: dict) -> Component:
    """The wheel itself."""
    from cyclonedx.model.license import DisjunctiveLicense

    name = facts["distribution"]
    version = f"{facts['version']}+{facts['local']}" if facts["local"] else facts["version"]
    return _component(
        "LIBRARY",
        name,
        version,
        purl=_purl(name, version),
        licenses=[DisjunctiveLicense(id=LICENSE)],
        properties=_properties({"apex:source-sha256": facts["source_sha256"]}),
    )


def _torches(facts: dict) -> list[Component]:
    """Torch's headers, of each torch that there is a binding for."""
    about = "C++ headers, compiled into the bindings"
    found = []
    for torch in facts["torch"]:
        own = {"git-commit": torch["git_version"]}
        more = {"purl": _purl("torch", torch["release"])}
        found.append(_headers("torch", torch["release"], about, torch["headers_sha256"], own, **more))
    return found


def _other_headers(facts: dict) -> list[Component]:
    """Those of Pythons, of device compilers and of the system."""
    found = [
        _headers("CPython", python["version"], "C headers, compiled into the bindings", python["sha256"])
        for python in facts["headers"].get("python", {}).values()
    ]
    for compiler, of_headers in facts["headers"].get(inputs.TOOLKIT, {}).items():
        name, _, version = compiler.partition(" ")
        about = "Headers of the device compiler, compiled into the packs"
        found.append(_headers(f"{name} headers", version, about, of_headers))
    if system := facts["headers"].get(inputs.SYSTEM):
        about = "Compiled and linked into every library"
        found.append(_headers(inputs.SYSTEM_NAME, None, about, system))
    return found


def _headers(name: str, version: str | None, about: str, sha256: str, own=None, **more) -> Component:
    """What is compiled into the wheel's binaries, by the digest of the headers that were read (inputs.py)."""
    properties = _properties({**(own or {}), "apex:headers-sha256": sha256})
    return _component("LIBRARY", name, version, description=about, properties=properties, **more)


def _compilers(facts: dict) -> list[Component]:
    """What made the code and is not in it."""
    from cyclonedx.model.component import ComponentScope

    return [
        _component(
            "APPLICATION",
            compiler["name"],
            compiler["version"],
            scope=ComponentScope.EXCLUDED,
            hashes=_sha256(compiler["sha256"]),
        )
        for compiler in [facts["host_compiler"], *facts["toolchains"]]
        if compiler
    ]


def _binaries(files: dict[str, bytes]) -> list[Component]:
    return [
        _component("FILE", name, None, hashes=_sha256(digest.of_bytes(data)))
        for name, data in sorted(files.items())
        if name.endswith(BINARY)
    ]


# ---- the library's own forms ---------------------------------------------------------------------------------


def _component(kind: str, name: str, version: str | None, **more) -> Component:
    from cyclonedx.model.component import Component, ComponentType

    reference = f"{name}@{version}" if version else name
    return Component(type=ComponentType[kind], name=name, version=version, bom_ref=reference, **more)


def _sha256(value: str) -> list:
    from cyclonedx.model import HashAlgorithm, HashType

    return [HashType(alg=HashAlgorithm.SHA_256, content=value)]


def _properties(values: dict[str, str]) -> list:
    from cyclonedx.model import Property

    return [Property(name=name, value=value) for name, value in values.items()]


def _purl(name: str, version: str):
    from packageurl import PackageURL

    return PackageURL("pypi", None, name, version)
