"""apex.contrib.sparsity.ASP and optimizers that keep masters, averages or states of their own kinds: training goes on
as without an order of channels, and masters keep the masks."""

from __future__ import annotations

import pytest
import torch
from lists import BF16, F16, F32
from torch import nn

from apex.contrib.openfold_triton.fused_adam_swa import FusedAdamSWA
from apex.contrib.optimizers import FP16_Optimizer
from apex.contrib.optimizers.fused_adam import FusedAdam
from apex.contrib.optimizers.fused_sgd import FusedSGD
from apex.contrib.sparsity import ASP
from tests.torch_defaults import float32_on_cpu

SGD = torch.optim.SGD


pytestmark = pytest.mark.usefixtures("asp_forgotten")


@float32_on_cpu()
def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(dtype)


def averaged(params):
    params = list(params)
    copies = [p.detach().float().clone() for p in params]
    return FusedAdamSWA(
        [p.clone().requires_grad_() for p in copies], params, [p.clone() for p in copies], 0.9, lr=0.01
    )


def wrapped(inner):
    return lambda params: FP16_Optimizer(inner(params, lr=0.01), static_loss_scale=1.0, verbose=False)


MASTERS = {
    "contrib_adam": (wrapped(FusedAdam), F16),
    "contrib_sgd": (wrapped(FusedSGD), F16),
    "contrib_torch": (wrapped(SGD), F16),
    "averages": (averaged, BF16),
}


def batch(dtype):
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(8, 16, dtype=F32, device="cpu", generator=generator).to(dtype)


def train(model, optimizer, x, steps):
    def closure():
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
        return loss

    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def ones(weight):
    return torch.ones_like(weight, dtype=torch.bool)


def prune(model, optimizer, mask="m4n2_1d"):
    ASP.init_model_for_pruning(model, mask, verbosity=0)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MASTERS)
def test_masters_follow_orders_and_masks(name):
    make, dtype = MASTERS[name]
    model, x = network(dtype), batch(dtype)
    optimizer = make(model.parameters())
    train(model, optimizer, x, 2)
    dense = model[0].weight.detach().clone()
    prune(model, optimizer)
    assert not torch.equal(model[0].weight.abs().sum(1), dense.abs().sum(1))
    wanted = model(x)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, x, 1)
    torch.testing.assert_close(model(x), wanted)
    held = [optimizer.param_groups[0]["params"]]
    held += [optimizer.swa_param_groups[0]["params"]] if name == "averages" else []
    for params in held:
        assert all(((p == 0).double().mean() == 0.5).item() for p in params if p.dim() > 1)


OPTIMIZERS = {
    "adam": (torch.optim.Adam, True),
    "adafactor": (torch.optim.Adafactor, True),
    "lbfgs": (lambda params, lr: torch.optim.LBFGS(params, lr=lr, max_iter=3), False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_follow_orders_or_channels_stay(name):
    make, follows = OPTIMIZERS[name]
    found = []
    for reorders in (False, True):
        model, x = network(F32), batch(F32)
        optimizer = make(model.parameters(), lr=0.01)
        train(model, optimizer, x, 3)
        before = model[0].weight.detach().clone()
        if reorders:
            prune(model, optimizer, ones)
            assert torch.equal(model[0].weight, before) == (not follows)
        train(model, optimizer, x, 3)
        found.append(model(x))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


class Foreign(SGD):
    """Updates masters that nobody else knows of."""

    def __init__(self, params):
        self.copies = [(p, p.detach().clone().requires_grad_()) for p in params]
        super().__init__([master for _, master in self.copies], lr=0.0)

    def step(self, closure=None):
        for p, master in self.copies:
            master.grad = p.grad
        super().step(closure)
        for p, master in self.copies:
            p.data.copy_(master)


class Bare:
    """No more than a step()."""

    def __init__(self, params):
        self.params = list(params)

    def step(self):
        pass


class Odd(SGD):
    """A state of another shape than its parameter."""

    def __init__(self, params):
        super().__init__(params, lr=0.0)
        for p in self.param_groups[0]["params"]:
            self.state[p]["flat"] = torch.zeros(p.numel() + 1, dtype=F32, device="cpu")


@pytest.mark.parametrize(
    "make, why",
    [(Foreign, "masters of it that are not known"), (Bare, "no param_groups"), (Odd, "another shape")],
)
def test_what_cannot_be_followed_stays(make, why):
    model, x = network(F32), batch(F32)
    optimizer = make(model.parameters())
    wanted = model(x)
    with pytest.warns(UserWarning, match=f"some channels are not reordered.*{why}"):
        prune(model, optimizer, ones)
    model(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=0)


def test_a_gradient_that_cannot_be_reordered_keeps_its_channels():
    model = nn.Sequential(
        nn.Embedding(16, 32, sparse=True, dtype=F32, device="cpu"), nn.Linear(32, 16, dtype=F32, device="cpu")
    )
    model(torch.tensor([[1, 2]], dtype=torch.int64, device="cpu")).sum().backward()
    with pytest.warns(UserWarning, match="layout torch.sparse_coo"):
        prune(model, SGD(model.parameters(), lr=0.1), ones)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_shards_and_shards_of_states(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        kinds = {
            True: lambda params: ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.01),
            False: lambda params: DistributedFusedAdam(params, lr=0.01),
        }
        for follows, make in kinds.items():
            found = []
            for reorders in (False, True):
                ASP.reset()
                model, x = network(F32), batch(F32)
                optimizer = make(model.parameters())
                train(model, optimizer, x, 2)
                before = model[0].weight.detach().clone()
                if reorders and follows:
                    prune(model, optimizer, ones)
                elif reorders:
                    with pytest.warns(UserWarning, match="in shards"):
                        prune(model, optimizer, ones)
                assert torch.equal(model[0].weight, before) != (reorders and follows)
                train(model, optimizer, x, 2)
                found.append(model(x))
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    finally:
        torch.distributed.destroy_process_group()
