"""Platforms that a cross compiler builds for: what they are compiled with, what their wheels are called, and that
nothing is said of them that was not seen."""

import importlib.util
import json
import shutil
import struct
import subprocess

import pytest

from apex._loader import ask, explain
from build_matrix import REPOSITORY
from build_matrix.check import receipts
from build_matrix.errors import BuildError, GateError, PackageIndexError, ToolchainMissing
from build_matrix.parts import bindings, host_library, loads
from build_matrix.serve import compat, publish
from build_matrix.spec import identity, matrix
from build_matrix.toolchains import (
    headers,
    host_compiler,
    manylinux,
    package_index,
    provision,
    python_headers,
    pythons,
)
from build_matrix.wheels import wheel
from build_matrix.wheels.wheel_file import WheelFile

ARM = "linux_aarch64"
PYTHON = pythons.find(pythons.own_tag())


@pytest.fixture
def cross():
    try:
        return host_compiler.find(ARM)
    except ToolchainMissing as error:
        pytest.skip(str(error))


# ---- the compiler ------------------------------------------------------------------------------------------


def test_a_cross_compiler_that_is_missing_is_named_with_its_command(monkeypatch):
    monkeypatch.delenv("APEX_CXX_aarch64", raising=False)
    monkeypatch.setattr(host_compiler.shutil, "which", lambda name: None)
    host_compiler.find.cache_clear()
    with pytest.raises(
        ToolchainMissing, match="g\\+\\+-aarch64 is not here. Run: nox -s toolchain -- g\\+\\+-aarch64"
    ):
        host_compiler.find(ARM)
    monkeypatch.setenv("APEX_CXX_aarch64", "no-such-compiler")
    with pytest.raises(BuildError, match="APEX_CXX_aarch64 names no-such-compiler, which is no program here"):
        host_compiler.find(ARM)
    host_compiler.find.cache_clear()
    with pytest.raises(BuildError, match="no wheel is built for linux_riscv64"):
        host_compiler.find("linux_riscv64")


def test_it_comes_by_apt_get_or_the_command_is_named(monkeypatch, tmp_path):
    command = provision.command("g++-aarch64", provision.target("g++-aarch64"))
    assert command[:2] == ["apt-get", "install"] and command[-1] == "g++-aarch64-linux-gnu"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="apt-get does not run here: .*; install g\\+\\+-aarch64-linux-gnu"):
        provision.provision("g++-aarch64")
    (tmp_path / "apt-get").write_text("#!/bin/sh\nexit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    with pytest.raises(BuildError, match="Run as root: apt-get install .* g\\+\\+-aarch64-linux-gnu"):
        provision.provision("g++-aarch64")


def test_units_of_a_platform_are_its_own_and_those_of_the_machine_keep_their_names(cross):
    source = next(path for path in host_library.sources() if path.stem == "status")
    own = host_library.object_unit(source, host_compiler.find())
    other = host_library.object_unit(source, cross, ARM)
    assert (own.name, other.name) == ("csrc/host/status.cpp", f"csrc/host/status.cpp {ARM}")
    assert "-march=x86-64" in own.inputs["flags"] and "-march=armv8-a" in other.inputs["flags"]
    assert own.key != other.key
    assert cross.describe()["name"] == "g++-aarch64"


@pytest.fixture
def library(cross, tmp_path):
    """A libapex.so of two of its functions."""
    objects = []
    for source in host_library.sources():
        if source.stem == "cpu_level" or source.parent == host_compiler.COMPAT:
            objects.append(tmp_path / f"{source.stem}.o")
            cross.compile(source, objects[-1], host_library.flags(source, ARM))
    cross.link(objects, tmp_path / "libapex.so", host_library.LINK)
    return tmp_path / "libapex.so"


def machine(path):
    return struct.unpack_from("<H", path.read_bytes(), 18)[0]


def test_its_libraries_fit_manylinux(library, cross, tmp_path):
    assert machine(library) == 183  # EM_AARCH64
    assert manylinux.faults(library) == []
    newer = tmp_path / "newer.cpp"
    newer.write_text('#include <cmath>\nextern "C" double f(double x) { return std::pow(x, 3.3); }\n')
    for forced, fits in (([], False), (["-include", str(host_compiler.COMPAT / "old_glibc.h")], True)):
        cross.compile(newer, tmp_path / "newer.o", ["-fPIC", *forced])
        cross.link([tmp_path / "newer.o"], tmp_path / "newer.so", ["-lm"])
        assert (manylinux.faults(tmp_path / "newer.so") == []) == fits


LOADS = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** names) {
  void* library = dlopen(names[1], RTLD_NOW);
  if (!library) return puts(dlerror()), 1;
  int (*set)(int) = (int (*)(int))dlsym(library, "apex_set_cpu_level");
  printf("level %d\\n", set(4));
  return 0;
}
"""


@pytest.mark.parametrize(("processor", "level"), [("cortex-a72", 1), ("max", 2)])
def test_an_emulated_process_loads_it(library, cross, tmp_path, processor, level):
    """NEON is in the baseline; SVE is taken where the processor has it."""
    if not (qemu := shutil.which("qemu-aarch64")):
        pytest.skip("no qemu-aarch64: apt-get install qemu-user")
    (tmp_path / "loads.c").write_text(LOADS)
    subprocess.run([cross.path, "-x", "c", tmp_path / "loads.c", "-o", tmp_path / "loads"], check=True)
    command = [qemu, "-cpu", processor, "-L", "/usr/aarch64-linux-gnu", tmp_path / "loads", library]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"level {level}\n"), done.stdout + done.stderr


# ---- headers -----------------------------------------------------------------------------------------------


def test_pyconfig_is_the_targets(cross, tmp_path):
    python_headers.lay(PYTHON, cross, tmp_path / "include")
    found = python_headers.macros(cross, tmp_path / "include/pyconfig.h")
    assert found["SIZEOF_LONG"].strip() == found["SIZEOF_VOID_P"].strip() == "8"
    assert "HAVE_GCC_ASM_FOR_X64" not in found and "HAVE_USABLE_WCHAR_T" in found
    own = python_headers.macros(host_compiler.find(), PYTHON.include / "pyconfig.h")
    assert "HAVE_USABLE_WCHAR_T" not in own  # wchar_t has a sign on x86
    assert (tmp_path / "include/Python.h").read_bytes() == (PYTHON.include / "Python.h").read_bytes()
    cross.compile(tmp_path / "include/Python.h", tmp_path / "x.gch", ["-x", "c++-header", "-std=c++20"])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"SIZEOF_LONG": "4"}, "SIZEOF_LONG differs"),
        ({"ALIGNOF_MAX_ALIGN_T": "8"}, "ALIGNOF_MAX_ALIGN_T differs"),
        ({"WORDS_BIGENDIAN": "1"}, "byte order differs"),
        ({"SIZEOF_SOMETHING_NEW": "8"}, "SIZEOF_SOMETHING_NEW differs"),
    ],
)
def test_a_pyconfig_that_the_target_contradicts_is_refused(cross, changed, named):
    configured = python_headers.configuration(PYTHON, cross)
    python_headers.check(PYTHON, configured, cross)
    with pytest.raises(GateError, match=named):
        python_headers.check(PYTHON, configured | changed, cross)


def test_torch_headers_are_of_the_platforms_own_wheel(monkeypatch):
    names = [
        f"torch-2.99.0-{tag}-{tag}-{on}.whl"
        for on in ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "manylinux2014_aarch64")
        for tag in ("cp311", "cp310")
    ]
    files = [package_index.IndexFile(name, name, "") for name in names]
    monkeypatch.setattr(package_index, "files", lambda project: files)
    assert headers.wheel_of("2.99.0").filename == "torch-2.99.0-cp310-cp310-manylinux_2_28_x86_64.whl"
    assert headers.wheel_of("2.99.0", ARM).filename == "torch-2.99.0-cp310-cp310-manylinux_2_28_aarch64.whl"
    with pytest.raises(PackageIndexError, match="torch 2.99.1 for linux_aarch64"):
        headers.wheel_of("2.99.1", ARM)
    own, other = headers.unit("2.13.0"), headers.unit("2.13.0", ARM)
    assert (own.name, other.name) == ("torch-2.13.0", f"torch-2.13.0 {ARM}") and own.key != other.key


def of(platform, tmp_path):
    return headers.TorchHeaders("2.13.0+cu130", "0" * 40, "13.0", tmp_path, "x", False, platform)


def test_a_binding_is_graded_as_what_it_is(cross, tmp_path, monkeypatch):
    monkeypatch.setattr(loads.grade, "__defaults__", (tmp_path, matrix.NATIVE))
    monkeypatch.setattr(bindings, "source_identity", lambda: "abc")
    for platform, grade in ((matrix.NATIVE, "loaded (slim torch)"), (ARM, "loaded under qemu")):
        assert bindings.entry(of(platform, tmp_path), PYTHON)["grade"] == "linked, never loaded"
        loads.write("2.13.0", PYTHON.tag, "abc", tmp_path, platform)
        assert bindings.entry(of(platform, tmp_path), PYTHON)["grade"] == grade
    unit = bindings.python_module(of(ARM, tmp_path), PYTHON)
    assert unit.name == f"torch 2.13.0 {PYTHON.tag} {ARM}" and unit.inputs["platform"] == ARM
    assert "-march=armv8-a" in unit.inputs["flags"]
    assert PYTHON.suffix_on(ARM) == f".cpython-{PYTHON.tag[2:]}-aarch64-linux-gnu.so"


# ---- wheels ------------------------------------------------------------------------------------------------

FACTS = {"source_sha256": "c" * 64, "archs": ["sm_90"], "accelerator": "cuda", "local": "cu130"}


def tiny(folder, on, files=()):
    """Enough of a wheel for what looks at its name and tag."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"apex_cuda-1.10.0+cu130-cp311-cp311-{on}.whl"
    binding = {"torch": "2.13", "python": "cp311", "grade": "linked, never loaded"}
    contents = {
        "apex/build.json": json.dumps(FACTS).encode(),
        "apex/lib/bindings.json": json.dumps([binding]).encode(),
    }
    wheel.write(path, "apex-cuda", "1.10.0+cu130", f"cp311-cp311-{on}", contents | dict(files))
    return path


def test_auditwheel_judges_a_wheel_of_another_processor(library, cross, tmp_path):
    pytest.importorskip("auditwheel")
    from build_matrix.wheels import audit

    draft = tiny(tmp_path / "a", ARM, {"apex/lib/libapex.so": library.read_bytes()})
    assert audit.platform_tag(draft) == "manylinux_2_28_aarch64"
    newer = tmp_path / "newer.cpp"
    newer.write_text('#include <cmath>\nextern "C" double f(double x) { return std::pow(x, 3.3); }\n')
    cross.compile(newer, tmp_path / "newer.o", ["-fPIC"])
    cross.link([tmp_path / "newer.o"], tmp_path / "newer.so", ["-lm"])
    draft = tiny(tmp_path / "b", ARM, {"apex/lib/libapex.so": (tmp_path / "newer.so").read_bytes()})
    with pytest.raises(
        GateError, match="auditwheel calls it manylinux_2_\\d+_aarch64; manylinux_2_28 is the limit"
    ):
        audit.platform_tag(draft)


def test_a_wheel_that_is_not_what_would_be_graded_is_not_tried(tmp_path):
    """Report: of a wheel without the binding the portable one ran, and the receipt said that the binding had."""
    spec = importlib.util.spec_from_file_location("aarch64_check", REPOSITORY / "ci/aarch64_check.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    path = tiny(tmp_path / "arm", "manylinux_2_28_aarch64")
    with pytest.raises(BuildError, match="no binding of torch 2.8 .* --python 3.11 --torch 2.8.0"):
        script.check(path, "2.8.0")
    with pytest.raises(BuildError, match="other sources"):
        script.check(path, "2.13.0")
    facts = {"apex/build.json": json.dumps(FACTS | {"source_sha256": identity.compiled()}).encode()}
    script.check(tiny(tmp_path / "own", "manylinux_2_28_aarch64", facts), "2.13.0")
    with pytest.raises(BuildError, match="no binding .* for linux_aarch64"):
        script.check(tiny(tmp_path / "other", "manylinux_2_28_x86_64", facts), "2.13.0")


def test_a_wheel_takes_the_place_of_one_of_its_own_processor_only(tmp_path):
    dist = tmp_path / "dist"
    for number, on in enumerate(
        ("manylinux_2_27_x86_64", "manylinux_2_26_aarch64", "manylinux_2_27_aarch64")
    ):
        wheel.publish(tiny(tmp_path / str(number), on).parent, dist)
    assert [path.name.rpartition("-")[2] for path in sorted(dist.glob("*.whl"))] == [
        "manylinux_2_27_aarch64.whl",
        "manylinux_2_27_x86_64.whl",
    ]
    (arm,) = dist.glob("*aarch64.whl")
    assert WheelFile(arm).platform == ARM and WheelFile(arm).tag == "cp311-cp311-manylinux_2_27_aarch64"


def test_the_release_table_has_a_row_a_platform(tmp_path):
    served = publish.cells([tiny(tmp_path, f"manylinux_2_27_{m}") for m in ("aarch64", "x86_64")])
    assert {cell["platform"] for cell in served} == {matrix.NATIVE, ARM}
    rows = publish.table(served).splitlines()[2:]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| cpu", "apex-cuda"],
        ["| sm_90", "apex-cuda"],
        ["| cpu", f"apex-cuda, {ARM}"],
        ["| sm_90", f"apex-cuda, {ARM}"],
    ]
    assert rows[2].endswith("| linked, never loaded |")


# ---- what is said of it ------------------------------------------------------------------------------------


def test_a_run_on_one_platform_says_nothing_of_another():
    run = {"cell": "sm_90", "tier": "L0", "torch": "2.13.0", "python": "cp311", "card": "NVIDIA GH200"}
    on = {platform: run | {"platform": platform} for platform in (matrix.NATIVE, ARM)}

    def grade(known, platform):
        return receipts.grade("sm_90", "2.13", "cp311", known, "built", platform)

    assert (
        grade([run], matrix.NATIVE) == grade([on[ARM]], ARM) == "L0 on NVIDIA GH200"
    )  # old ones say none: x86_64
    assert grade([run, on[matrix.NATIVE]], ARM) == grade([on[ARM]], matrix.NATIVE) == "built"
    assert grade([run | {"tier": "emulated"}], ARM) == "emulated"  # the same code object
    names = {receipts.name(receipt | {"narrowed": ""}) for receipt in on.values()}
    assert len(names) == 2


def test_compat_answers_for_a_platform():
    answer = compat.answer({"torch": "2.13+cu130", "archs": ["sm_90"], "python": "cp311", "system": ARM})
    assert answer["found"] and answer["platform"] == ARM and answer["grades"] == {"sm_90": "built"}
    cpu = compat.answer({"torch": "2.13", "system": ARM})
    assert cpu["grades"] == {"cpu": "linked, never loaded"}
    rocm = compat.answer({"torch": "2.13", "rocm": "7.2", "system": ARM})
    assert rocm["missing"] == [
        "no wheel apex-rocm is built for linux_aarch64: no torch for ROCm is published for aarch64"
    ]
    rows = [line for line in compat.table().splitlines() if ARM in line]
    assert len(rows) == 2 and "L0" not in "".join(rows) and "loaded |" in rows[0]


def test_which_answers_for_a_platform():
    def asked(torch=None, *archs, system=ARM):
        return ask.of_machine(explain.described(torch, archs, python="cp311", system=system))

    found = asked("2.13.0+cu130", "sm_90")
    assert found["found"] and "apex-cuda==" in found["command"]
    rocm = asked("2.13.0+rocm7.2", "gfx942")
    assert not rocm["found"] and rocm["nearest"] == []
    assert "no torch for ROCm is published for aarch64" in rocm["reasons"][0]
    without = asked()
    assert [near["cell"].split(", ")[1] for near in without["nearest"]] == ["cpu", "cu130", "npu"]
    far = asked("2.7.1+cpu")
    assert not far["found"] and far["nearest"] and all("platform" not in n["cell"] for n in far["nearest"])
    other = asked("2.13.0", system="darwin_arm64")
    assert other["reasons"] == [
        "no wheel is built for darwin_arm64; there are linux_x86_64, linux_aarch64, win_amd64"
    ]
