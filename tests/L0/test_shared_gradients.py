"""Gradients that lie in the same memory, as autograd makes them: whoever writes them writes each once."""

from __future__ import annotations

import pytest
import torch
from added_views import Net, apart, assert_same
from test_optimizer_tensors import OPTIMIZERS, plans  # noqa: F401  a fixture

from apex import _gradients
from apex._loader import bindings
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.optimizers import FP16_Optimizer as ContribFP16Optimizer
from apex.fp16_utils import FP16_Optimizer
from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel.LARC import LARC

F32 = torch.float32


def test_autograd_makes_them():
    net = Net()
    net().backward()
    assert net.position.grad.data_ptr() == net.token.grad.data_ptr()
    assert net.a.grad.data_ptr() == net.b.grad.data_ptr()


def trained(name, shared, to_none, many_groups):
    net = Net()
    params = list(net.parameters())
    optimizer = OPTIMIZERS[name]([{"params": [p]} for p in params] if many_groups else params)
    for step in range(3):
        if shared:
            optimizer.zero_grad(set_to_none=to_none)
        else:
            net.zero_grad(set_to_none=True)
        net(1.0 + step).backward()
        if not shared:
            apart(params)
        optimizer.step()
    return params


@pytest.mark.parametrize("many_groups", [False, True], ids=["one group", "groups"])
@pytest.mark.parametrize("to_none", [False, True], ids=["zeroed", "dropped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(plans, name, to_none, many_groups):  # noqa: F811
    """LAMB leaves updates in gradients; to gradients that zero_grad() zeroed in place autograd adds."""
    found, expected = (trained(name, shared, to_none, many_groups) for shared in (True, False))
    assert_same(found, expected, rtol=0, atol=0)


def test_the_default_zero_grad_of_sgd():
    found, expected = Net(), Net()
    for net, optimizer in ((found, FusedSGD(found.parameters(), lr=0.1)),
                           (expected, torch.optim.SGD(expected.parameters(), lr=0.1))):  # fmt: skip
        for _ in range(3):
            optimizer.zero_grad()
            net().backward()
            optimizer.step()
    assert_same(found.parameters(), expected.parameters())


SCALED = [
    name for name in OPTIMIZERS if name in ("SGD", "SGD, momentum", "Adam, capturable", "Adagrad", "LARS")
]


@pytest.mark.parametrize("name", SCALED)
def test_unscaled_by_a_step(plans, name):  # noqa: F811
    net = Net()
    optimizer = OPTIMIZERS[name]([{"params": [p]} for p in net.parameters()])
    net().backward()
    expected = [p.grad / 8 for p in net.parameters()]
    optimizer.grad_scale = torch.tensor(8.0, dtype=F32, device="cpu")
    optimizer.found_inf = torch.tensor(0.0, dtype=F32, device="cpu")
    optimizer.step()
    assert_same([p.grad for p in net.parameters()], expected)


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 3.0])
@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.bfloat16], ids=str)
def test_clipping(dtype, norm_type):
    net, twin = Net(dtype), Net(dtype)
    for module in (net, twin):
        module().backward()
    apart(twin.parameters())
    norm = clip_grad_norm_(net.parameters(), 0.1, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1, norm_type)
    torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-2, atol=0)
    assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [F32, torch.float16], ids=str)
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("held", [False, True], ids=["at once", "held back"])
def test_fp16_optimizer(dtype, to_none, held):
    nets = Net(dtype), Net(dtype)
    for net in nets:
        optimizer = FP16_Optimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), static_loss_scale=8.0, verbose=False
        )
        if net is nets[1]:
            for p in net.parameters():
                p.register_hook(lambda grad: grad.clone())
        for _ in range(2):
            optimizer.zero_grad(set_grads_to_None=to_none)
            for last in (False, True):
                optimizer.backward(net(), update_master_grads=last or not held)
            optimizer.step()
    assert_same(nets[0].parameters(), nets[1].parameters(), rtol=0, atol=0)


def test_contrib_fp16_optimizer():
    nets = Net(torch.float16), Net(torch.float16)
    for net in nets:
        optimizer = ContribFP16Optimizer(FusedAdam(net.parameters(), lr=0.1), static_loss_scale=8.0)
        for _ in range(3):
            optimizer.zero_grad(set_grads_to_None=net is nets[1])
            optimizer.backward(net())
            optimizer.step()
    assert_same(nets[0].parameters(), nets[1].parameters(), rtol=0, atol=0)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_larc(decay):
    nets = Net(), Net()
    for net in nets:
        groups = [{"params": [p]} for p in net.parameters()]
        optimizer = LARC(torch.optim.SGD(groups, lr=0.1, weight_decay=decay))
        net().backward()
        if net is nets[1]:
            apart(net.parameters())
        optimizer.step()
    assert_same(nets[0].parameters(), nets[1].parameters(), rtol=0, atol=0)


# ---- what is separated -----------------------------------------------------------------------------------


@pytest.fixture(params=["bindings", "no bindings"])
def separate(request, monkeypatch):
    if request.param == "no bindings":
        monkeypatch.setattr(_gradients.bindings, "load", lambda: bindings.Loaded(False, None, "left out"))
    elif bindings.load().module is None:
        pytest.skip("no binding fits this torch")
    return _gradients.separate_gradients


def owners_of(*gradients):
    owners = [torch.nn.Parameter(torch.empty_like(g)) for g in gradients]
    for owner, gradient in zip(owners, gradients, strict=True):
        owner.grad = gradient
    return owners


def test_which_are_copied(separate):
    flat = torch.arange(24, dtype=F32, device="cpu")
    gradients = [
        flat[:4], flat[4:8], flat[6:10], flat[8:12], flat[8:12].view(2, 2), flat[16:24:2], flat[17:18],
        torch._neg_view(flat[20:22]), flat[24:], torch.ones(3, dtype=F32, device="cpu"),
    ]  # fmt: skip
    owners = owners_of(*gradients)
    values = [g.clone() for g in gradients]
    bystander = torch.nn.Parameter(torch.zeros(2, dtype=F32, device="cpu"))
    separate([bystander, *owners, *owners])
    assert bystander.grad is None
    copied = [i for i, (owner, g) in enumerate(zip(owners, gradients, strict=True)) if owner.grad is not g]
    assert copied[0] == 2 and 0 not in copied and 1 not in copied and 8 not in copied and 9 not in copied
    for owner, value in zip(owners, values, strict=True):
        torch.testing.assert_close(owner.grad, value, rtol=0, atol=0)
    for i, owner in enumerate(owners):  # each is written alone
        owner.grad.fill_(-1.0 - i)
    for i, owner in enumerate(owners):
        assert (owner.grad == -1.0 - i).all(), i


def test_flat_buffers_stay_where_they_are(separate):
    flat = torch.zeros(12, dtype=F32, device="cpu")
    gradients = [flat[8:12], flat[0:4].view(2, 2), flat[4:8]]
    owners = owners_of(*gradients)
    separate(owners)
    assert all(owner.grad is g for owner, g in zip(owners, gradients, strict=True))


def test_what_has_no_memory_to_share(separate):
    owners = [torch.nn.Parameter(torch.ones(2, 2, dtype=F32, device="cpu")) for _ in range(4)]
    owners[0].grad = owners[0].detach().clone().to_sparse()
    owners[1].grad = torch._efficientzerotensor((2, 2), dtype=F32, device="cpu")
    meta = torch.nn.Parameter(torch.empty(2, dtype=F32, device="meta"))
    meta.grad = torch.empty(2, dtype=F32, device="meta")
    kept = [p.grad for p in (*owners, meta)]
    separate([*owners, meta])
    assert all(p.grad is grad for p, grad in zip((*owners, meta), kept, strict=True))
