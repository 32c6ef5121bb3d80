"""The software bill of materials of a wheel: CycloneDX JSON, in its dist-info (PEP 770).

Names what was compiled in (torch's headers), what it was compiled with, and every library and code object by digest.
It holds no time and no random number: the same contents give the same bytes.
"""

from __future__ import annotations

import json
import uuid
from datetime import datetime, timezone

from build_matrix.store import digest
from build_matrix.toolchains import inputs

NAME = "sboms/apex.cdx.json"
LICENSE = "BSD-3-Clause"
BINARY = (".so", ".cubin", ".ptx", ".co", ".xz")
EPOCH = datetime(1980, 1, 1, tzinfo=timezone.utc)  # as the dates in the archive


def render(facts: dict, files: dict[str, bytes]) -> bytes:
    """`facts` as build.json holds them, `files` the wheel's contents by name."""
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from cyclonedx.model.license import DisjunctiveLicense
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    def sha256(value: str) -> list:
        return [HashType(alg=HashAlgorithm.SHA_256, content=value)]

    def headers_of(name, version, description, digest, purl=None, more=()) -> Component:
        """What is compiled into the wheel's binaries, by the digest of the headers that were read (inputs.py)."""
        return Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=version,
            bom_ref=f"{name}@{version}" if version else name,
            purl=purl,
            description=description,
            properties=[*more, Property(name="apex:headers-sha256", value=digest)],
        )

    version = f"{facts['version']}+{facts['local']}" if facts["local"] else facts["version"]
    apex = Component(
        type=ComponentType.LIBRARY,
        name=facts["distribution"],
        version=version,
        bom_ref=f"{facts['distribution']}@{version}",
        purl=PackageURL("pypi", None, facts["distribution"], version),
        licenses=[DisjunctiveLicense(id=LICENSE)],
        properties=[Property(name="apex:source-sha256", value=facts["source_sha256"])],
    )
    torches = [
        headers_of(
            "torch",
            torch["release"],
            "C++ headers, compiled into the bindings",
            torch["headers_sha256"],
            purl=PackageURL("pypi", None, "torch", torch["release"]),
            more=[Property(name="git-commit", value=torch["git_version"])],
        )
        for torch in facts["torch"]
    ]
    headers = [
        headers_of("CPython", python["version"], "C headers, compiled into the bindings", python["sha256"])
        for python in facts["headers"].get("python", {}).values()
    ]
    for compiler, of_headers in facts["headers"].get(inputs.TOOLKIT, {}).items():
        name, _, version = compiler.partition(" ")
        about = "Headers of the device compiler, compiled into the packs"
        headers.append(headers_of(f"{name} headers", version, about, of_headers))
    if system := facts["headers"].get(inputs.SYSTEM):
        about = "Compiled and linked into every library"
        headers.append(headers_of(inputs.SYSTEM_NAME, None, about, system))
    compilers = [
        Component(
            type=ComponentType.APPLICATION,
            name=compiler["name"],
            version=compiler["version"],
            bom_ref=f"{compiler['name']}@{compiler['version']}",
            scope=ComponentScope.EXCLUDED,  # it made the code and is not in it
            hashes=sha256(compiler["sha256"]),
        )
        for compiler in [facts["host_compiler"], *facts["toolchains"]]
        if compiler
    ]
    binaries = [
        Component(type=ComponentType.FILE, name=name, bom_ref=name, hashes=sha256(digest.of_bytes(data)))
        for name, data in sorted(files.items())
        if name.endswith(BINARY)
    ]
    identity = digest.of_values([facts, {name: digest.of_bytes(data) for name, data in files.items()}])
    bom = Bom(
        components=[*torches, *headers, *compilers, *binaries],
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, identity),
    )
    bom.metadata.timestamp = EPOCH
    bom.metadata.component = apex
    bom.register_dependency(apex, [*torches, *headers])
    return (
        json.dumps(json.loads(JsonV1Dot6(bom).output_as_string()), indent=1, sort_keys=True) + "\n"
    ).encode()
