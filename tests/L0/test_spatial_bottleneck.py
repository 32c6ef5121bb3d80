"""SpatialBottleneck and the exchanges of halos: processes on gloo and the CPU."""

from __future__ import annotations

import pytest
import sharded_adam
import spatial_ranks
import torch
from torch_defaults import float32_on_cpu

from apex.contrib.bottleneck import Bottleneck, SpatialBottleneck
from apex.contrib.bottleneck.halo_exchangers import HaloExchangerNoComm, HaloPadder

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


@pytest.fixture(
    scope="module",
    params=["2-cpu", "2-reference", "4-cpu", pytest.param("8-cpu", marks=pytest.mark.minutes)],
)
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    ranks, variant = request.param.split("-")
    folder = tmp_path_factory.mktemp(request.param)
    return sharded_adam.results_of(int(ranks), variant, folder, "spatial_ranks")


@pytest.mark.parametrize("case", spatial_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"


@float32_on_cpu()
def test_one_rank_is_a_bottleneck():
    """Without a group it is one, with its state dict; torch.compile too."""
    torch.manual_seed(0)
    part = SpatialBottleneck(8, 4, 12, stride=2, use_cudnn=True)
    whole = Bottleneck(8, 4, 12, stride=2, use_cudnn=True)
    assert list(part.state_dict()) == list(whole.state_dict())
    whole.load_state_dict(part.state_dict())
    x = torch.randn(2, 8, 6, 5, dtype=torch.float32, device="cpu")
    assert torch.equal(part(x), whole(x))
    assert part.spatial_parallel_args == (1, 0, None, None, 0, False)


@pytest.mark.parametrize("shape", [(), (3,), (3, 3), (1, 2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("nhwc", [False, True])
def test_padders_take_four_dimensions(shape, nhwc):
    with pytest.raises(ValueError, match="y must have 4 dimensions"):
        HaloPadder(HaloExchangerNoComm([0], 0))(
            torch.zeros(shape, dtype=torch.float32, device="cpu"), 1, nhwc, False
        )
