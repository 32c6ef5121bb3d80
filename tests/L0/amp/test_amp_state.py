"""Master weights, checkpoints and parameters that come later."""

from __future__ import annotations

import copy
import io

import amp_runs as runs
import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedAdam

MASTERS = pytest.mark.parametrize("level", ["O2", "O5"])


def start(level, kind="FusedAdam", model=runs.network, **options):
    model = model()
    return runs.initialize(model, runs.OPTIMIZERS[kind](model.parameters()), opt_level=level, **options)


def through_a_file(checkpoint):
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def save(model, optimizer):
    """The public recipe."""
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    return through_a_file(parts)


def load(checkpoint, model, optimizer):
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])


# ---- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", runs.OPTIMIZERS)
@pytest.mark.parametrize("level", runs.LEVELS)
def test_resume_is_bit_exact(level, kind):
    """Initialize, then load; with a growing scale and an overflow on the way."""
    options = dict(loss_scale="dynamic", scale_window=3, dynamic_init_scale=2.0**5)
    model, optimizer = start(level, kind, **options)
    runs.train(model, optimizer, 4)
    runs.overflow(model, optimizer)
    optimizer.step()
    runs.train(model, optimizer, 1, first=4)
    checkpoint = save(model, optimizer)
    losses = runs.train(model, optimizer, 5, first=5)
    expected = runs.values(model) + runs.values(optimizer), amp.state_dict()

    runs.forget()
    other = runs.network(seed=7)
    other, optimizer = runs.initialize(
        other, runs.OPTIMIZERS[kind](other.parameters()), opt_level=level, **options
    )
    load(checkpoint, other, optimizer)
    assert runs.train(other, optimizer, 5, first=5) == losses
    assert runs.equal(runs.values(other) + runs.values(optimizer), expected[0])
    assert amp.state_dict() == expected[1]


def test_amp_state_dict():
    start("O1", num_losses=2)
    saved = amp.state_dict()
    assert saved == {f"loss_scaler{i}": {"loss_scale": 2.0**16, "unskipped": 0} for i in range(2)}
    assert amp.state_dict({"epoch": 3})["epoch"] == 3
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(2)})
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [1.0, 2.0]
    with pytest.warns(amp.AmpWarning, match="holds 1 loss scalers, but num_losses=2"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [8.0, 2.0]
    with pytest.raises(RuntimeError, match="'model'"):
        amp.load_state_dict({"model": {}})


def test_loss_scalers_are_known_by_their_numbers():
    """Not by the order of the dict, which a file may have sorted: loss_scaler10 comes before loss_scaler2."""
    start("O1", num_losses=12)
    saved = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in sorted(range(12), key=str)}
    amp.load_state_dict(saved)
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [2.0**i for i in range(12)]


@pytest.mark.parametrize(
    "saved, error",
    [
        (None, TypeError),
        ([], TypeError),
        ({5: {}}, RuntimeError),
        ({"loss_scaler": {"loss_scale": 1.0, "unskipped": 0}}, RuntimeError),
        *(
            ({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}, "loss_scaler1": wrong}, ValueError)
            for wrong in (
                None,
                5,
                {},
                {"loss_scale": 1.0},
                {"loss_scale": "much", "unskipped": 0},
                {"loss_scale": float("nan"), "unskipped": 0},
                {"loss_scale": 0.0, "unskipped": 0},
                {"loss_scale": 1.0, "unskipped": -1},
            )
        ),
    ],
    ids=str,
)
def test_what_is_no_state_is_refused(saved, error):
    """And changes nothing."""
    start("O1", num_losses=2)
    with pytest.raises(error, match=r"amp.load_state_dict\(checkpoint"):
        amp.load_state_dict(saved)
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [2.0**16] * 2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_master_params_takes_one_optimizer(level):
    model, optimizer = start(level)
    for wrong in ([optimizer], model, None):
        with pytest.raises(TypeError, match=r"(?s)takes one optimizer, not.*for each optimizer"):
            torch.nn.utils.clip_grad_norm_(amp.master_params(wrong), 1.0)


def test_state_before_initialize():
    for call in (amp.state_dict, lambda: amp.load_state_dict({})):
        with pytest.raises(RuntimeError, match=r"(?s)before amp.initialize.*amp.initialize\(model"):
            call()


@MASTERS
def test_a_state_dict_holds_the_masters(level):
    model, optimizer = start(level)
    runs.train(model, optimizer, 2)
    saved = model.state_dict()
    assert {v.dtype for v in saved.values() if v.is_floating_point()} == {torch.float32}
    masters = list(amp.master_params(optimizer))
    for p, (name, _) in zip(masters, model.named_parameters(), strict=True):
        assert torch.equal(saved[name], p)
    assert torch.equal(model[0].state_dict()["weight"], masters[0])  # of a part, too


@MASTERS
def test_a_weight_changed_behind_amps_back_is_saved_as_it_is(level):
    model, optimizer = start(level)
    runs.train(model, optimizer, 1)
    with torch.no_grad():
        model[0].weight[0, 0] = 7.0
    saved, master = model.state_dict()["0.weight"], next(amp.master_params(optimizer))
    assert saved[0, 0] == 7.0 and torch.equal(saved.flatten()[1:], master.flatten()[1:])


@MASTERS
@pytest.mark.parametrize("trained", [False, True])
def test_loading_reaches_the_masters(level, trained):
    model, optimizer = start(level)
    if trained:
        runs.train(model, optimizer, 1)
    weights = runs.network(seed=5).state_dict()
    model.load_state_dict(weights)
    for (name, p), master in zip(model.named_parameters(), amp.master_params(optimizer), strict=True):
        assert torch.equal(master, weights[name]) and torch.equal(p, weights[name].to(p.dtype))
    model[0].load_state_dict(runs.network(seed=6)[0].state_dict())  # a part
    assert torch.equal(next(amp.master_params(optimizer)), runs.network(seed=6)[0].weight)


@MASTERS
def test_masters_are_the_weights_before_the_cast(level):
    expected = runs.values(runs.network())
    _, optimizer = start(level)
    assert runs.equal(runs.values(optimizer), expected)


@MASTERS
def test_masters_follow_what_is_written_before_the_first_pass(level):
    """As in public apex, which makes masters then: initialization by hand, weights that another rank sent."""
    model, optimizer = start(level)
    masters = list(amp.master_params(optimizer))
    first = masters[0].detach().clone()
    model[0].weight.data[0].fill_(0.5)
    with torch.no_grad():
        masters[1].fill_(0.25)  # written itself: stays
    runs.backward(runs.loss_of(model), optimizer)
    assert (
        masters[0][0].eq(0.5).all() and torch.equal(masters[0][1:], first[1:]) and masters[1].eq(0.25).all()
    )
    model[0].weight.data.fill_(1.0)  # too late
    runs.backward(runs.loss_of(model), optimizer)
    assert torch.equal(masters[0][1:], first[1:])


@MASTERS
def test_an_optimizer_that_has_stepped_before(level):
    """Its state goes over to the masters."""
    for kind in ("adam", "FusedAdam", "sgd"):
        runs.forget()
        model = runs.plain()
        optimizer = runs.OPTIMIZERS[kind](model.parameters())
        runs.loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        states = [v.clone() for s in optimizer.state.values() for v in s.values() if v.dim()]
        runs.initialize(model, optimizer, opt_level=level)
        kept = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
        assert runs.equal(kept, states) and set(optimizer.state) == set(amp.master_params(optimizer))
        runs.train(model, optimizer, 1)


def test_states_follow_weights_without_masters():
    model = runs.plain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    runs.loss_of(model).backward()
    optimizer.step()
    runs.initialize(model, optimizer, opt_level="O3")
    assert all(s["momentum_buffer"].dtype == torch.float16 for s in optimizer.state.values())
    runs.train(model, optimizer, 1)


# ---- parameters that come later --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", runs.OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("when", ["at once", "after a step", "between passes"])
def test_add_param_group(level, kind, when):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8, dtype=torch.float32, device="cpu"),
        nn.Tanh(),
        nn.Linear(8, 3, dtype=torch.float32, device="cpu"),
    )
    optimizer = runs.OPTIMIZERS[kind](model[0].parameters())
    runs.initialize(model, optimizer, opt_level=level)
    if when == "after a step":
        runs.train(model, optimizer, 1)
    optimizer.zero_grad()
    if when == "between passes":
        runs.backward(runs.loss_of(model), optimizer)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})
    model[2].zero_grad()
    before = runs.values(model)
    runs.backward(runs.loss_of(model), optimizer)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, runs.values(model), strict=True))
    assert len(list(amp.master_params(optimizer))) == 4
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    for p, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert torch.equal(p, master.to(p.dtype))


@MASTERS
def test_parameters_that_thaw(level):
    model = runs.plain()
    model[0].requires_grad_(False)
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    runs.initialize(model, optimizer, opt_level=level)
    frozen = model[0].weight.detach().clone()
    runs.train(model, optimizer, 2)
    assert torch.equal(model[0].weight, frozen)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # makes new dicts of groups
    model[0].requires_grad_(True)
    runs.train(model, optimizer, 1)
    assert not torch.equal(model[0].weight, frozen)
    for p, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert master.dtype == torch.float32 and torch.equal(p, master.to(p.dtype))


@MASTERS
def test_two_optimizers_over_one_parameter_share_its_master(level):
    model = runs.plain()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(model[0].parameters(), 0.1)]
    runs.initialize(model, optimizers, opt_level=level)
    left, right = (next(amp.master_params(o)) for o in optimizers)
    assert left is right


@MASTERS
def test_tied_weights(level):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6, dtype=torch.float32, device="cpu")
            self.b = nn.Linear(6, 6, dtype=torch.float32, device="cpu")
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))[:, :3]

    model, optimizer = start(level, model=Tied)
    assert model.a.weight is model.b.weight and len(list(amp.master_params(optimizer))) == 3
    runs.train(model, optimizer, 2)
    assert torch.equal(model.state_dict()["a.weight"], model.state_dict()["b.weight"])


@MASTERS
def test_marks_on_parameters_go_to_their_masters(level):
    """Megatron's clipping asks masters for them."""
    model = runs.plain()
    model[0].weight.tensor_model_parallel = True
    _, optimizer = runs.initialize(model, FusedAdam(model.parameters()), opt_level=level)
    assert next(amp.master_params(optimizer)).tensor_model_parallel


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_assigned_state_dicts_are_refused(level):
    """They would replace the parameters, of which the optimizer then knows nothing."""
    model, optimizer = start(level)
    runs.train(model, optimizer, 1)
    state, before = model.state_dict(), runs.values(model)
    with pytest.raises(RuntimeError, match="assign=True(.|\n)*remedy"):
        model.load_state_dict(state, assign=True)
    assert runs.equal(runs.values(model), before)
    model.load_state_dict(state)


def test_clipping_master_gradients():
    from apex.contrib.clip_grad import clip_grad_norm_

    for clip in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
        runs.forget()
        model, optimizer = start("O2")
        runs.backward(runs.loss_of(model), optimizer)
        clip(amp.master_params(optimizer), 0.01)
        norm = torch.stack([p.grad.norm() for p in amp.master_params(optimizer)]).norm()
        assert norm <= 0.01001
        optimizer.step()
