"""apex.contrib.sparsity.ASP: reordering channels never changes what a model computes; where that is not sure they stay,
and a warning says why."""

from __future__ import annotations

import copy
import pickle
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from lists import F32, F64
from torch import nn
from torch.nn.utils import parametrizations, prune

from apex.contrib.sparsity import ASP
from tests.torch_defaults import float32_on_cpu

pytestmark = pytest.mark.usefixtures("asp_forgotten")


class Model(nn.Module):
    """A forward() that is given, and the modules, parameters and buffers that it uses."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.register_buffer(name, part) if type(part) is torch.Tensor else setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def linear(inputs=16, outputs=32):
    return nn.Linear(inputs, outputs)


def chain(change=lambda first: first, between=None):
    first = linear()
    return nn.Sequential(change(first) or first, between or nn.ReLU(), linear(32, 16))


def hooked(register, hook):
    model = chain()
    getattr(model[1], register)(hook)
    return model


def tied_by_storage(run, outputs):
    model = Model(run, a=linear(16, outputs), b=linear(16, outputs), c=linear(outputs, 16))
    model.b.weight = nn.Parameter(model.a.weight.data)
    return model


def kept(name):
    def run(self, x):
        h = F.relu(self.a(x))
        if name == "list":
            self.found.append(h)
        else:
            setattr(self, name, h)
        return self.c(h)

    model = Model(run, a=linear(), c=linear(32, 16))
    model.found = []
    return model


def own_forward():
    model = chain()
    model[1].forward = lambda x: x.flip(1)
    return model


def numbers(size):
    return torch.arange(float(size), dtype=F32, device="cpu")


FROZEN = {
    "weight_norm": (lambda: chain(parametrizations.weight_norm), "parametrization"),
    "spectral_norm": (lambda: chain(parametrizations.spectral_norm), "parametrization"),
    "orthogonal": (lambda: chain(parametrizations.orthogonal), "parametrization"),
    "old_weight_norm": (lambda: chain(nn.utils.weight_norm), "0 has hooks"),
    "old_spectral_norm": (lambda: chain(nn.utils.spectral_norm), "0 has hooks"),
    "torch_prune": (lambda: chain(lambda m: prune.l1_unstructured(m, "weight", 0.3)), "0 has hooks"),
    "plain_weight": (lambda: chain(plain_weight), "no parameter of its own"),
    "hook": (lambda: hooked("register_forward_hook", lambda m, i, o: o.flip(1)), "1 has hooks"),
    "pre_hook": (lambda: hooked("register_forward_pre_hook", lambda m, i: (i[0] * numbers(32),)), "1 has hooks"),
    "own_forward": (own_forward, r"1 has a forward\(\) of its own"),
    "tied_storage": (lambda: tied_by_storage(lambda m, x: m.c(m.a(x) + m.b(x)), 32), "shares memory"),
    "tied_storage_in_a_row": (lambda: tied_by_storage(lambda m, x: m.c(m.b(m.a(x))), 16), "shares memory"),
    "expanded_buffer": (
        lambda: Model(lambda m, x: m.c(m.a(x) * m.g), a=linear(), c=linear(32, 16),
                      g=torch.tensor(2.0, dtype=F32, device="cpu").expand(32)),
        "g is expanded",
    ),
    "kept_value": (lambda: kept("last"), "kept by forward.. in model.last"),
    "kept_in_a_list": (lambda: kept("list"), "kept by forward.. in model.found"),
    "not_reached": (lambda: Model(lambda m, x: m.c(m.a(x)), a=linear(), c=linear(32, 16), head=linear(32, 8)), "head"),
}  # fmt: skip


def plain_weight(layer):
    weight = layer.weight.detach().clone()
    del layer.weight
    layer.weight = weight


@float32_on_cpu()
def reordered(model, x, run=None):
    """Whether anything was reordered, and what was warned of; asserts that the model computes the same."""
    run = run or (lambda: model(x))
    model.eval()
    wanted, before = run(), {n: p.detach().clone() for n, p in model.state_dict().items()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ASP.init_model_for_pruning(model, lambda w: torch.ones_like(w, dtype=torch.bool), verbosity=0)
        ASP.compute_sparse_masks()
    torch.testing.assert_close(run(), wanted, rtol=1e-5, atol=1e-5)
    after = model.state_dict()
    return any(not torch.equal(after[n], p) for n, p in before.items()), [str(w.message) for w in told]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FROZEN)
@float32_on_cpu()
def test_what_is_not_sure_stays_with_a_warning(name):
    torch.manual_seed(0)
    make, why = FROZEN[name]
    model, x = make(), torch.randn(5, 16, dtype=F32, device="cpu")
    run = (lambda: (model(x), model.last)[1]) if name == "kept_value" else None
    changed, told = reordered(model, x, run)
    assert not changed and len(told) == 1
    with pytest.raises(UserWarning, match=why):
        raise UserWarning(told[0])


class Auxiliary(nn.Module):
    """A head that training alone uses."""

    def __init__(self):
        super().__init__()
        self.a, self.c, self.aux = linear(), linear(32, 16), linear(32, 16)

    def forward(self, x):
        h = F.relu(self.a(x))
        return self.c(h) + self.aux(h) if self.training else self.c(h)


FOLLOWED = {
    "add_other": lambda: Model(
        lambda m, x: m.c(torch.add(m.a(x), other=m.b(x), alpha=2)), a=linear(), b=linear(), c=linear(32, 16)
    ),
    "mul_other": lambda: Model(
        lambda m, x: m.c(m.a(x).mul(other=m.g)), a=linear(), c=linear(32, 16), g=nn.Parameter(numbers(32))
    ),
    "tied_parameter": lambda: tied_by_parameter(),
}


def tied_by_parameter():
    model = Model(
        lambda m, x: m.c(m.a(x)) + m.d(m.b(x)), a=linear(), b=linear(), c=linear(32, 16), d=linear(32, 16)
    )
    model.b.weight = model.a.weight
    return model


@pytest.mark.parametrize("name", FOLLOWED)
@float32_on_cpu()
def test_what_is_followed(name):
    torch.manual_seed(0)
    changed, told = reordered(FOLLOWED[name](), torch.randn(5, 16, dtype=F32, device="cpu"))
    assert changed and not told


def flat(model, x):
    """[batch, 32], of which the number of dimensions is known."""
    return model.a(torch.flatten(model.stem(x), 1))


UNEQUAL = {
    "cat_keyword": lambda m, x: m.c(torch.cat(tensors=[flat(m, x), flat(m, x)], dim=1)[:, :32]),
    "rank_of_a_sum": lambda m, x: m.c(m.norm(flat(m, x) + m.b(m.x3))),
    "rank_of_an_attribute": lambda m, x: m.c(m.norm(flat(m, x) + m.g)),
    "rank_of_an_expanded_attribute": lambda m, x: m.c(m.norm(flat(m, x) + m.row.expand(3, 32, 32))),
    "called_twice": lambda m, x: m.e(F.relu(m.square(F.relu(m.square(x.flatten(1)))))) + m.d(flat(m, x)),
    "from_a_buffer": lambda m, x: m.c(m.norm(flat(m, x))) + m.d(m.b(x.flatten(1)) + m.norm.running_mean * 2),
}


@pytest.mark.parametrize("name", UNEQUAL)
@float32_on_cpu()
def test_what_a_model_computes_stays(name):
    torch.manual_seed(0)
    parts = dict(a=linear(), b=linear(), c=linear(32, 16), d=linear(32, 16), square=linear(16, 16))
    parts |= dict(e=linear(16, 16), norm=nn.BatchNorm1d(32), stem=nn.Conv2d(16, 16, 1))
    parts |= dict(
        g=nn.Parameter(torch.randn(3, 32, 32, dtype=F32, device="cpu")), row=nn.Parameter(numbers(32))
    )
    for tensor in (parts["norm"].running_mean, parts["norm"].weight):
        tensor.data.copy_(numbers(32))
    used = {*UNEQUAL[name].__code__.co_names, *flat.__code__.co_names}
    # Those that forward() does not reach would keep all channels as they are.
    model = Model(UNEQUAL[name], **{part: value for part, value in parts.items() if part in used})
    model.x3 = torch.randn(3, 32, 16, dtype=F32, device="cpu")
    reordered(model, torch.randn(32, 16, 1, 1, dtype=F32, device="cpu"))


@float32_on_cpu()
def test_both_modes_are_followed():
    torch.manual_seed(0)
    model, x = Auxiliary(), torch.randn(5, 16, dtype=F32, device="cpu")
    changed, told = reordered(model, x, lambda: (model.train()(x), model.eval()(x)))
    assert changed and not told and not model.training


class Wrapper(nn.Module):
    """Its `module` is a part of it, and not all that there is."""

    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Embedding(64, 32), linear(32, 32), nn.ReLU(), linear(32, 32))
        self.head = linear(32, 64)
        self.head.weight = self.module[0].weight

    def forward(self, tokens):
        return self.head(self.module(tokens))


@float32_on_cpu()
def test_an_attribute_of_the_name_module():
    torch.manual_seed(0)
    reordered(Wrapper(), torch.randint(64, (3, 7), dtype=torch.int64, device="cpu"))
    ASP.reset()
    model = Model(lambda m, x: m.c(m.a(x)), a=linear(), c=linear(32, 16))
    model.module = None
    assert reordered(model, torch.randn(5, 16, dtype=F32, device="cpu"))[0]


class Remembers(nn.Module):
    """forward() counts, draws numbers, and keeps what it computed."""

    def __init__(self):
        super().__init__()
        self.a, self.c, self.calls, self.last = linear(), linear(32, 16), 0, None
        self.found, self.by_name, self.draws = [], {"old": 1}, torch.zeros((), dtype=F32, device="cpu")
        self.register_buffer("steps", torch.zeros((), dtype=F64, device="cpu"))

    def forward(self, x):
        h = self.a(x)
        self.calls += 1
        self.steps += 1
        self.last = self.by_name["h"] = h
        self.found.append(h)
        self.draws += torch.rand((), dtype=F32, device="cpu") + random.random()
        return self.c(h)


@pytest.mark.filterwarnings("ignore:some channels")
@float32_on_cpu()
def test_tracing_leaves_no_trace():
    model = Remembers()
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate()
    before = {name: copy.copy(value) for name, value in vars(model).items()}
    ASP.init_model_for_pruning(model, verbosity=0)
    ASP.compute_sparse_masks()
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    for name in ("calls", "last", "found", "by_name"):
        assert getattr(model, name) == before[name], name
    assert model.draws == 0 and model.steps == 0 and set(vars(model)) == set(before)
    pickle.dumps(model)
