"""apex.contrib.sparsity.ASP: bad input raises before anything changes, and an error leaves nothing behind."""

from __future__ import annotations

import functools

import pytest
import torch
from lists import F32
from torch import nn

from apex.contrib.sparsity import ASP, create_mask
from apex.contrib.sparsity import permutation_lib as permutation
from apex.contrib.sparsity._spaces import Site
from tests.torch_defaults import float32_on_cpu

pytestmark = pytest.mark.usefixtures("asp_forgotten")


@float32_on_cpu()
def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


def step(model, optimizer):
    x = torch.randn(8, 16, dtype=F32, device="cpu", generator=torch.Generator("cpu").manual_seed(0))
    model(x).square().mean().backward()
    optimizer.step()


def everything(model, optimizer):
    """A copy of all that a computation of masks may change."""
    tensors = dict(model.state_dict())
    for number, p in enumerate(model.parameters()):
        states = {"grad": p.grad, **optimizer.state.get(p, {})}
        tensors |= {f"{number} {name}": t for name, t in states.items() if torch.is_tensor(t)}
    return {name: t.detach().clone() for name, t in tensors.items()}


def raises(count, error=ValueError):
    """A mask function that raises when it is called for the count-th time."""
    calls = []

    def mask(weight):
        calls.append(weight)
        if len(calls) == count:
            raise error("of its own")
        return create_mask(weight).bool()

    return mask


def full(value, weight):
    return torch.full(weight.shape, value, dtype=F32, device="cpu")


WRONG = {
    "raises": (lambda: raises(2), ValueError, "of its own"),
    "interrupted": (lambda: raises(2, KeyboardInterrupt), KeyboardInterrupt, "of its own"),
    "one_row": (lambda: lambda w: torch.ones(w.shape[1], dtype=torch.bool, device="cpu"), ValueError, "has the shape"),
    "no_tensor": (lambda: lambda w: "x", TypeError, "not str"),
    "half": (lambda: functools.partial(full, 0.5), ValueError, "other values than 0 and 1"),
    "nan": (lambda: functools.partial(full, float("nan")), ValueError, "other values than 0 and 1"),
}  # fmt: skip


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("name", WRONG)
def test_a_mask_function_that_fails_changes_nothing(name, again):
    make, error, text = WRONG[name]
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer)
    calculate = [create_mask if again else make()]
    ASP.init_model_for_pruning(model, lambda w: calculate[0](w), verbosity=0, allow_recompute_mask=True)
    ASP.init_optimizer_for_pruning(optimizer)
    if again:
        ASP.compute_sparse_masks()
        calculate[0] = make()
    before = everything(model, optimizer)
    with pytest.raises(error, match=text):
        ASP.compute_sparse_masks()
    after = everything(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before) and ASP.is_sparsity_enabled() == again
    calculate[0] = create_mask
    ASP.compute_sparse_masks()
    assert ASP.is_sparsity_enabled()


def test_orders_that_fail_halfway_are_taken_back(monkeypatch):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer)
    ASP.init_model_for_pruning(model, verbosity=0)
    ASP.init_optimizer_for_pruning(optimizer)
    before = everything(model, optimizer)
    own, calls = Site.permute, []

    def permute(site, tensor, order):
        calls.append(tensor)
        if len(calls) == 8:
            raise MemoryError
        own(site, tensor, order)

    monkeypatch.setattr(Site, "permute", permute)
    with pytest.raises(MemoryError):
        ASP.compute_sparse_masks()
    assert all(torch.equal(before[key], t) for key, t in everything(model, optimizer).items())


def test_a_graph_that_cannot_be_saved_changes_nothing(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True)
    ASP.compute_sparse_masks()
    before = everything(model, optimizer)
    ASP.set_permutation_saving_params(True, True, str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="no directory .*set_permutation_saving_params"):
        ASP.compute_sparse_masks()
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "model_graph_apply_offline_permutation.json").mkdir()  # the last one fails
    ASP.set_permutation_saving_params(True, True, str(tmp_path / "file"))
    with pytest.raises(OSError):
        ASP.compute_sparse_masks()
    assert all(torch.equal(before[key], t) for key, t in everything(model, optimizer).items())


def test_a_pipe_that_breaks_finds_all_done(monkeypatch):
    model = network()
    ASP.init_model_for_pruning(model, verbosity=0, allow_permutation=False)

    def broken(*args):
        raise BrokenPipeError

    ASP._state.verbosity = 2
    monkeypatch.setattr("builtins.print", broken)
    with pytest.raises(BrokenPipeError):
        ASP.compute_sparse_masks()
    assert ASP.is_sparsity_enabled() and (model[0].weight == 0).double().mean() == 0.5


def test_what_saving_says_lasts_until_reset():
    ASP.set_permutation_saving_params(allow_permutation=False)
    ASP.init_model_for_pruning(network(), verbosity=0)
    assert not ASP._state.allow_permutation
    ASP.reset()
    ASP.init_model_for_pruning(network(), verbosity=0)
    assert ASP._state.allow_permutation and not permutation.Permutation._Permutation__save_permutation_graph


class Odd(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.odd = nn.Module()
        self.odd.weight = nn.Parameter(weight)

    def forward(self, x):
        return self.last(self.first(x))


def values(*shape):
    return torch.randn(*shape, dtype=F32, device="cpu")


ODD = {
    "complex": (lambda: values(8, 16).to(torch.complex64), TypeError, "odd.weight: it is torch.complex64"),
    "float8": (
        lambda: values(8, 16).to(torch.float8_e4m3fn),
        TypeError,
        "float8_e4m3fn, which is not pruned",
    ),
    "expanded": (lambda: values(1, 16).expand(8, 16), TypeError, "is expanded"),
    "inference": (lambda: values(8, 16), TypeError, "inference_mode"),
    "meta": (lambda: values(8, 16).to("meta"), TypeError, "meta device"),
    "six_dimensions": (lambda: values(8, 16, 1, 1, 1, 1), ValueError, "1 to 5 dimensions"),
}


@pytest.mark.filterwarnings("ignore:some channels")
@pytest.mark.parametrize("name", ODD)
@float32_on_cpu()
def test_a_weight_that_cannot_be_pruned_spoils_no_other(name):
    make, error, text = ODD[name]
    with torch.inference_mode(name == "inference"):  # where alone such a parameter can be made
        model = Odd(make())
    before = [p.detach().clone() for p in (*model.first.parameters(), *model.last.parameters())]
    ASP.init_model_for_pruning(
        model, verbosity=0, custom_layer_dict={nn.Module: ["weight"]}, whitelist=[nn.Linear]
    )
    with pytest.raises(error, match=text):
        ASP.compute_sparse_masks()
    after = (*model.first.parameters(), *model.last.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_inference_mode_makes_usable_masks():
    model = network()
    with torch.inference_mode():
        ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True)
    ASP.compute_sparse_masks()
    ASP.restore_pruned_weights()


def test_the_recipe_takes_itself_back():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in (None, object()):
        with pytest.raises(TypeError, match="has none"):
            ASP.prune_trained_model(model, wrong)
    with torch.no_grad():
        model[2].weight = nn.Parameter(model[2].weight[:1].expand(16, 32))
    with pytest.raises(TypeError, match="is expanded"):
        ASP.prune_trained_model(model, optimizer)
    assert not ASP.already_init_asp_model() and not list(model.buffers()) and "step" not in vars(optimizer)
    ASP.init_model_for_pruning(model, verbosity=0)
    with pytest.raises(TypeError, match="has none"):
        ASP.init_optimizer_for_pruning(object())
    ASP.init_optimizer_for_pruning(optimizer)


@pytest.mark.parametrize(
    "options, error, text",
    [
        (dict(mask_calculator=None), TypeError, "pattern's name or a function"),
        (dict(mask_calculator=5), TypeError, "not 5"),
        (dict(whitelist=nn.Linear), TypeError, "whitelist is a list"),
        (dict(custom_layer_dict={"Linear": ["weight"]}), TypeError, "types of layers"),
        (dict(custom_layer_dict={nn.Linear: "weight"}), TypeError, "list of names"),
        (
            dict(custom_layer_dict={nn.Linear: ["wieght"]}),
            ValueError,
            "no parameter 'wieght'; they have bias",
        ),
        (dict(allowed_layer_names="2"), TypeError, "list of names"),
        (dict(allowed_layer_names=["fc"]), ValueError, "no module 'fc'"),
        (dict(disallowed_layer_names=["fc"]), ValueError, "no module 'fc'"),
        (dict(model=None), TypeError, "not NoneType"),
        (dict(model=[]), TypeError, "not list"),
    ],
)
def test_arguments_that_are_none(options, error, text):
    options = {"model": network(), **options}
    with pytest.raises(error, match=text):
        ASP.init_model_for_pruning(verbosity=0, **options)
    assert not ASP.already_init_asp_model()
    assert options["model"] is None or options["model"] == [] or not list(options["model"].buffers())


def test_names_may_come_from_an_iterator():
    model = network()
    ASP.init_model_for_pruning(model, verbosity=0, disallowed_layer_names=(name for name in ["2", "0"]))
    assert not list(model.buffers())
    ASP.reset()
    ASP.init_model_for_pruning(model, verbosity=0, allowed_layer_names=(name for name in ["0", "2"]))
    assert len(list(model.buffers())) == 2


def test_infinities_are_masked_and_come_back():
    inf = float("inf")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model[0].weight[0] = inf
        model[2].weight[0, 0] = inf
    dense = [model[i].weight.detach().clone() for i in (0, 2)]
    ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True, allow_permutation=False)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    assert (model[0].weight[0] == 0).sum() == 8
    for i in (0, 2):
        model[i].weight.grad = torch.full(model[i].weight.shape, inf, dtype=F32, device="cpu")
        model[i].weight.grad.masked_fill_(model[i].get_buffer("__weight_mma_mask"), 0)
    optimizer.step()
    assert not any(model[i].weight.isnan().any() for i in (0, 2))
    ASP.restore_pruned_weights()
    assert all(torch.equal(model[i].weight, w) for i, w in zip((0, 2), dense, strict=True))


def test_arguments_of_step_keep_their_places():
    class Takes(torch.optim.SGD):
        def step(self, closure=None, scale=None):
            self.got = closure, scale
            return super().step(closure)

    model = network()
    optimizer = Takes(model.parameters(), lr=0.1)
    ASP.init_model_for_pruning(model, verbosity=0, allow_permutation=False)
    ASP.init_optimizer_for_pruning(optimizer)
    optimizer.step(None, 2.0)
    assert optimizer.got == (None, 2.0)
    optimizer.step(scale=3.0)
    assert optimizer.got == (None, 3.0) and optimizer.step(lambda: 5) == 5


def test_an_order_names_each_channel_once():
    model = network()
    weights = [("2", model[2], "weight", model[2].weight)]
    masks = [(*weights[0], torch.ones(16, 32, dtype=torch.bool, device="cpu"), None)]
    permutation.Permutation.set_permutation_params_from_asp(model, masks, weights)
    before = model[2].weight.detach().clone()
    for order in ([0] * 16, [99] * 16, [1, 2, 3, 4]):
        for apply in ("C", "K"):
            with pytest.raises(ValueError, match="each channel from 0"):
                getattr(permutation.Permutation, f"apply_permutation_in_{apply}_dim")("2", order)
    assert torch.equal(model[2].weight, before)
