"""What is inside a wheel of apex, read from the file alone, and how two wheels differ."""

from __future__ import annotations

import json
import lzma
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from build_matrix.errors import BuildError
from build_matrix.spec import matrix
from build_matrix.store import archive, digest


@dataclass(frozen=True)
class Member:
    """A file of a wheel: bytes as installed and in the archive, and its digest."""

    size: int
    packed: int
    sha256: str


# What zipfile raises for an archive that is cut, changed, encrypted, or none.
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)
STATED = {
    "version": str, "local": str, "source_sha256": str, "host_compiler": dict | None, "toolchains": list, "torch": list,
    "accelerator": str, "archs": list,
}  # fmt: skip
EXPLAINED = ("version", "local", "source_sha256", "host_compiler", "toolchains", "torch")


class WheelFile:
    """Raises BuildError for a file that is no wheel of apex."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with archive.wheel(path) as opened:
                self._packed = {info.filename: info.compress_size for info in opened.infolist()}
                self._contents = {name: opened.read(name) for name in self._packed}  # compares checksums
        except FileNotFoundError:
            raise BuildError(f"there is no file {path}") from None
        except DAMAGED as error:
            raise BuildError(f"{path.name} is damaged, or no wheel: {error}") from None
        if "apex/build.json" not in self._contents:
            raise BuildError(f"{path.name} is no wheel that this farm built: it has no apex/build.json")

    def json(self, name: str):
        """A JSON file of the wheel, parsed. Raises BuildError for one that is not there, or no JSON."""
        try:
            return json.loads(self._contents[name])
        except (KeyError, ValueError, RecursionError) as error:
            raise BuildError(f"{self.path.name}: {name} is missing, or no JSON: {error}") from None

    def only(self, end: str) -> str:
        """The name of the one file that ends so. Raises BuildError where there is none, or several."""
        found = [name for name in self._contents if name.endswith(end)]
        if len(found) != 1:
            raise BuildError(f"{self.path.name} is no whole wheel: {len(found)} of its files are a {end}")
        return found[0]

    def data(self, name: str) -> bytes:
        """The contents of a file of the wheel."""
        return self._contents[name]

    @cached_property
    def members(self) -> dict[str, Member]:
        """Every file by its name."""
        return {
            name: Member(len(data), self._packed[name], digest.of_bytes(data))
            for name, data in sorted(self._contents.items())
        }

    @cached_property
    def facts(self) -> dict:
        """apex/build.json: version, toolchains, torch, source."""
        found = self.json("apex/build.json")
        return found if isinstance(found, dict) else {}

    def check_facts(self, *names: str) -> None:
        """Raises BuildError where build.json does not say what a command reads: `names`, or all of it."""
        if lacking := [
            n for n in names or EXPLAINED if n not in self.facts or not isinstance(self.facts[n], STATED[n])
        ]:
            raise BuildError(
                f"{self.path.name}: its apex/build.json is of another format: no {', '.join(lacking)}"
            )

    @cached_property
    def packs(self) -> dict[str, dict]:
        """arch -> manifest."""
        names = [
            name
            for name in self._contents
            if name.startswith("apex/packs/") and name.endswith("/manifest.json")
        ]
        found = {name.split("/")[2]: self.json(name) for name in sorted(names)}
        for arch, manifest in found.items():
            if not isinstance(manifest, dict) or not isinstance(manifest.get("units"), dict):
                raise BuildError(f"{self.path.name}: the manifest of its pack {arch} names no units")
        return found

    @cached_property
    def tag(self) -> str:
        """cp311-cp311-manylinux_2_28_x86_64, as its WHEEL says."""
        text = self.data(self.only(".dist-info/WHEEL")).decode(errors="replace")
        fields = dict(line.partition(": ")[::2] for line in text.splitlines())
        if "Tag" not in fields:
            raise BuildError(f"{self.path.name} is no whole wheel: its WHEEL names no Tag")
        return fields["Tag"]

    @property
    def platform(self) -> str:
        """linux_x86_64: what its libraries were compiled for."""
        return matrix.platform_of(self.tag.rpartition("-")[2])

    @property
    def bindings(self) -> list[dict]:
        """apex/lib/bindings.json; empty where the wheel holds Python only."""
        return self.json("apex/lib/bindings.json") if "apex/lib/bindings.json" in self._contents else []

    def code(self, arch: str, unit: str) -> bytes:
        """A code object as the driver is given it. Raises BuildError where it cannot be decompressed."""
        stated = self.packs[arch]["units"][unit]
        file, size = stated["file"], stated["bytes"]
        data = self.data(f"apex/packs/{arch}/{file}")
        try:
            found, whole = data, True
            if file.endswith(".xz"):
                stream = lzma.LZMADecompressor()
                found = stream.decompress(data, size + 1)  # no more than the manifest states is unpacked
                whole = stream.eof and not stream.unused_data
            if len(found) != size or not whole:
                raise lzma.LZMAError(f"it is not the whole of the {size} bytes that its manifest states")
            return found
        except lzma.LZMAError as error:
            raise BuildError(f"{self.path.name}: {arch}/{file} cannot be decompressed: {error}") from None

    def about(self) -> dict:
        """What `explain --json` prints: identity, compilers, pins, bindings, packs and their kernels, sizes."""
        self.check_facts()
        facts = self.facts
        return {
            "wheel": self.path.name,
            "sha256": digest.of_file(self.path),
            "platform": self.platform,
            "tag": self.tag,
            "bytes": self.path.stat().st_size,
            "version": f"{facts['version']}+{facts['local']}" if facts["local"] else facts["version"],
            "source_sha256": facts["source_sha256"],
            "compilers": [c for c in [facts["host_compiler"], *facts["toolchains"]] if c],
            "pins": {f"torch-{torch['release']}": torch["git_version"] for torch in facts["torch"]},
            "bindings": [
                {**binding, "bytes": self._packed_under(f"apex/lib/{binding['folder']}/")}
                for binding in self.bindings
            ],
            "packs": {arch: self._pack(arch, manifest) for arch, manifest in self.packs.items()},
        }

    def _pack(self, arch: str, manifest: dict) -> dict:
        return {
            "compiler": manifest["compiler"],
            "flags": manifest["flags"],
            "bytes": sum(unit["bytes"] for unit in manifest["units"].values()),
            "packed": self._packed_under(f"apex/packs/{arch}/"),
            "units": {
                name: {key: unit[key] for key in ("sha256", "bytes", "source_sha256", "kernels")}
                for name, unit in sorted(manifest["units"].items())
            },
        }

    def _packed_under(self, folder: str) -> int:
        return sum(size for name, size in self._packed.items() if name.startswith(folder))


def difference(old: WheelFile, new: WheelFile) -> dict:
    """What differs: `facts` {name: [old, new]}, `files` {added, removed, changed}, and of the packs that both have
    `units` whose code differs, with the kernels whose registers, spills or bytes do. All empty where the contents are
    the same."""
    before, after = old.facts, new.facts
    facts = {
        key: [before.get(key), after.get(key)]
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    }
    common = old.members.keys() & new.members.keys()
    files = {
        "added": sorted(new.members.keys() - common),
        "removed": sorted(old.members.keys() - common),
        "changed": sorted(name for name in common if old.members[name].sha256 != new.members[name].sha256),
    }
    units = {}
    for arch in sorted(old.packs.keys() & new.packs.keys()):
        one, two = old.packs[arch]["units"], new.packs[arch]["units"]
        for name in sorted({*one, *two}):
            if one.get(name, {}).get("sha256") != two.get(name, {}).get("sha256"):
                units[f"{arch}/{name}"] = _unit(one.get(name), two.get(name))
    return {"facts": facts, "files": files, "units": units}


def _unit(one: dict | None, two: dict | None) -> dict:
    """Bytes of a unit's code before and after, and the kernels that use other resources."""
    before, after = (unit["kernels"] if unit else {} for unit in (one, two))
    return {
        "bytes": [one["bytes"] if one else 0, two["bytes"] if two else 0],
        "source": "same" if one and two and one["source_sha256"] == two["source_sha256"] else "changed",
        "kernels": {
            name: [before.get(name), after.get(name)]
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        },
    }
