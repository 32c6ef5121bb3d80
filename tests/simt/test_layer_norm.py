"""layer_norm kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import pytest

from simt import norms


@pytest.mark.parametrize("case", norms.CASES, ids=str)
def test_forward(device, case):
    norms.check_forward(device, "layer_norm", case)


@pytest.mark.parametrize("case", norms.CASES, ids=str)
def test_backward(device, case):
    norms.check_backward(device, "layer_norm", case)


# More turns than there are rows in shared memory, and as many for each team: the executor's barriers are the block's.
FORWARD_TEAMS = [
    norms.Case("teams", 56, 1024, "f16", "f16", "f16", grid=1),
    norms.Case("teams", 56, 2048, grid=1),
    norms.Case("teams", 24, 4096, "f16", "f16", "f16", grid=1, affine=False),
    norms.Case("teams", 12, 8192, grid=1),
    norms.Case("teams", 16, 12288, "f16", "f16", "f16", grid=2),
]
BACKWARD_TEAMS = [
    norms.Case("teams", 28, 1024, grid=1),
    norms.Case("teams", 28, 2048, grid=1),
    norms.Case("teams", 28, 4096, grid=2, weight="f32"),
    norms.Case("teams", 7, 8192, "f16", "f16", "f16", grid=1, affine=False),
]


def without_amd(device) -> None:
    """The kernels of rows of known lengths, which the launcher takes on GPUs with a Hopper's shared memory alone."""
    if device.emulated:
        pytest.skip("CUDA alone has these kernels")


@pytest.mark.parametrize("case", FORWARD_TEAMS, ids=str)
def test_forward_by_teams(device, case):
    without_amd(device)
    norms.check_forward(device, "layer_norm", case)


@pytest.mark.parametrize("case", BACKWARD_TEAMS, ids=str)
def test_backward_by_teams(device, case):
    without_amd(device)
    norms.check_backward(device, "layer_norm", case)
