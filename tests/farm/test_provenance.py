"""What comes with a wheel (bill of materials, statement of provenance), and building it again to compare."""

import json
import lzma
import re
import shutil
import zipfile

import pytest

pytest.importorskip("cyclonedx")
pytest.importorskip("auditwheel")

from build_matrix import REPOSITORY
from build_matrix.check import verify
from build_matrix.errors import BuildError, GateError, PinError
from build_matrix.store import Store, digest
from build_matrix.store.engine import Engine
from build_matrix.toolchains import pythons
from build_matrix.wheels import provenance, sbom, wheel
from build_matrix.wheels.wheel_file import WheelFile

BUILT = REPOSITORY / "build/tree"
PYTHON = pythons.find(pythons.own_tag())
pytestmark = pytest.mark.skipif(
    not (BUILT / "apex/build.json").is_file(), reason="no build/tree: run python -m build_matrix tree"
)


@pytest.fixture(scope="module")
def facts():
    return json.loads((BUILT / "apex/build.json").read_text())


@pytest.fixture
def built(wheel_of_tree, tmp_path):
    """A copy that a test may spoil."""
    for path in wheel_of_tree.iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    (path,) = tmp_path.glob("*.whl")
    return path


def bill(path):
    with zipfile.ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(f".dist-info/{sbom.NAME}")]
        return json.loads(archive.read(name))


def test_the_bill_names_what_is_in_the_wheel_and_what_made_it(built, facts):
    said, members = bill(built), WheelFile(built).members
    assert (said["bomFormat"], said["specVersion"]) == ("CycloneDX", "1.6")
    assert said["metadata"]["component"]["purl"].startswith(f"pkg:pypi/{facts['distribution']}@1.10.0")
    files = {c["name"]: c["hashes"][0]["content"] for c in said["components"] if c["type"] == "file"}
    assert files == {name: m.sha256 for name, m in members.items() if name.endswith(sbom.BINARY)}
    tools = {
        (c["name"], c["version"]): c["hashes"][0]["content"]
        for c in said["components"]
        if c["type"] == "application"
    }
    compilers = [facts["host_compiler"], *facts["toolchains"]]
    assert tools == {(c["name"], c["version"]): c["sha256"] for c in compilers}
    libraries = {
        (c["name"], c.get("version")): {p["name"]: p["value"] for p in c["properties"]}
        for c in said["components"]
        if c["type"] == "library"
    }
    assert libraries == {
        **{
            ("torch", t["release"]): {
                "git-commit": t["git_version"],
                "apex:headers-sha256": t["headers_sha256"],
            }
            for t in facts["torch"]
        },
        **{
            ("CPython", p["version"]): {"apex:headers-sha256": p["sha256"]}
            for p in facts["headers"]["python"].values()
        },
        **{
            (f"{compiler.partition(' ')[0]} headers", compiler.partition(" ")[2]): {
                "apex:headers-sha256": read
            }
            for compiler, read in facts["headers"]["toolkit"].items()
        },
        ("C and C++ library headers and objects", None): {"apex:headers-sha256": facts["headers"]["system"]},
    }


def test_the_bill_is_valid_by_cyclonedx_own_schema(built):
    from cyclonedx.exception import MissingOptionalDependencyException
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    try:
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill(built))) is None
    except MissingOptionalDependencyException as error:
        pytest.skip(str(error))


def test_the_statement_is_of_the_wheel_and_names_every_input(built, facts):
    said = json.loads(built.with_name(f"{built.name}.intoto.json").read_text())
    assert (said["_type"], said["predicateType"]) == (provenance.STATEMENT, provenance.PREDICATE)
    assert said["subject"] == [{"name": built.name, "digest": {"sha256": digest.of_file(built)}}]
    definition = said["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {
        "accelerator": facts["accelerator"],
        "archs": facts["archs"],
        "torch": [t["release"] for t in facts["torch"]],
        "python": PYTHON.tag,
        "platform": "linux_x86_64",
    }
    inputs = {
        entry.get("uri") or entry["name"]: entry["digest"] for entry in definition["resolvedDependencies"]
    }
    for name in (
        "csrc/device/multi_tensor_adam.cu",
        "csrc/host/launch.cpp",
        "apex/__init__.py",
        "related_commits",
    ):
        assert inputs[f"file:{name}"] == {"sha256": digest.of_file(REPOSITORY / name)}
    for torch in facts["torch"]:
        assert inputs[f"git+https://github.com/pytorch/pytorch@{torch['git_version']}"] == {
            "gitCommit": torch["git_version"],
            "sha256": torch["headers_sha256"],
        }
    assert inputs[f"CPython-{PYTHON.version} headers"] == {
        "sha256": facts["headers"]["python"][PYTHON.tag]["sha256"]
    }
    assert inputs["C and C++ library headers and objects"] == {"sha256": facts["headers"]["system"]}
    for name, digests in inputs.items():
        assert re.fullmatch("[0-9a-f]{64}", digests.get("sha256", "")), f"{name} has no hash"
    assert len(inputs) == len(definition["resolvedDependencies"])
    for compiler, read in facts["headers"]["toolkit"].items():
        assert inputs[f"{compiler} headers"] == {"sha256": read}
    for compiler in facts["toolchains"]:
        assert inputs[f"{compiler['name']} {compiler['version']}"] == {"sha256": compiler["sha256"]}


@pytest.mark.parametrize(
    "text", ["{", "[" * 200_000, "[1]", '{"subject": []}', '{"subject": [{"digest": {}}]}']
)
def test_a_cut_statement_is_named(built, text):
    built.with_name(built.name + provenance.SUFFIX).write_text(text)
    with pytest.raises(GateError, match="intoto.json is cut, or no statement of provenance"):
        provenance.check(built)


def test_both_are_the_same_twice(built, facts, tmp_path):
    again = Store(tmp_path / "store").build(wheel.unit(BUILT, facts, PYTHON)).folder
    for path in (built, built.with_name(f"{built.name}.intoto.json")):
        assert (again / path.name).read_bytes() == path.read_bytes()


def spoil(path, name, change):
    """Writes the wheel anew with one member changed."""
    with zipfile.ZipFile(path) as archive:
        contents = {n: archive.read(n) for n in archive.namelist()}
    contents[name] = change(contents[name])
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in contents.items():
            archive.writestr(member, data)


def test_a_file_that_was_changed_is_found(built):
    assert verify._record(WheelFile(built)).endswith("files are as listed")
    assert provenance.check(built)
    spoil(built, "apex/__init__.py", lambda data: data + b"\n")
    with pytest.raises(GateError, match="apex/__init__.py is not what RECORD says"):
        verify._record(WheelFile(built))
    with pytest.raises(GateError, match=r"its sha256 is \w+; .*intoto.json states"):
        provenance.check(built)
    built.with_name(f"{built.name}.intoto.json").unlink()
    assert not provenance.check(built)


@pytest.fixture
def of_now(built, facts):
    """The wheel, where build/tree was built from the very sources of this checkout."""
    if facts["source_sha256"] != verify.identity.compiled():
        pytest.skip("build/tree is of other sources: run python -m build_matrix tree")
    if not facts["archs"]:
        pytest.skip("build/tree has no pack")
    return built


UNIT = "multi_tensor_scale"


def test_code_objects_are_built_again_and_are_the_same(of_now, facts, tmp_path):
    said = verify.pack(WheelFile(of_now), facts["archs"][0], Engine(Store(tmp_path / "store"), 1), [UNIT])
    assert said == f"{facts['archs'][0]}: 1 code objects are the same, byte for byte"


def test_another_code_object_is_found(of_now, facts, tmp_path):
    arch = facts["archs"][0]
    (name,) = [n for n in WheelFile(of_now).members if n.startswith(f"apex/packs/{arch}/{UNIT}.")]
    plain = lzma.decompress(WheelFile(of_now).data(name))
    spoil(of_now, name, lambda data: lzma.compress(plain[:-1] + bytes([plain[-1] ^ 1])))
    with pytest.raises(GateError, match=f"{arch}/{UNIT}: built again it is "):
        verify.pack(WheelFile(of_now), arch, Engine(Store(tmp_path / "store"), 1), [UNIT])
    spoil(of_now, name, lambda data: data[:-20])
    with pytest.raises(BuildError, match=f"{arch}/{UNIT}.* cannot be decompressed"):
        WheelFile(of_now).code(arch, UNIT)


def test_what_cannot_be_verified_here_is_said(of_now, facts, tmp_path, monkeypatch):
    wheel_file, engine = WheelFile(of_now), Engine(Store(tmp_path / "store"), 1)
    with pytest.raises(BuildError, match="has no pack for sm_999; it has "):
        verify.pack(wheel_file, "sm_999", engine)
    arch = facts["archs"][0]
    wheel_file.packs[arch]["compiler"] = {"name": "nvcc", "version": "1.2.3", "sha256": "0" * 64}
    with pytest.raises(PinError, match="nvcc cannot be verified here: pinned 1.2.3 .*, have ") as fault:
        verify.pack(wheel_file, arch, engine)
    assert fault.value.exit_code == 6
    wheel_file.facts["source_sha256"] = "0" * 64
    with pytest.raises(BuildError, match="was made of source 000000000000, this checkout is"):
        verify.pack(wheel_file, arch, engine)
