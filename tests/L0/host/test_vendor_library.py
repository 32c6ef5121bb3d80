"""Which copy of a vendor's library is found: fake HIP runtimes of one soname, told apart by what they say."""

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from . import build
from .apex_library import ARGUMENT, HIP, NO_DRIVER, OK, Apex
from .fresh_process import fresh_process

STEM = "libamdhip64.so"


@pytest.fixture(scope="module", autouse=True)
def scene(tmp_path_factory):
    """Folders with copies of the runtime and with torch libraries that need one; APEX_SCENE holds the path.

    decoy/   an unversioned and a versioned runtime, on the search path of every test here
    other/   a runtime of the same soname
    beside/  torch, and its runtime beside it
    runpath/ torch, and its runtime in sdk/lib, which torch's RUNPATH names
    bare/    torch alone: the system's loader must find libamdhip64.so.7
    plain/   torch that needs an unversioned libamdhip64.so, which is not there
    """
    scene = tmp_path_factory.mktemp("scene")

    def copy(folder, name=f"{STEM}.7", soname=None):
        (scene / folder).mkdir(parents=True, exist_ok=True)
        flags = [f'-DFAKE_NAME="{folder}/{name}"']
        made = build.build_shared(name, build.FAKES / "fake_hip.cpp", flags, soname)
        return shutil.copy(made, scene / folder / name)

    def torch(folder, runtime, *flags, name="libtorch_hip.so"):
        (scene / folder).mkdir(parents=True, exist_ok=True)
        source = scene / "torch.cpp"
        source.write_text("")
        made = build.build_shared(name, source, ["-Wl,--no-as-needed", str(runtime), *flags])
        shutil.copy(made, scene / folder / name)

    versioned = copy("decoy")
    copy("decoy", STEM)
    copy("other")
    torch("beside", copy("beside"))
    (scene / "beside" / "libtorch_broken.so").write_text("not an ELF file")
    (scene / "beside" / "libtorch_short.so").write_bytes(b"\x7fELF\x02\x01" + b"\xff" * 200)
    copy("runpath/sdk/lib")
    torch("runpath/torch", versioned, "-Wl,-rpath,$ORIGIN/nowhere:$ORIGIN/../sdk/lib")
    torch("bare", versioned)
    torch("plain", scene / "decoy" / STEM)
    source = scene / "torch.cpp"
    shutil.copy(build.build_shared("libc10.so", source), scene / "beside" / "libc10.so")
    for name in ("libamdhip64_extra.so.7", "libamdhip64.so7"):  # not of the stem
        (scene / "alike").mkdir(exist_ok=True)
        shutil.copy(build.build_shared(name, source), scene / "alike" / name)
    # A file name that says nothing: the soname counts.
    (scene / "renamed").mkdir()
    shutil.copy(copy("renamed-source"), scene / "renamed" / "runtime.so")
    os.environ["APEX_SCENE"] = str(scene)
    yield scene
    del os.environ["APEX_SCENE"]


def place(folder=""):
    return Path(os.environ["APEX_SCENE"]) / folder


def hint(apex: Apex, folder):
    assert apex.c.apex_set_vendor_hint(str(place(folder)).encode()) == OK


def opened(apex):
    """Which copy the library opened."""
    status, info = apex.device_info(HIP, 0)
    assert status == OK, apex.last_error
    return info.arch.decode()


def mapped_copies():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if STEM in line}


@fresh_process(search="decoy")
def test_the_mapped_copy_wins(apex):
    """Over torch's folder and over the search path; nothing else is mapped."""
    ctypes.CDLL(str(place("other") / f"{STEM}.7"))
    hint(apex, "beside")
    assert apex.find_vendor_library(STEM) == (OK, str(place("other") / f"{STEM}.7"))
    assert opened(apex) == "other/libamdhip64.so.7"
    assert mapped_copies() == {str(place("other") / f"{STEM}.7")}


@fresh_process(search="decoy")
def test_of_two_mapped_copies_torchs(apex):
    """Two copies of one soname in the process: the one that torch's libraries name, in whatever spelling."""
    for folder in ("other", "runpath/sdk/lib"):
        ctypes.CDLL(str(place(folder) / f"{STEM}.7"))
    hint(apex, "runpath/torch")
    assert opened(apex) == "runpath/sdk/lib/libamdhip64.so.7"


@fresh_process(search="decoy")
def test_soname_counts_not_the_file_name(apex):
    """A bundled copy may have any file name."""
    ctypes.CDLL(str(place("renamed") / "runtime.so"))
    assert opened(apex) == "renamed-source/libamdhip64.so.7"


@fresh_process(search="decoy")
def test_beside_torch(apex):
    """None mapped: the copy beside the torch libraries that need it; broken files there do no harm."""
    hint(apex, "beside")
    assert apex.find_vendor_library(STEM) == (OK, str(place("beside") / f"{STEM}.7"))
    assert mapped_copies() == set()
    assert opened(apex) == "beside/libamdhip64.so.7"


@fresh_process(search="decoy")
def test_torch_folder_is_that_of_the_mapped_c10(apex):
    """Without a hint."""
    ctypes.CDLL(str(place("beside") / "libc10.so"))
    assert opened(apex) == "beside/libamdhip64.so.7"


@fresh_process(search="decoy")
def test_runpath_of_torch(apex):
    """None beside: where the torch library's own RUNPATH leads."""
    hint(apex, "runpath/torch")
    assert opened(apex) == "runpath/sdk/lib/libamdhip64.so.7"


@fresh_process(search="decoy")
def test_versioned_name_that_only_the_loader_finds(apex):
    """A torch over a system ROCm: the name with its version, as torch itself would be served."""
    hint(apex, "bare")
    assert apex.find_vendor_library(STEM) == (OK, f"{STEM}.7")
    assert opened(apex) == "decoy/libamdhip64.so.7"


@fresh_process(search="decoy")
def test_never_an_unversioned_name(apex):
    """It is on the search path, and torch even needs it by that name, but not beside torch: not taken."""
    hint(apex, "plain")
    status, _ = apex.device_info(HIP, 0)
    assert status == NO_DRIVER
    assert "need none" in apex.last_error and str(place("plain")) in apex.last_error
    assert mapped_copies() == set()


@fresh_process(search="decoy")
def test_nothing_known(apex):
    """No torch, nothing mapped; a later hint mends it."""
    assert apex.find_vendor_library(STEM) == (NO_DRIVER, "")
    assert apex.last_error == f"no {STEM} is mapped in this process, and torch's folder is not known"
    assert apex.device_info(HIP, 0)[0] == NO_DRIVER
    hint(apex, "nowhere")
    assert apex.device_info(HIP, 0)[0] == NO_DRIVER
    hint(apex, "beside")
    assert opened(apex) == "beside/libamdhip64.so.7"


@fresh_process(search="decoy")
def test_names_that_only_begin_alike(apex):
    """libamdhip64_extra.so.7 and libamdhip64.so7 are other libraries."""
    for path in sorted(place("alike").iterdir()):
        ctypes.CDLL(str(path))
    assert apex.find_vendor_library(STEM)[0] == NO_DRIVER


@fresh_process()
def test_any_stem(apex):
    """The same rule for any library; too little room and missing arguments are said."""
    status, path = apex.find_vendor_library("libc.so")
    assert status == OK and Path(path).name.startswith("libc.so.6")
    assert apex.find_vendor_library("libc.so", room=4)[0] == ARGUMENT
    assert str(len(path) + 1) in apex.last_error
    assert apex.find_vendor_library("")[0] == ARGUMENT
