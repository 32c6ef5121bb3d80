"""explain and diff: what is inside a wheel, from the file alone."""

import copy
import json
import re
import subprocess
import sys
import types
import zipfile

import pytest

from build_matrix import REPOSITORY
from build_matrix.check import verify
from build_matrix.errors import BuildError, GateError
from build_matrix.store import digest
from build_matrix.wheels import wheel
from build_matrix.wheels.wheel_file import WheelFile, difference

KERNEL = {"registers": 40, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 128, "wave_size": 32}
COMPILER = {"name": "nvcc", "version": "13.0.88", "sha256": "c" * 64}
FACTS = {
    "accelerator": "cuda", "archs": ["sm_90"], "distribution": "apex-cuda", "format": 1, "local": "cu130",
    "host_compiler": {"name": "g++", "version": "12.2.0", "sha256": "a" * 64}, "python": ["cp311"],
    "source_sha256": "5" * 64, "toolchains": [COMPILER], "version": "1.10.0",
    "torch": [{"release": "2.13.0", "git_version": "cf30"}],
}  # fmt: skip
BINDINGS = [
    {"torch": "2.13", "built_against": "2.13.0", "git_version": "cf30", "python": "cp311", "folder": "torch2.13",
     "cxx11_abi": True, "grade": "linked, never loaded"}
]  # fmt: skip


def manifest(**units):
    """unit -> (code, source digest, kernels)."""
    entries = {
        name: {"file": f"{name}.cubin", "bytes": len(code), "sha256": digest.of_bytes(code), "source_sha256": source,
               "kernels": kernels}
        for name, (code, source, kernels) in units.items()
    }  # fmt: skip
    return {"format": 1, "arch": "sm_90", "compiler": COMPILER, "flags": ["-O3"], "units": entries}


def make(path, units, facts=FACTS, **more):
    files = {
        "apex/build.json": json.dumps(facts).encode(),
        "apex/lib/bindings.json": json.dumps(BINDINGS).encode(),
        "apex/lib/torch2.13/libapex_torch.so": b"\x7fELF" * 100,
        "apex/packs/sm_90/manifest.json": json.dumps(manifest(**units)).encode(),
        **{f"apex/packs/sm_90/{name}.cubin": code for name, (code, _, _) in units.items()},
        **{f"apex/{name}.py": text for name, text in more.items()},
    }
    wheel.write(path, "apex-cuda", "1.10.0+cu130", "cp311-cp311-manylinux_2_27_x86_64", files)
    return path


ADAM = {"adam": (b"code" * 10, "s1", {"adam_f32": KERNEL, "adam_f16": KERNEL})}


@pytest.fixture
def built(tmp_path):
    return make(tmp_path / "apex_cuda-1.10.0+cu130-cp311-cp311-manylinux_2_27_x86_64.whl", ADAM)


def test_what_is_inside(built):
    about = WheelFile(built).about()
    assert about["sha256"] == digest.of_file(built) and about["bytes"] == built.stat().st_size
    assert about["version"] == "1.10.0+cu130" and about["source_sha256"] == "5" * 64
    assert [c["name"] for c in about["compilers"]] == ["g++", "nvcc"] and about["pins"] == {
        "torch-2.13.0": "cf30"
    }
    (binding,) = about["bindings"]
    assert binding["grade"] == "linked, never loaded" and 0 < binding["bytes"] < 400
    pack = about["packs"]["sm_90"]
    assert (pack["bytes"], pack["flags"], pack["compiler"]) == (40, ["-O3"], COMPILER)
    assert pack["units"]["adam"]["kernels"]["adam_f32"]["registers"] == 40


def test_the_same_contents_do_not_differ(built, tmp_path):
    again = make(tmp_path / "again.whl", ADAM)
    assert difference(WheelFile(built), WheelFile(again)) == {
        "facts": {}, "files": {"added": [], "removed": [], "changed": []}, "units": {}
    }  # fmt: skip


def test_what_differs_is_named(built, tmp_path):
    units = copy.deepcopy(ADAM)
    units["adam"] = (
        b"other code",
        "s2",
        {"adam_f32": {**KERNEL, "registers": 48, "spill_bytes": 8}, "adam_f64": KERNEL},
    )
    units["sgd"] = (b"sgd", "s3", {"sgd_f32": KERNEL})
    other = make(tmp_path / "other.whl", units, {**FACTS, "source_sha256": "6" * 64}, extra=b"x")
    found = difference(WheelFile(built), WheelFile(other))
    assert found["facts"] == {"source_sha256": ["5" * 64, "6" * 64]}
    assert found["files"]["added"] == ["apex/extra.py", "apex/packs/sm_90/sgd.cubin"]
    assert found["files"]["removed"] == []
    assert {"apex/build.json", "apex/packs/sm_90/adam.cubin"} <= set(found["files"]["changed"])
    adam, sgd = found["units"]["sm_90/adam"], found["units"]["sm_90/sgd"]
    assert (adam["bytes"], adam["source"], sgd["bytes"]) == ([40, 10], "changed", [0, 3])
    assert set(adam["kernels"]) == {"adam_f32", "adam_f16", "adam_f64"}
    assert adam["kernels"]["adam_f16"] == [KERNEL, None] and adam["kernels"]["adam_f32"][1]["registers"] == 48


def test_another_compiler_with_the_same_source(built, tmp_path):
    other = make(tmp_path / "other.whl", {"adam": (b"x" * 40, "s1", ADAM["adam"][2])})
    unit = difference(WheelFile(built), WheelFile(other))["units"]["sm_90/adam"]
    assert unit == {"bytes": [40, 40], "source": "same", "kernels": {}}


def run(*arguments):
    command = [sys.executable, "-m", "build_matrix", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)


def test_the_commands_that_explain_and_compare(built, tmp_path):
    said = run("explain", built, "--arch", "sm_90").stdout
    for word in (
        "source  " + "5" * 64,
        "nvcc 13.0.88",
        "torch-2.13.0  cf30",
        "linked, never loaded",
        "adam_f16",
    ):
        assert word in said, said
    about = WheelFile(built).about() | {"signed": {}}
    assert json.loads(run("explain", built, "--json").stdout) == about
    assert json.loads(run("explain", built, "--json", "--arch", "sm_90").stdout)["packs"] == {
        "sm_90": about["packs"]["sm_90"]
    }
    wrong = run("explain", built, "--arch", "gfx942")
    assert wrong.returncode == 1 and "has no pack for gfx942; it has sm_90" in wrong.stderr
    same = run("diff", built, built)
    assert (same.returncode, same.stdout) == (0, "the contents are the same\n")
    other = make(tmp_path / "other.whl", {**ADAM, "sgd": (b"sgd", "s3", {"sgd_f32": KERNEL})})
    done = run("diff", built, other)
    assert done.returncode == 1 and "code sm_90/sgd: 0 -> 3 bytes" in done.stdout
    assert "  sgd_f32: absent -> 40 registers, 0 bytes spilled" in done.stdout


def test_what_is_no_wheel_is_named(built, tmp_path):
    with pytest.raises(BuildError, match="there is no file"):
        WheelFile(tmp_path / "none.whl")
    (tmp_path / "text.whl").write_text("text")
    with pytest.raises(BuildError, match="text.whl is damaged, or no wheel"):
        WheelFile(tmp_path / "text.whl")
    data = bytearray(built.read_bytes())
    at = data.index(b"apex/build.json") + len(b"apex/build.json") + 5
    data[at] ^= 0xFF
    (tmp_path / "bad.whl").write_bytes(data)
    with pytest.raises(BuildError, match="bad.whl is damaged, or no wheel"):
        WheelFile(tmp_path / "bad.whl")
    wheel.write(tmp_path / "foreign.whl", "x", "1", "py3-none-any", {"x.py": b""})
    with pytest.raises(BuildError, match="no wheel that this farm built"):
        WheelFile(tmp_path / "foreign.whl")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"apex/build.json": "[1,"}, "apex/build.json is missing, or no JSON"),
        ({"apex/build.json": "[]"}, "its apex/build.json is of another format: no version, local"),
        ({"apex/build.json": json.dumps(FACTS)}, "is no whole wheel: 0 of its files are a .dist-info/"),
        ({"apex/build.json": json.dumps(FACTS), "a.dist-info/WHEEL": "", "a.dist-info/RECORD": ""},
         "(is no whole wheel: its WHEEL names no Tag|RECORD does not list)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["explain", "verify"])
def test_a_wheel_that_was_tampered_with_is_named(tmp_path, files, words, command):
    path = tmp_path / "apex_cuda-1.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    done = run(command, path)
    assert done.returncode and re.search(words, done.stderr) and "Traceback" not in done.stderr, done.stderr


def test_a_file_that_is_there_twice_is_named(built):
    with zipfile.ZipFile(built, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("apex/build.json", "{}")
    with pytest.raises(BuildError, match="it holds apex/build.json twice"):
        WheelFile(built)


def test_a_pack_that_lacks_a_kernel_is_not_verified(built, monkeypatch):
    """What the manifest lists is the same, and the rest is not there: that is no verified pack."""
    compiler = types.SimpleNamespace(describe=lambda: COMPILER)
    monkeypatch.setattr(verify.by_arch, "toolchain_for", lambda arch: compiler)
    monkeypatch.setattr(verify.packs, "units", lambda arch, toolchain, names: [])
    monkeypatch.setattr(verify, "_check_source", lambda wheel: None)
    engine = types.SimpleNamespace(run=lambda units: [])
    with pytest.raises(
        GateError, match="sm_90/[a-z_0-9]*: this checkout makes it, and the wheel has none"
    ) as fault:
        verify.pack(WheelFile(built), "sm_90", engine)
    assert "sm_90/adam: the wheel has it, and this checkout makes none" in str(fault.value)
