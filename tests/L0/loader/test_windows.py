"""The loader on Windows, of which no Python runs here: names of files, PE files, and that nothing asks for what only
Linux has. What it decides is pure; what it asks of Windows itself only Windows shows."""

import dataclasses
import os
import subprocess
import sys
import types

import pytest

from apex._loader import choose, explain, installed, offers, pe, probe, problems, registry, release, system
from apex._loader.choose import Candidate, Choice
from apex._loader.facts import NOTE, Facts
from apex._loader.fit import fit
from apex._loader.release import EVERY
from build_matrix.errors import ToolchainMissing
from build_matrix.parts import host_library
from build_matrix.store import Store
from build_matrix.toolchains import host_compiler

from .described import ROOT

LINUX, WINDOWS = "linux", system.WINDOWS


# ---- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "linux", "windows"),
    [
        (system.host_library, "libapex.so", "apex.dll"),
        (system.cuda_driver, "libcuda.so.1", "nvcuda.dll"),
        (lambda on: system.torch_library("torch_cpu", on), "libtorch_cpu.so", "torch_cpu.dll"),
        (lambda on: system.pattern("libnvrtc-builtins.so", on), "libnvrtc-builtins.so.*", "nvrtc-builtins*.dll"),
    ],
)  # fmt: skip
def test_files_of_libraries(ask, linux, windows):
    assert (ask(LINUX), ask(WINDOWS)) == (linux, windows)


@pytest.mark.parametrize(
    ("on", "machine", "name", "processor"),
    [
        (LINUX, "x86_64", "linux_x86_64", "x86_64"),
        (LINUX, "aarch64", "linux_aarch64", "aarch64"),
        (WINDOWS, "AMD64", "win_amd64", "x86_64"),
        (WINDOWS, "ARM64", "win_arm64", "aarch64"),
        ("darwin", "arm64", "darwin_arm64", "aarch64"),
    ],
)
def test_machines_are_called_as_wheels_call_them(on, machine, name, processor):
    assert (system.name(on, machine), system.processor(machine)) == (name, processor)


@pytest.mark.parametrize(
    ("file", "stem", "of_it"),
    [
        ("nvrtc64_130_0.dll", "libnvrtc.so", True),
        ("nvrtc64_130_0.alt.dll", "libnvrtc.so", False),
        ("nvrtc-builtins64_130.dll", "libnvrtc.so", False),
        ("amdhip64_7.dll", "libamdhip64.so", True),
        ("amdhip64.dll", "libamdhip64.so", True),
        ("cublasLt64_13.dll", "libcublasLt.so", True),
        ("CUBLASLT64_13.DLL", "libcublasLt.so", True),
        ("cublasLtX64_13.dll", "libcublasLt.so", False),
        ("cublasLt64_13.dll", "libcublas.so", False),
        ("c10.dll", "libc10.so", True),
        ("c10_cuda.dll", "libc10.so", False),
        ("c10.dll.bak", "libc10.so", False),
    ],
)
def test_versions_of_a_library(file, stem, of_it):
    assert system.has_stem(file, stem, WINDOWS) is of_it


def test_the_c_interface_says_the_same_of_linux():
    assert system.has_stem("libamdhip64.so.7", "libamdhip64.so", LINUX)
    assert not system.has_stem("libamdhip64.so7", "libamdhip64.so", LINUX)


# ---- what is asked of the system ---------------------------------------------------------------------------


def test_a_file_is_read_as_it_is():
    """Windows' C library gives text by default: it drops a CR before an LF, and ends at a Ctrl-Z."""
    windows = types.SimpleNamespace(O_RDONLY=0, O_BINARY=0x8000)
    assert system.flags_to_read(windows) == 0x8000
    assert system.flags_to_read() == os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def test_where_no_process_forks_nothing_is_asked_of_a_fork():
    asked = []
    system.in_forked_child(print, types.SimpleNamespace())
    system.in_forked_child(print, types.SimpleNamespace(register_at_fork=lambda **how: asked.append(how)))
    assert asked == [{"after_in_child": print}]


@pytest.mark.parametrize(
    ("has", "level"), [((), 1), ((38,), 2), ((38, 40), 3), ((38, 40, 41), 4), ((41,), 1)]
)
def test_levels_of_a_processor(has, level):
    assert probe.windows_cpu_level(lambda feature: feature in has) == level


def test_a_card_shows_by_the_drivers_library(tmp_path):
    assert probe.cards(tmp_path, WINDOWS) == ()
    (tmp_path / "nvcuda.dll").touch()
    assert probe.cards(tmp_path, WINDOWS) == ("cuda",) and probe.cards(tmp_path, LINUX) == ()


def test_remedies_are_of_the_system():
    assert system.unset("A", "B", platform=LINUX) == "unset A B"
    assert system.unset("A", "B", platform=WINDOWS) == "remove from the environment: A, B"
    assert system.without_other_copies(LINUX) == "unset LD_LIBRARY_PATH LD_PRELOAD"
    assert "PATH" in system.without_other_copies(WINDOWS) and "LD_" not in system.without_other_copies(
        WINDOWS
    )


@pytest.fixture
def described():
    """apex-cuda on a Windows with a card, as the doctor sees it."""
    machine = explain.described(
        "2.13.0+cu130", ["sm_90", "cpu"], driver="580", python="cp311", system="win_amd64"
    )
    offer = offers.offer(machine, release.load())
    return Facts(machine=offer.machine, fit=fit(offer.machine), choices=offer.choices, offer=offer)


def test_the_doctor_sends_nobody_after_another_binding(described):
    (problem,) = problems.find(described)
    assert (problem.severity, problem.name, problem.remedy) == (NOTE, "portable binding", "")
    assert problem.text.startswith(
        "the portable binding serves every torch and Python, as wheels for win_amd64 hold"
    )


def test_a_cache_that_cannot_be_has_no_remedy(described):
    jit = Choice(EVERY, described.machine.devices[0], (Candidate("jit", "jit", True, ""),))
    for refused, remedy in ((system.OWNERLESS, ""), ("", "export APEX_CACHE_DIR=")):
        facts = {"choices": (jit,), "cache_writable": False, "cache_refused": refused}
        found = {p.name: p for p in problems.find(dataclasses.replace(described, **facts))}
        assert found["no cache"].remedy.startswith(remedy) and bool(found["no cache"].remedy) == bool(remedy)


def test_another_cuda_runtime_is_told_by_its_file(described):
    other = dataclasses.replace(described, mapped={"libcudart.so": ("C:/torch/lib/cudart64_12.dll",)})
    found = {problem.name: problem for problem in problems.find(other)}
    assert "CUDA 12 too: C:/torch/lib/cudart64_12.dll" in found["CUDA runtime mismatch"].text


def test_the_processors_level_is_named(described):
    (cpu,) = [device for device in described.machine.devices if device.platform == "cpu"]
    taken = choose.choose(described.machine, EVERY, cpu).taken
    assert (taken.variant, taken.reason) == ("cpu", "x86-64-v3")


# ---- the library's file ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dll():
    try:
        host_compiler.find("win_amd64")
    except ToolchainMissing as error:
        pytest.skip(str(error))
    return Store().build(host_library.build(Store(), platform="win_amd64")).folder / "apex.dll"


def test_a_dll_is_read_without_being_opened(dll):
    file = pe.Pe.read(dll)
    assert "apex_layer_norm_forward" in file.exports() and "KERNEL32.dll" in file.imports()
    assert pe.library_fault(dll, "x86_64") is None
    assert pe.library_fault(dll, "aarch64") == (
        "apex.dll was built for another processor (PE machine 0x8664, this one is aarch64)"
    )


def test_a_dll_that_is_cut_short_is_damaged(dll, tmp_path):
    whole, cut = dll.read_bytes(), tmp_path / "apex.dll"
    assert pe.library_fault(cut) == "apex.dll is not installed"
    for size in (0, 1, 60, 64, 130, 200, 300, 500, 1024, len(whole) // 2, len(whole) - 600):
        cut.write_bytes(whole[:size])
        assert "apex.dll is damaged: " in pe.library_fault(cut, "x86_64"), size
    for at in range(128, 600, 7):  # no other exception, whatever a header says
        cut.write_bytes(whole[:at] + b"\xff" * 8 + whole[at + 8 :])
        try:
            pe.Pe.read(cut).exports()
            pe.Pe.read(cut).imports()
        except pe.NotPe:
            pass


# A Python from which everything is taken that Windows has not, and that has what Windows has: libraries by its names,
# which are Linux's own under them, and kernel32, which tells of two mapped ones.
PROGRAM = """
import ctypes, os, sys
import torch, torch._dynamo
so, opened, linux = sys.argv[1], [], ctypes.CDLL
del os.register_at_fork, os.uname, os.O_NONBLOCK, os.O_CLOEXEC, os.RTLD_NOLOAD
sys.modules["fcntl"] = None
sys.platform = "win32"
names = {1: "/windows/nvrtc64_130_0.dll", 2: "/windows/amdhip64_7.dll"}

class kernel32:
    def GetCurrentProcess(): return 7
    def IsProcessorFeaturePresent(feature): return feature in (38, 40)
    def K32EnumProcessModules(process, modules, size, needed):
        modules[0], modules[1], needed._obj.value = 1, 2, 16
        return process == 7 and size >= 16
    def GetModuleFileNameW(module, path, size):
        path.value = names[module]
        return len(path.value)

def open_library(path, **how):
    opened.append(os.path.basename(path))
    return linux(path.replace("torch_cpu.dll", "libtorch_cpu.so") if "torch_cpu" in path else so)

ctypes.WinDLL, ctypes.CDLL = {"kernel32": kernel32}.__getitem__, open_library
import apex
from apex._loader import bindings, installed, mapped, probe, registry, vendor
from apex._loader.jit import cache
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam
assert cache.fetch("key", lambda: b"made") == b"made" and not cache.usable()
assert mapped.find("libnvrtc.so") == [names[1]] and vendor.find("libamdhip64.so").path == names[2]
assert probe.here().cpu_level == 3 and probe.here().system.startswith("win_")
norm = FusedLayerNorm(8)
step = FusedAdam(norm.parameters(), lr=0.5)
x = torch.arange(8.0, dtype=torch.float32, device="cpu")
norm(x).square().sum().backward()
step.step()
assert torch.equal(norm.weight, torch.full_like(x, 0.5)), norm.weight
print(bindings.load().kind, len(installed.cpu_units()), *sorted(set(opened)))
"""


def test_the_portable_binding_needs_nothing_that_windows_has_not(dll, tmp_path):
    library = tmp_path / "apex/lib/apex.dll"
    library.parent.mkdir(parents=True)
    library.write_bytes(dll.read_bytes())
    environment = os.environ | {"APEX_TREE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    how = {"capture_output": True, "text": True, "env": environment, "timeout": 300, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(installed.library())], **how)
    assert done.returncode == 0, done.stderr
    exported = set(pe.Pe.read(dll).exports())
    units = [u for u in registry.units() if exported & {f"apex_{u}", f"apex_{u}_forward"}]
    assert (
        done.stdout.split() == ["portable", str(len(units)), "apex.dll", "torch_cpu.dll"] and len(units) > 20
    )
