"""csrc/host/compat: a library that uses all it is there for reaches manylinux_2_28, and works."""

import ctypes
import math
import resource
import subprocess

import pytest

from . import build
from .test_binary import newest_versions

SOURCE = build.Path(__file__).with_name("compat_check.cpp")


@pytest.fixture(scope="module")
def compat():
    """compat_check.cpp, linked as the libraries of a wheel are."""
    objects = [build.compile_object(SOURCE, [*build.HOST_COMPILE, "-fno-builtin"], build.headers())]
    objects += build.host_objects(sorted((build.HOST / "compat").glob("*.cpp")))
    return build.cached("libcompat.so", objects, [*map(str, objects), *build.HOST_LINK])


def test_versions(compat):
    """None is newer than the policy allows; the same file without the compat sources needs newer ones."""
    assert newest_versions(compat) == {}
    flags = [*build.COMPILE, "-fno-builtin", "-shared", str(SOURCE)]
    assert newest_versions(build.cached("libplain.so", [SOURCE], flags)) != {}


def test_exports_nothing_of_the_standard_library(compat):
    """The copies stay local: another library must not bind to them."""
    names = subprocess.run(["nm", "-D", "--defined-only", str(compat)], capture_output=True, text=True).stdout
    assert {line.split()[-1] for line in names.splitlines()} == {
        f"apex_check_{name}" for name in ("math", "text", "shared", "exceptions", "dl")
    }


def test_works(compat):
    """Mathematics, streams, shared pointers, dl functions."""
    library = ctypes.CDLL(str(compat))
    library.apex_check_math.restype = ctypes.c_double
    library.apex_check_math.argtypes = [ctypes.c_double]
    assert math.isclose(library.apex_check_math(3.0), 12.0)
    assert library.apex_check_text(12345) == 12345
    assert library.apex_check_shared(7) == 8
    assert library.apex_check_dl() == 1


def test_exceptions_are_counted_evenly(compat):
    """Neither leaked nor freed twice."""
    library = ctypes.CDLL(str(compat))
    assert library.apex_check_exceptions(1000) == 1000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert library.apex_check_exceptions(20000) == 20000  # 20 MB if each were leaked
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096
