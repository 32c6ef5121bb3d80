"""Run-time compilation by real NVRTC (from PyPI) and real hipRTC (in the ROCm chroot), without a GPU."""

import collections
import json
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from apex._loader import compatibility, elf, errors, jit, layout, registry
from apex._loader.choose import JitTarget, jit_target
from apex._loader.jit import flags, nvrtc, rtc, sources
from apex._loader.machine import Compiler, capability

from .conftest import STORE, run
from .described import ROOT, gpu, machine, python


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("fixture", ["nvrtc_130", "nvrtc_128"])
def test_nvrtc_says_what_it_knows(request, fixture):
    compiler = nvrtc.describe(request.getfixturevalue(fixture))
    assert compiler.version == ((13, 0) if fixture.endswith("130") else (12, 8))
    assert "sm_90" in compiler.archs
    mine = {arch for arch in compatibility.nvrtc_archs(compiler.version) if capability(arch) >= (7, 0)}
    assert mine == {arch for arch in compiler.archs if capability(arch) >= (7, 0)}  # the table of `explain`


def test_a_compiler_works_in_a_thread_of_its_own():
    """NVRTC 12.3 leaves the locale C to the thread that calls it: files of the process would be read as ASCII."""
    threads = set()

    class Library:
        def __getattr__(self, name):
            return lambda *arguments: threads.add(threading.current_thread()) or 0

    assert rtc.compile(Library(), "nvrtc", "NVRTC", "x.cu", b"", {}, [], "CUBIN") == b""
    assert threads and threading.current_thread() not in threads


def compile_and_check(unit, described, device, compiler):
    target, _ = jit_target(described, device, compiler)
    found = elf.read_code_object(jit.build(unit, target))
    assert (found.kind, found.arch) == (target.kind, target.arch)
    assert found.kernels and all(kernel.startswith(unit) for kernel in found.kernels)
    return found


@pytest.fixture
def kept_cache(cache, monkeypatch):
    """What was compiled from the same sources stays from one run to the next: the cache's keys hold all of it."""
    monkeypatch.setenv("APEX_CACHE_DIR", str(STORE / "jit"))


@pytest.mark.parametrize("unit", registry.units())
@pytest.mark.parametrize("fixture", ["nvrtc_130", "nvrtc_128"])
def test_every_unit_compiles(request, kept_cache, fixture, unit):
    compiler = nvrtc.describe(request.getfixturevalue(fixture))
    compile_and_check(unit, machine(cuda_driver=(13, 0)), gpu("sm_90"), compiler)


@pytest.mark.parametrize(
    ("fixture", "arch", "kind"),
    [
        ("nvrtc_130", "sm_75", "cubin"),
        ("nvrtc_130", "sm_110", "cubin"),
        ("nvrtc_130", "sm_121", "cubin"),
        ("nvrtc_128", "sm_70", "cubin"),
        ("nvrtc_128", "sm_103", "cubin"),  # by sm_100
        ("nvrtc_128", "sm_110", "ptx"),  # a major that it does not know
    ],
)
def test_every_kind_of_target(request, fixture, arch, kind):
    compiler = nvrtc.describe(request.getfixturevalue(fixture))
    found = compile_and_check("multi_tensor_table", machine(cuda_driver=(13, 0)), gpu(arch), compiler)
    assert found.kind == kind


@pytest.mark.parametrize("unit", registry.units())
def test_jit_and_the_packs_compiler_agree_on_arithmetic(nvrtc_130, nvcc, kept_cache, tmp_path, unit):
    """Each kernel has the same floating-point instructions from both, of one toolkit: no fused multiply-add,
    no approximation in one alone. Address arithmetic and schedules may differ (multi_tensor_l2norm's do), and a loop
    may stand once more in one of them (batchnorm_backward's): that has more of some instructions and fewer of none.
    Only a GPU can show equal results; this shows that nothing known stands against them."""
    if "release 13.0, V13.0.88" not in run(nvcc, "--version").stdout:
        pytest.skip("nvcc is not of the toolkit that NVRTC here belongs to (13.0.88)")
    target = JitTarget(nvrtc.describe(nvrtc_130), "ptx", "compute_90")
    out = tmp_path / f"{unit}.ptx"
    source = layout.device_sources() / f"{unit}.cu"
    run(nvcc, "-ptx", "-arch=compute_90", "-O3", "-std=c++17", "--fmad=false", source, "-o", out)
    prebuilt, compiled = arithmetic(out.read_text()), arithmetic(jit.build(unit, target).decode())
    assert prebuilt.keys() == compiled.keys() and prebuilt
    for kernel in prebuilt:
        assert is_repeated(prebuilt[kernel], compiled[kernel]), kernel


def is_repeated(one, other):
    """Whether both have the same kinds of instructions, and one as many or more of each."""
    return one.keys() == other.keys() and (one >= other or one <= other)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"mul": 4, "sub": 4, "fma": 2}, True),
        ({"mul": 6, "sub": 5, "fma": 2}, True),
        ({"mul": 3, "sub": 3, "fma": 3}, False),  # a contraction
        ({"mul": 4, "sub": 4, "fma": 2, "div.approx": 1}, False),
    ],
)
def test_a_contraction_is_no_repetition(other, same):
    one = collections.Counter(mul=4, sub=4, fma=2)
    other = collections.Counter(other)
    assert is_repeated(one, other) == is_repeated(other, one) == same


def arithmetic(ptx):
    """kernel -> Counter of its instructions on f16, bf16, f32 and f64 values.

    Without additions, which stand twice where one compiler alone splits a loop: what is contracted to a fused
    multiply-add shows in the multiplications too.
    """
    found = {}
    for part in re.split(r"\.entry\s+", ptx)[1:]:
        name = re.match(r"[\w$]+", part)[0]
        instructions = re.findall(
            r"^\s+(?:@!?%p\d+ )?([a-z0-9]+\.[a-z0-9._]*(?:f16|f32|f64)[a-z0-9.]*)", part, re.M
        )
        found[name] = collections.Counter(
            i for i in instructions if not i.startswith(("ld.", "st.", "mov.", "selp.", "add."))
        )
    return found


def test_the_second_time_comes_from_the_cache(nvrtc_130, monkeypatch):
    target = JitTarget(nvrtc.describe(nvrtc_130), "cubin", "sm_90")
    unit = registry.units()[-1]
    first = jit.build(unit, target)
    monkeypatch.setattr(nvrtc, "compile", lambda *a: pytest.fail("compiled again"))
    assert jit.build(unit, target) == first


def test_a_changed_header_compiles_again(nvrtc_130, tmp_path, monkeypatch):
    folder = tmp_path / "device"
    shutil.copytree(layout.device_sources(), folder)
    monkeypatch.setattr(layout, "device_sources", lambda: folder)
    unit = "multi_tensor_table"
    before = sources.digest(*sources.read(unit))
    with open(folder / "gpu.h", "a") as file:
        file.write("// changed\n")
    assert sources.digest(*sources.read(unit)) != before


def test_a_source_that_does_not_compile(nvrtc_130, tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text('#include "absent.h"\n')
    monkeypatch.setattr(layout, "device_sources", lambda: tmp_path)
    with pytest.raises(errors.CompileError, match="NVRTC 13.0 cannot compile broken.cu") as caught:
        jit.build("broken", JitTarget(nvrtc.describe(nvrtc_130), "cubin", "sm_90"))
    assert "absent.h" in caught.value.found and "--gpu-architecture=sm_90" in caught.value.wanted


def test_headers_come_from_memory_only(nvrtc_130, tmp_path, monkeypatch):
    """A header of the same name in the current folder is not what is included."""
    device = tmp_path / "device"
    device.mkdir()
    (device / "mine.h").write_text("#define VALUE 1\n")
    (device / "one.cu").write_text(
        '#include "mine.h"\nextern "C" __global__ void one(int* p) { *p = VALUE; }\n'
    )
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "mine.h").write_text("#error wrong header\n")
    monkeypatch.chdir(trap)
    monkeypatch.setattr(layout, "device_sources", lambda: device)
    image = jit.build("one", JitTarget(nvrtc.describe(nvrtc_130), "cubin", "sm_90"))
    assert elf.read_code_object(image).kernels == ("one",)


def test_contraction_is_off_everywhere():
    nvidia = flags.options(JitTarget(Compiler("cuda", (13, 0)), "cubin", "sm_90"))
    amd = flags.options(JitTarget(Compiler("rocm", (7, 2)), "hsaco", "gfx942"))
    generic = flags.options(JitTarget(Compiler("rocm", (7, 2)), "hsaco", "gfx11-generic"))
    assert "--fmad=false" in nvidia and "-ffp-contract=off" in amd
    assert "-mcode-object-version=5" in amd and "-mcode-object-version=6" in generic


def test_a_cpu_torch_has_no_compiler():
    code = """
from apex._loader import jit
from apex._loader.machine import Torch
print(len(jit.Compilers(Torch("2.13.0+cpu"))), jit.Absent(Torch("2.13.0+cpu"))["cuda"])
print(jit.Absent(Torch("2.13.0+cu130", cuda="13.0"))["cuda"])
"""
    lines = python(code).stdout.splitlines()
    assert lines[0] == "0 this torch is not built for CUDA"
    assert "no libnvrtc.so is mapped" in lines[1]


def test_nvrtc_that_torch_s_package_holds(nvrtc_130, shared_library, tmp_path):
    """A folder like a CUDA torch's: its library needs libnvrtc.so.13, found in the folder it searches."""
    library = shared_library(
        "torch/lib/libcaffe2_nvrtc.so", "libcaffe2_nvrtc.so", [nvrtc_130], nvrtc_130.rsplit("/", 1)[0]
    )
    code = f"""
from apex._loader import vendor
vendor.torch_folder = lambda: __import__("pathlib").Path({str(library.parent)!r})
from apex._loader import jit
from apex._loader.machine import Torch
print([c.version for c in jit.Compilers(Torch("2.13.0+cu130", cuda="13.0"))])
"""
    assert python(code).stdout.strip() == "[(13, 0)]"


HIPRTC = """
import json, os, sys
sys.path.insert(0, "/apex_test")
os.environ["APEX_CACHE_DIR"] = "/var/cache/apex_tests"  # stays: its keys hold all that goes in
from apex._loader import elf, errors, jit
from apex._loader.choose import JitTarget
from apex._loader.jit import hiprtc
from apex._loader.machine import Compiler
unit, arch = sys.argv[1:]
compiler = Compiler("rocm", (7, 2), None, "libhiprtc.so.7")
try:
    o = elf.read_code_object(jit.build(unit, JitTarget(compiler, "hsaco", arch)))
    print(json.dumps([o.kind, o.arch, o.version, len(o.kernels)]))
except errors.CompileError as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def in_the_chroot(rocm_root):
    """(unit, arch) -> what hipRTC makes of it: in the chroot, because its libraries want a newer C library than this
    system may have."""
    if not (rocm_root / "usr/bin/python3").exists():
        pytest.skip("no Python in the ROCm toolchain's root")
    with tempfile.TemporaryDirectory(prefix="apex_test-", dir=rocm_root / "tmp") as place:
        folder = Path(place)
        shutil.copytree(ROOT / "apex", folder / "apex", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(layout.device_sources(), folder / "apex" / "device", dirs_exist_ok=True)
        shutil.copy(layout.schemas(), folder / "apex" / "ops.schemas")
        code = HIPRTC.replace("/apex_test", f"/tmp/{folder.name}", 1)

        def compile(unit, arch):
            command = ["chroot", str(rocm_root), "/usr/bin/python3", "-B", "-c", code, unit, arch]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        yield compile


OTHERS = ("gfx90a", "gfx950", "gfx1100", "gfx1201", "gfx9-4-generic")


@pytest.mark.parametrize(
    ("unit", "arch"),
    [*((unit, "gfx942") for unit in registry.units()), *(("multi_tensor_table", arch) for arch in OTHERS)],
)
def test_hiprtc_compiles(in_the_chroot, unit, arch):
    facts = in_the_chroot(unit, arch)
    assert not isinstance(facts, str), facts
    kind, found, version, kernels = facts
    assert (kind, found, version) == ("hsaco", arch, 6 if arch.endswith("generic") else 5) and kernels


def test_hiprtc_says_why_not(in_the_chroot):
    said = in_the_chroot(registry.units()[0], "gfx9999")
    assert isinstance(said, str) and "hipRTC of ROCm 7.2 cannot compile" in said
