"""What each rank of test_asp_ranks.py runs, on gloo."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn

from apex.contrib.sparsity import ASP
from apex.contrib.sparsity.permutation_lib import Permutation
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel


def _model(width=32):
    torch.manual_seed(0)
    layers = nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 8)
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model[2].weight[:, ::2] *= 8
    return model


def _everywhere(model):
    """The parameters and masks of both ranks."""
    mine = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    found = [None, None]
    dist.all_gather_object(found, mine)
    return found


def _trained(mesh):
    """Ranks divide the search, get the same orders and masks, and keep both while they train."""
    model = _model()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    ddp = DistributedDataParallel(model)
    ASP.reset()
    ASP.init_model_for_pruning(ddp, verbosity=0)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    assert len(Permutation.get_permutation_stats()[0]) == 2
    one, two = _everywhere(model)
    assert one == two
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(4, 16, dtype=torch.float32, device="cpu")).square().mean().backward()
        optimizer.step()
    one, two = _everywhere(model)
    assert one == two and ASP.is_sparsity_enabled()
    assert ((model[0].weight != 0) == model[0].get_buffer("__weight_mma_mask")).all()


def _different(mesh):
    """Ranks with other models, as of a pipeline, search for themselves."""
    model = _model(32 + 16 * dist.get_rank())
    x = torch.randn(4, 16, dtype=torch.float32, device="cpu")
    wanted = model(x)
    ASP.reset()
    ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True)
    ASP.compute_sparse_masks()
    ASP.restore_pruned_weights()
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-4)
    assert len(Permutation.get_permutation_stats()[0]) == 2


def _stays(model, optimizer=None):
    """What one rank cannot reorder no rank does: weights stay replicas of each other."""
    before = [p.detach().clone() for p in model.parameters()]
    ASP.reset()
    ASP.init_model_for_pruning(model, lambda w: torch.ones_like(w, dtype=torch.bool), verbosity=0)
    if optimizer is not None:
        ASP.init_optimizer_for_pruning(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ASP.compute_sparse_masks()
    for p, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, then)


def _state_on_one_rank(mesh):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        for p in model.parameters():
            optimizer.state[p]["flat"] = torch.zeros(p.numel() + 1, dtype=torch.float32, device="cpu")
    _stays(model, optimizer)


def _hook_on_one_rank(mesh):
    model = _model()
    if dist.get_rank() == 1:
        model[1].register_forward_hook(lambda module, inputs, output: output.flip(1))
        model[3].register_forward_hook(lambda module, inputs, output: output.flip(1))
    _stays(model)


CASES = {
    "trained": _trained,
    "different": _different,
    "state_on_one_rank": _state_on_one_rank,
    "hook_on_one_rank": _hook_on_one_rank,
}
