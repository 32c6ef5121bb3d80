"""Tables of what runs where."""

import pytest

from apex._loader import compatibility
from apex._loader.machine import capability, strip_features
from apex._loader.probe import cpu_level


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("550", (12, 4)),
        ("550.54.15", (12, 4)),
        ("R535", (12, 2)),
        ("580.65", (13, 0)),
        ("572", (12, 8)),  # a branch that the table lacks: the next lower one
        ("12.4", (12, 4)),
        ("13", (13, 0)),
    ],
)
def test_driver_to_cuda(text, cuda):
    assert compatibility.cuda_of_driver(text) == cuda


@pytest.mark.parametrize("text", ["", "new", "12.x", "390"])
def test_a_driver_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="driver"):
        compatibility.cuda_of_driver(text)


def test_ptx_versions():
    assert compatibility.ptx_needs((7, 8)) == (11, 8)
    assert compatibility.ptx_needs((9, 0)) == (13, 0)
    assert compatibility.ptx_needs((9, 3)) == (13, 3)  # newer than the table


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("gfx942:sramecc+:xnack-", ("gfx942", ("sramecc+", "xnack-"))),
        ("gfx90a:sramecc+:xnack-", ("gfx90a", ("sramecc+", "xnack-"))),
        ("gfx1100", ("gfx1100", ())),
    ],
)
def test_features_are_stripped(text, stripped):
    assert strip_features(text) == stripped


def test_capability():
    assert (
        capability("sm_103") == (10, 3)
        and capability("compute_80") == (8, 0)
        and capability("gfx942") is None
    )


def test_cpu_levels():
    v2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
    v3 = v2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
    v4 = v3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    assert [cpu_level(flags) for flags in (set(), v2, v3, v4)] == [1, 2, 3, 4]
    assert cpu_level(v4 - {"fma"}) == 2  # a level needs all below it
