"""Which binding fits which torch: reports 5, 6 and 7 of the users."""

import dataclasses

import pytest

from apex._loader import fit
from apex._loader.machine import Binding, Torch

from .described import BINDING, machine


def best(torch, *rows, **facts):
    """The Fit where the portable binding cannot serve."""
    return fit.fit(machine(**{"torch": torch, "bindings": rows, "portable": "no host library", **facts}))


@pytest.mark.parametrize(
    "version",
    [
        "2.10.0+rocm7.0",
        "2.9.1+cpu",
        "2.13.0",
        "2.13.0+cu130",
        "2.13.1+cu126",
        "2.11.0+xpu",
        "2.6.0+cpu.cxx11.abi",
        "2.10.0.post1",
    ],
)
def test_releases(version):
    assert fit.not_a_release(version) is None


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("2.2.0a0+81ea7a4", "pre-release"),  # a vendor container
        ("2.10.0.dev20250924", "pre-release"),
        ("2.10.0.dev20250924+cu130", "pre-release"),
        ("2.10.0rc3", "pre-release"),
        ("2.10.0b1", "pre-release"),
        ("2.10.0+gitabc", "somebody's own build"),
        ("2.9.0+rocm7.0.2.git245bf6ed", "somebody's own build"),
        ("2.8.0+cu128.nv25.08", "somebody's own build"),
        ("two", "cannot be read"),
    ],
)
def test_not_releases(version, why):
    assert why in fit.not_a_release(version)
    minor = ".".join(version.split(".")[:2])
    binding = Binding(minor, "f", f"{minor}.0", "another", "cp311")
    assert not fit.match(Torch(version, "aaaa"), "cp311", binding).library


def test_a_release_fits_by_its_minor():
    for version in ("2.13.0", "2.13.0+cpu", "2.13.2+rocm7.2"):
        assert fit.match(Torch(version, "another"), "cp311", BINDING).module


def test_another_minor_never_fits_and_is_named():
    found = best(Torch("2.14.0", "another"), BINDING)
    assert not found.library and found.reason == "built for torch 2.13, running 2.14.0"


def test_even_an_equal_git_version_needs_the_minor_and_the_abi():
    assert not fit.match(Torch("2.14.0", BINDING.git_version), "cp311", BINDING).library
    old_abi = Torch("2.13.0", BINDING.git_version, cxx11_abi=False)
    found = fit.match(old_abi, "cp311", BINDING)
    assert not found.library and "C++ ABI" in found.reason  # report 6: by name, never in silence


@pytest.mark.parametrize("version", ["2.13.0a0+81ea7a4", "2.13.0.dev20261101", "2.13.0+gitcf30153"])
def test_the_same_build_fits_whatever_it_calls_itself(version):
    assert fit.match(Torch(version, BINDING.git_version), "cp311", BINDING).module


@pytest.mark.parametrize("git", [None, "", "Unknown"])
def test_an_unknown_git_version_proves_nothing(git):
    binding = dataclasses.replace(BINDING, git_version=git)
    assert not fit.match(Torch("2.13.0a0+x", git), "cp311", binding).library


def test_a_release_does_not_fit_a_binding_of_a_nightly():
    nightly = dataclasses.replace(BINDING, built_against="2.13.0.dev20260901", git_version="bbbb")
    assert not fit.match(Torch("2.13.0", "another"), "cp311", nightly).library


@pytest.mark.parametrize("tag", ["cp312", "cp313t", None])
def test_the_python_tag_concerns_the_python_module_only(tag):
    found = fit.match(Torch("2.13.0"), "cp311", dataclasses.replace(BINDING, python=tag))
    assert (found.library, found.module) == (True, False)


def test_the_best_of_several():
    other_python = dataclasses.replace(BINDING, python="cp312")
    assert best(Torch("2.13.0"), other_python, BINDING).binding == BINDING
    assert "no compiled bindings" in best(Torch("2.13.0")).reason


def test_all_minors_are_listed_in_order():
    rows = [dataclasses.replace(BINDING, torch=minor) for minor in ("2.13", "2.8", "2.11")]
    assert best(Torch("2.15.0"), *rows).reason == "built for torch 2.8, 2.11, 2.13, running 2.15.0"


def test_a_machine_without_torch_has_no_fit():
    assert best(None, BINDING) is None


def test_the_portable_binding_serves_where_no_compiled_one_fits():
    assert best(Torch("2.13.0"), BINDING, portable=None).kind == "exact"
    assert best(Torch("2.99.0"), BINDING, portable=None).kind == "portable"
    assert best(Torch("2.99.0"), portable=None).kind == "portable"  # a host library alone is enough
    assert best(Torch("2.7.1"), BINDING, portable=None).kind == "reference"


@pytest.mark.parametrize(
    ("forced", "kind"), [(k, k) for k in ("exact", "portable", "reference")] + [("EXACT", "exact")]
)
def test_apex_binding_takes_away_the_others(forced, kind):
    found = best(Torch("2.13.0"), BINDING, portable=None, env={"APEX_BINDING": forced})
    assert (found.kind, found.reason) == (kind, f"APEX_BINDING={kind}")


def test_what_apex_binding_asks_for_and_is_not_there_has_its_own_reason():
    env = {"APEX_BINDING": "exact"}
    assert (
        best(Torch("2.99.0"), BINDING, portable=None, env=env).reason
        == "built for torch 2.13, running 2.99.0"
    )
    env = {"APEX_BINDING": "portable"}
    assert best(Torch("2.13.0"), BINDING, env=env).kind == "reference"


@pytest.mark.parametrize("portable", [None, "no host library"])
def test_a_build_older_than_its_sources_serves_nothing(portable):
    found = best(Torch("2.13.0"), BINDING, portable=portable, stale="old")
    assert (found.kind, found.stale, found.reason) == ("reference", True, "old")
