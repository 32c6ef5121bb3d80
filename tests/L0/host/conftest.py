"""Fixtures: the host library of this tree, and fake drivers."""

import os
from pathlib import Path

import pytest

from . import build


@pytest.fixture(scope="session")
def library():
    """Path of libapex.so: this tree's, or the one that APEX_LIBRARY names (an installed wheel's, say)."""
    named = os.environ.get("APEX_LIBRARY")
    return Path(named).resolve() if named else build.build_library()


@pytest.fixture(scope="session")
def fakes():
    """Paths of the fake drivers by name."""
    cuda, hip = build.FAKES / "fake_cuda.cpp", build.FAKES / "fake_hip.cpp"
    return {
        "cuda": build.build_shared("libcuda.so.1", cuda),
        "old_cuda": build.build_shared("libcuda.so.1", cuda, ["-DFAKE_BEFORE_CUDA_12"]),
        "hip": build.build_shared("libamdhip64.so.7", hip),
    }
