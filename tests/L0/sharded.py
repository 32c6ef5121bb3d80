"""What each rank of test_fused_sharded.py runs: optimizers over parameters that FSDP2 shards, on gloo."""

from __future__ import annotations

import copy
import functools

import torch
from sharded_adam import _check_same, _models, _train
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from apex.optimizers import (
    FusedAdagrad,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

SGD = dict(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1)
NOVOGRAD = dict(lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1)
LARS = dict(lr=0.5, momentum=0.9, weight_decay=0.1, trust_coefficient=0.1)


def _parity(mesh, kind, oracle, **options):
    """The same as a process alone: torch's optimizer, or the fused one on whole parameters."""
    sharded, whole = _models(mesh)
    optimizer = kind(sharded.parameters(), **options)
    options.pop("capturable", None)
    other = oracle(whole.parameters(), **options)
    _train(sharded, optimizer, range(5))
    _train(whole, other, range(5))
    _check_same(sharded, whole, 2e-6)
    for p in sharded.parameters():
        for name in optimizer.state_names:
            state = optimizer.state[p][name]
            assert isinstance(state, DTensor) and state.placements == p.placements
    return optimizer


def _clipped_by_all_norms(mesh):
    """One norm of what is spread over the ranks and of what every rank holds whole."""
    _, whole = _models(mesh)
    partly = copy.deepcopy(whole)
    fully_shard(partly[2], mesh=mesh)
    for model in (partly, whole):
        _train(model, FusedLAMB(model.parameters(), max_grad_norm=0.01, eps=1e-3, **LAMB), range(3))
    for p, q in zip(partly.parameters(), whole.parameters(), strict=True):
        found = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(found, q, rtol=2e-6, atol=2e-6)


def _counted(mesh, **options):
    optimizer = _parity(mesh, FusedNovoGrad, FusedNovoGrad, **NOVOGRAD, **options)
    assert int(optimizer.param_groups[0]["step"]) == 5


def _norms_are_the_whole_tensors(mesh):
    """Also on a rank that holds no element of one."""
    sharded, whole = _models(mesh)
    optimizer = FusedNovoGrad(sharded.parameters(), lr=0.0)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    for model in (sharded, whole):
        model(x).square().mean().backward()
    optimizer.step()
    expected = torch.stack([p.grad.norm() for p in whole.parameters()])
    torch.testing.assert_close(optimizer.param_groups[0]["exp_avg_sq"][1], expected)


def _resume(mesh):
    sharded, _ = _models(mesh)
    optimizer = FusedNovoGrad(sharded.parameters(), **NOVOGRAD)
    _train(sharded, optimizer, range(5))
    again, _ = _models(mesh)
    first = FusedNovoGrad(again.parameters(), **NOVOGRAD)
    _train(again, first, range(3))
    resumed = FusedNovoGrad(again.parameters(), **NOVOGRAD)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    _train(again, resumed, range(3, 5))
    for p, q in zip(sharded.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


def _skipped(mesh):
    """A flag on the device stops everything, the step count on a rank without elements too."""
    sharded, whole = _models(mesh)
    for optimizer in (
        FusedSGD(sharded.parameters(), **SGD),
        FusedLARS(sharded.parameters(), **LARS),
        FusedNovoGrad(sharded.parameters(), capturable=True, **NOVOGRAD),
    ):
        optimizer.found_inf = torch.ones(1, dtype=torch.float32, device="cpu")
        _train(sharded, optimizer, range(1))
        _check_same(sharded, whole, 0)
        assert int(optimizer.param_groups[0].get("step", 0)) == 0


def _unscaled(mesh):
    """Where step() undoes the scale, shards of gradients are left without it."""
    for kind, options in ((FusedSGD, SGD), (FusedLARS, LARS), (FusedNovoGrad, NOVOGRAD), (FusedAdagrad, {})):
        sharded, _ = _models(mesh)
        optimizer = kind(sharded.parameters(), **options)
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
        sharded(x).square().mean().backward()
        expected = [p.grad.to_local() / 8 for p in sharded.parameters()]
        optimizer.grad_scale = torch.tensor(8.0, dtype=torch.float32, device="cpu")
        optimizer.step()
        for p, value in zip(sharded.parameters(), expected, strict=True):
            assert torch.equal(p.grad.to_local(), value)


def _missing_gradients(mesh):
    """Norms stay with their parameters when one gets no gradient."""
    sharded, whole = _models(mesh)
    pairs = [
        kind(m.parameters(), **NOVOGRAD) for m, kind in ((sharded, FusedNovoGrad), (whole, FusedNovoGrad))
    ]
    for seed in range(4):
        x = torch.randn(
            8, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
        )
        for model, optimizer in zip((sharded, whole), pairs, strict=True):
            model(x).square().mean().backward()
            if seed in (0, 2):
                list(model.parameters())[seed].grad = None
            optimizer.step()
            optimizer.zero_grad()
    _check_same(sharded, whole, 2e-6)


def _refused(mesh):
    """Where the norm of a whole tensor is not at hand."""
    sharded, _ = _models(mesh)
    try:
        _train(sharded, FusedMixedPrecisionLamb(sharded.parameters()), range(1))
    except NotImplementedError as error:
        assert "FusedLAMB" in str(error)
    else:
        raise AssertionError("FusedMixedPrecisionLamb stepped on shards")


LAMB = dict(lr=0.05, weight_decay=0.1)

CASES = {
    "lamb": functools.partial(_parity, kind=FusedLAMB, oracle=FusedLAMB, **LAMB),
    "lamb_clipped": functools.partial(_parity, kind=FusedLAMB, oracle=FusedLAMB, max_grad_norm=0.01, **LAMB),
    "lamb_clipped_by_all_norms": _clipped_by_all_norms,
    "mixed_precision_lamb": _refused,
    "sgd": functools.partial(_parity, kind=FusedSGD, oracle=torch.optim.SGD, **SGD),
    "adagrad": functools.partial(_parity, kind=FusedAdagrad, oracle=torch.optim.Adagrad, lr=0.1),
    "lars": functools.partial(_parity, kind=FusedLARS, oracle=FusedLARS, **LARS),
    "novograd": _counted,
    "novograd_maximum": functools.partial(_counted, norm_type=0, init_zero=True),
    "novograd_capturable": functools.partial(_counted, capturable=True),
    "norms_are_the_whole_tensors": _norms_are_the_whole_tensors,
    "resume": _resume,
    "skipped": _skipped,
    "unscaled": _unscaled,
    "missing_gradients": _missing_gradients,
}
