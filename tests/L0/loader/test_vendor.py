"""The vendor's library that belongs to torch: never a second copy, never an unversioned name."""

import ctypes
import os
import subprocess
import sys

from apex._loader import elf, mapped, vendor

from .described import ROOT

STEM = "libfakehip.so"


def torch_like(shared_library, *, beside=True):
    """A folder like torch/lib whose libtorch_hip.so needs libfakehip.so.7, which lies beside it or not."""
    runtime = shared_library("torch/lib/libfakehip.so.7", "libfakehip.so.7", value=7)
    torch = shared_library("torch/lib/libtorch_hip.so", "libtorch_hip.so", needed=[runtime])
    if not beside:
        runtime.unlink()
    return torch.parent


def test_the_copy_beside_torch(shared_library, tmp_path):
    found = vendor.find(STEM, torch_like(shared_library))
    assert found.path == str(tmp_path / "torch/lib/libfakehip.so.7") and not found.is_mapped


def test_the_folders_that_torch_s_library_searches(shared_library, tmp_path):
    runtime = shared_library("site/nvidia/lib/libfakehip.so.7", "libfakehip.so.7")
    shared_library(
        "site/torch/lib/libcaffe2_nvrtc.so", "libcaffe2_nvrtc.so", [runtime], "$ORIGIN/../../nvidia/lib"
    )
    found = vendor.find(STEM, tmp_path / "site/torch/lib")
    assert os.path.realpath(found.path) == str(runtime)


def test_a_versioned_name_where_the_file_is_elsewhere(shared_library):
    assert vendor.find(STEM, torch_like(shared_library, beside=False)).path == "libfakehip.so.7"


def test_an_unversioned_name_is_never_used(shared_library, tmp_path):
    shared_library("torch/lib/libfakehip.so", "libfakehip.so")  # the developers' name of another copy
    shared_library("torch/lib/libtorch.so", "libtorch.so")
    assert vendor.find(STEM, tmp_path / "torch/lib").path is None
    developers = shared_library("dev/libfakehip.so", "libfakehip.so")
    shared_library("torch/lib/libtorch_hip.so", "libtorch_hip.so", needed=[developers])
    (
        tmp_path / "torch/lib/libfakehip.so"
    ).unlink()  # needed by that name, and not beside torch: the linker's guess
    assert vendor.find(STEM, tmp_path / "torch/lib").path is None


def test_nothing_is_found_with_a_reason(tmp_path):
    found = vendor.find(STEM, tmp_path)
    assert found.path is None and "name none" in found.reason


def in_new_process(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_mapped_copy_wins_and_is_not_loaded_twice(shared_library):
    folder = torch_like(shared_library)
    other = shared_library("opt/rocm/libfakehip.so.6", "libfakehip.so.6", value=6)
    code = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
from apex._loader import vendor, mapped
found = vendor.find("libfakehip.so", sys.argv[2])
library = vendor.open_library(found)
print(found.is_mapped, library.marker(), len(mapped.find("libfakehip.so")))
"""
    assert in_new_process(code, other, folder) == ["True", "6", "1"]


def test_of_two_mapped_copies_torch_s_is_taken(shared_library):
    """Two fake libraries of one soname."""
    folder = torch_like(shared_library)
    other = shared_library("opt/libfakehip.so.7", "libfakehip.so.7", value=666)
    code = """
import ctypes, sys
ctypes.CDLL(sys.argv[1]); ctypes.CDLL(sys.argv[2] + "/libfakehip.so.7")
from apex._loader import vendor, mapped
library = vendor.open_library(vendor.find("libfakehip.so", sys.argv[2]))
print(library.marker(), len(mapped.find("libfakehip.so")))
"""
    assert in_new_process(code, other, folder)[0] == "7"


def test_a_renamed_copy_is_known_by_its_soname(shared_library):
    path = shared_library("libfakehip-3f2a.so", "libfakehip.so.7")
    library = ctypes.CDLL(str(path))
    assert library.marker() == 1
    assert str(path) in mapped.find(STEM)
    assert elf.read_shared_library(path).soname == mapped.soname(str(path))
