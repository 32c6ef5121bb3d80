"""Small models and runs that the tests of amp share."""

from __future__ import annotations

import torch
from torch import nn

from apex import amp
from apex.amp import amp as registration
from apex.amp._amp_state import _amp_state
from apex.optimizers import CombinedAdam, FusedAdam, FusedSGD

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF = {
    "O1": torch.float16,
    "O2": torch.float16,
    "O3": torch.float16,
    "O4": torch.bfloat16,
    "O5": torch.bfloat16,
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),  # float16 rounds 1e-8 to 0
    "torch fused": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4, fused=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
}
# Each kind of gradient policy: level, optimizer, options of amp.initialize.
POLICIES = {
    "plain": ("O1", OPTIMIZERS["sgd"], {}),
    "masters": ("O2", OPTIMIZERS["sgd"], {}),
    "masters of a fused optimizer": ("O2", OPTIMIZERS["FusedAdam"], {}),
    "scaled model": (
        "O2",
        lambda ps: FusedSGD(ps, lr=0.05, momentum=0.9, materialize_master_grads=False),
        {},
    ),
    "combined": ("O1", OPTIMIZERS["sgd"], dict(combine_grad=True)),
    "combined masters": ("O2", OPTIMIZERS["sgd"], dict(combine_grad=True)),
    "combined optimizer": ("O2", lambda ps: CombinedAdam(ps, lr=0.01), {}),
}


def start(kind, *models, **options):
    """Models and optimizers with this kind of policy, as in a new process: plain(), or these."""
    forget()
    level, make, more = POLICIES[kind]
    found = list(models) or [plain()]
    found, optimizers = initialize(
        found, [make(model.parameters()) for model in found], opt_level=level, **{**more, **options}
    )
    return (found, optimizers) if models else (found[0], optimizers[0])


def forget():
    """As in a new process."""
    registration.unpatch()
    registration._USER_CAST_REGISTRY.clear()
    registration._USER_PROMOTE_REGISTRY.clear()
    vars(_amp_state).clear()
    _amp_state.__init__()


def network(seed=0):
    """(N, 6) -> (N, 3), with a batch norm."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8, dtype=torch.float32, device="cpu"),
        nn.BatchNorm1d(8, dtype=torch.float32, device="cpu"),
        nn.ReLU(),
        nn.Linear(8, 3, dtype=torch.float32, device="cpu"),
    )


def plain(seed=0):
    """(N, 6) -> (N, 3), without norm."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8, dtype=torch.float32, device="cpu"),
        nn.Tanh(),
        nn.Linear(8, 3, dtype=torch.float32, device="cpu"),
    )


def batch(step=0, n=16):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(n, 6, generator=generator, dtype=torch.float32, device="cpu"), torch.randint(
        3, (n,), generator=generator, device="cpu", dtype=torch.int64
    )


def loss_of(model, step=0):
    x, y = batch(step)
    device = next(model.parameters()).device
    return nn.functional.cross_entropy(model(x.to(device)), y.to(device))


def initialize(model, optimizer=None, **options):
    return amp.initialize(model, optimizer, verbosity=0, **options)


def backward(loss, optimizers, **how):
    with amp.scale_loss(loss, optimizers, **how) as scaled_loss:
        scaled_loss.backward()


def train(model, optimizer, steps, first=0):
    """Losses of that many steps."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


def overflow(model, optimizer):
    """A backward pass with an infinite gradient."""
    optimizer.zero_grad()
    backward(loss_of(model) * float("inf"), optimizer)


def values(model_or_optimizer):
    """Copies of parameters: a model's, or what an optimizer updates."""
    if isinstance(model_or_optimizer, nn.Module):
        return [p.detach().clone() for p in model_or_optimizer.parameters()]
    return [p.detach().clone() for p in amp.master_params(model_or_optimizer)]


def equal(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def scaler(index=0):
    return _amp_state.loss_scalers[index]
