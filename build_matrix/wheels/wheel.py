"""Wheels, byte for byte reproducible: the same tree gives the same file, whenever and wherever it is
zipped."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import io
import json
import lzma
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import GateError
from build_matrix.parts import ledger
from build_matrix.spec import matrix, pins
from build_matrix.spec.registry import Registry
from build_matrix.store import Store, WorkUnit, digest
from build_matrix.store.files import OUTPUTS, beside
from build_matrix.toolchains.pythons import Python
from build_matrix.wheels import audit, provenance, sbom, stand_in

XZ_PRESET = 6
EPOCH = (1980, 1, 1, 0, 0, 0)  # the first date a zip archive can hold
SUMMARY = "Fused optimizers, normalization, softmax and amp tools for PyTorch on NVIDIA and AMD GPUs and CPUs"
ANY_PYTHON = "py3"  # of a wheel that is for every Python
PURE = f"{ANY_PYTHON}-none-any"  # the tag of a wheel that is Python alone
MANIFEST = re.compile(r"apex/packs/[^/]+/manifest\.json")


def python_sources() -> dict[str, Path]:
    """Every file of apex/ of the checkout that is no build output, by its name in the wheel."""
    return {
        str(path.relative_to(REPOSITORY)): path
        for path in sorted((REPOSITORY / "apex").rglob("*"))
        if path.is_file() and path.suffix not in OUTPUTS and "__pycache__" not in path.parts
    }


def legacy_modules() -> dict[str, bytes]:
    """The generated top-level modules (amp_C.py, ...), of every complete extension."""
    source = REPOSITORY / "apex/_legacy/__init__.py"
    spec = importlib.util.spec_from_file_location("apex_legacy_text", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {f"{e.name}.py": module.module_text(e.name).encode() for e in Registry.load().complete()}


def contents(tree: Path, store: Store | None = None) -> dict[str, bytes]:
    """Everything of a wheel but its dist-info: Python sources, the built tree with its code objects compressed, the
    top-level modules. `store` keeps what was compressed: every Python's wheel holds the same code objects."""
    files = {name: path.read_bytes() for name, path in python_sources().items()}
    for path in sorted((tree / "apex").rglob("*")):
        if path.is_file():
            files[str(path.relative_to(tree))] = path.read_bytes()
    return _compressed(files, store) | legacy_modules()


def _compressed(files: dict[str, bytes], store: Store | None) -> dict[str, bytes]:
    """The same with every code object of a pack compressed by xz, as its manifest then says. Digests in manifests stay
    those of the code objects."""
    found = dict(files)
    for name in [name for name in files if MANIFEST.fullmatch(name)]:
        manifest, folder = json.loads(files[name]), name.rpartition("/")[0]
        for unit in manifest["units"].values():
            image = found.pop(f"{folder}/{unit['file']}")
            unit["file"] += ".xz"
            found[f"{folder}/{unit['file']}"] = _xz(image, unit["file"], store)
        found[name] = (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()
    return found


def _xz(image: bytes, name: str, store: Store | None) -> bytes:
    """A code object as wheels hold it, from the store of this machine where it was compressed before. A higher preset
    saves nothing."""
    if store is None:
        return lzma.compress(image, preset=XZ_PRESET)
    inputs = {"code": digest.of_bytes(image), "preset": XZ_PRESET}

    def make(folder: Path) -> None:
        (folder / name).write_bytes(_xz(image, name, None))

    return (Store(store.root).build(WorkUnit("xz", name, inputs, make)).folder / name).read_bytes()


def metadata(distribution: str, version: str) -> str:
    """METADATA. torch is a floor, never a pin: an exact pin makes pip replace the user's torch."""
    readme = REPOSITORY / "README.md"
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", distribution),
        ("Version", version),
        ("Summary", SUMMARY),
        ("License-Expression", sbom.LICENSE),
        ("License-File", "LICENSE"),
        ("Requires-Python", ">=3.10"),
        ("Requires-Dist", "torch>=2.8"),
        ("Description-Content-Type", "text/markdown"),
    ]
    head = "".join(f"{name}: {value}\n" for name, value in fields)
    return head + "\n" + (readme.read_text(encoding="utf-8") if readme.is_file() else SUMMARY + "\n")


def write(
    path: Path,
    distribution: str,
    version: str,
    tag: str,
    files: dict[str, bytes],
    more: dict[str, bytes] | None = None,
    level: int = 9,
    described: str | None = None,
) -> None:
    """Writes the wheel `path` with METADATA, WHEEL (tag `cp311-cp311-manylinux_2_28_x86_64`) and RECORD; `more`
    files go into the dist-info; `described` stands in the place of the usual METADATA."""
    info = f"{distribution.replace('-', '_')}-{version}.dist-info"
    pure = str(tag.endswith("-none-any")).lower()
    wheel = f"Wheel-Version: 1.0\nGenerator: apex.build_matrix\nRoot-Is-Purelib: {pure}\nTag: {tag}\n"
    top = sorted(filter(str.isidentifier, {name.split("/")[0].removesuffix(".py") for name in files}))
    last = {
        f"{info}/METADATA": (described or metadata(distribution, version)).encode(),
        f"{info}/WHEEL": wheel.encode(),
        f"{info}/top_level.txt": "".join(f"{name}\n" for name in top).encode(),
    }
    if (REPOSITORY / "LICENSE").is_file():
        last[f"{info}/licenses/LICENSE"] = (REPOSITORY / "LICENSE").read_bytes()
    last |= {f"{info}/{name}": data for name, data in (more or {}).items()}
    ordered = {**dict(sorted(files.items())), **dict(sorted(last.items()))}
    record = "".join(f"{name},{_record_digest(data)},{len(data)}\n" for name, data in ordered.items())
    ordered[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in ordered.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data, compresslevel=level)


def _record_digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def unit(
    tree: Path,
    facts: dict,
    python: Python | None,
    platform: str = matrix.NATIVE,
    store: Store | None = None,
) -> WorkUnit:
    """The wheel of one Python, or, None, of every one: for Windows, without a module of Python's. That a wheel runs
    where its tag says is auditwheel's verdict; that the library for Windows needs Windows alone was looked at when it
    was linked."""
    distribution, version = facts["distribution"], f"{facts['version']}+{facts['local']}"
    of = matrix.load().platform(platform)
    tag = python.tag if python else ANY_PYTHON
    tags = f"{tag}-{tag if python else 'none'}"
    files = contents(tree, store) | stand_in.files(distribution, version)
    more = {sbom.NAME: sbom.render(facts, files)}

    def make(folder: Path) -> None:
        coverage = json.loads(files.get("apex/coverage.json", '{"units": {}}'))
        # What the store holds was compiled under the budget of its day.
        if found := ledger.over_budget(coverage, matrix.load()):
            raise GateError(f"{distribution} {tag}", found)
        stem = f"{distribution.replace('-', '_')}-{version}-{tags}"
        on = platform
        if not of.windows:
            draft = folder / f"{stem}-{platform}.whl"
            write(draft, distribution, version, f"{tags}-{platform}", files, more, level=0)
            on = audit.platform_tag(draft)
            draft.unlink()
        name = f"{stem}-{on}.whl"
        write(folder / name, distribution, version, f"{tags}-{on}", files, more)
        size, budget = (folder / name).stat().st_size, matrix.load().wheel_bytes
        if size > budget:
            raise GateError(name, [f"{size} bytes are over the budget of {budget} (matrix.toml)"])
        provenance.write(folder / name, facts, tag, platform)

    inputs = _inputs(distribution, version, files | more) | {"tag": tag}
    if not of.windows:
        inputs["audit"] = audit.version()
    if platform != matrix.NATIVE:
        inputs["platform"] = platform
    return WorkUnit("wheel", f"{distribution} {tag}{of.suffix}", inputs, make)


def _inputs(distribution: str, version: str, files: dict[str, bytes]) -> dict[str, object]:
    """What a wheel's bytes depend on."""
    return {
        "files": {name: digest.of_bytes(data) for name, data in files.items()},
        "stated": [digest.of_file(path) for path in (pins.FILE, matrix.FILE)],
        "metadata": metadata(distribution, version),
        "license": digest.of_file(REPOSITORY / "LICENSE") if (REPOSITORY / "LICENSE").is_file() else "",
    }


def pure_unit(tree: Path, facts: dict) -> WorkUnit:
    """The one wheel of a distribution that is Python alone, for every Python and platform. Raises GateError for a tree
    with a library or code object in it."""
    distribution, version = facts["distribution"], f"{facts['version']}+{facts['local']}"
    files = contents(tree) | stand_in.files(distribution, version)
    if compiled := sorted(name for name in files if name.endswith(sbom.BINARY)):
        raise GateError(distribution, [f"{name} is compiled, and the wheel says {PURE}" for name in compiled])
    more = {sbom.NAME: sbom.render(facts, files)}

    def make(folder: Path) -> None:
        path = folder / f"{distribution.replace('-', '_')}-{version}-{PURE}.whl"
        write(path, distribution, version, PURE, files, more)
        provenance.write(path, facts, "py3", "any")

    inputs = _inputs(distribution, version, files | more) | {"tag": PURE}
    return WorkUnit("wheel", f"{distribution} py3", inputs, make)


def publish(folder: Path, target: Path) -> Path:
    """Copies a built wheel, and its statement of provenance, into `target` (dist/) in place of others of its
    distribution, version, Python and processor."""
    (wheel,) = folder.glob("*.whl")
    target.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        partial = {}
        for path in sorted(folder.glob(f"{wheel.name}*")):
            partial[path.name] = stack.enter_context(beside(target / path.name))
            shutil.copyfile(path, partial[path.name])
        *of, tag = wheel.name.removesuffix(".whl").split("-")
        for old in namesakes(target, "-".join(of), matrix.platform_of(tag), "*"):
            old.unlink(missing_ok=True)  # another that lays the same wheel here may be first
        for name, path in partial.items():
            path.replace(target / name)
    return target / wheel.name


def ours(files: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """The wheels of distributions of the matrix among `files`, by their names, and words for each wheel or source
    archive that is of another project: it has no grade, table or index here."""
    known = [accelerator.distribution for accelerator in matrix.load().accelerators]
    archives = sorted(path for path in files if path.name.endswith((".whl", ".tar.gz", ".zip")))
    own, others = [], []
    for path in archives:
        fits = path.suffix == ".whl" and path.name.partition("-")[0].replace("_", "-") in known
        (own if fits else others).append(path)
    return own, [f"passed over: {path.name} is no wheel of {', '.join(known)}" for path in others]


def namesakes(target: Path, stem: str, platform: str, end: str = "") -> list[Path]:
    """The wheels in `target` of one name but for the tag of their platform; `end` *: and what lies beside them."""
    if matrix.platform_of(platform) == platform and not platform.startswith("linux_"):
        return sorted(target.glob(f"{stem}-{platform}.whl{end}"))
    return sorted(target.glob(f"{stem}-*_{platform.removeprefix('linux_')}.whl{end}"))


def sizes(path: Path) -> dict[str, int]:
    """Bytes in the archive by part: each pack, libraries, bindings, Python with the data of all."""
    found: dict[str, int] = {}
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        for entry in archive.infolist():
            parts = entry.filename.split("/")
            known = parts[0] == "apex" and len(parts) > 2
            if known and parts[1] == "packs":
                part = f"pack {parts[2]}"
            elif known and parts[1] == "lib" and parts[2].startswith("torch"):
                part = f"bindings {parts[2]}"
            elif known and parts[1] == "lib" and not parts[2].endswith(".json"):
                part = "portable binding" if parts[2].startswith("apex_portable") else "libapex"
            else:
                part = "Python and data"
            found[part] = found.get(part, 0) + entry.compress_size
    return found
