"""amp.initialize(combine_grad=True): the same numbers bit for bit, flat buffers, aliases that broke, misuse."""

from __future__ import annotations

import copy
import warnings

import amp_runs as runs
import pytest
import torch
from torch import nn

import apex.optimizers
from apex import amp
from apex.contrib.combine_tensors import get_aligned_storage_size, is_combined_tensor_valid

LEVELS = ("O1", "O2", "O4", "O5")
MASTERS = ("O2", "O5")


def start(level="O2", make=runs.OPTIMIZERS["sgd"], model=None, **options):
    model = model or runs.network()
    return runs.initialize(model, make(model.parameters()), opt_level=level, **options)


def both(script, level="O2", name="sgd", **options):
    """What `script(model, optimizer)` returns, and the weights, without and with combined gradients."""
    found = []
    for combine in (None, True):
        runs.forget()
        model, optimizer = start(level, runs.OPTIMIZERS[name], combine_grad=combine, **options)
        found.append((script(model, optimizer), runs.values(model), runs.values(optimizer)))
    assert optimizer._amp_stash.combined.parts  # it did combine
    return found


def assert_same(found):
    (a, weights, masters), (b, others, other_masters) = found
    assert a == b
    assert runs.equal(weights, others) and runs.equal(masters, other_masters)


def combined(optimizer):
    return optimizer._amp_stash.combined


# ---- the same numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 1.0, 128.0])
@pytest.mark.parametrize("name", runs.OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_bit_for_bit(level, name, scale):
    assert_same(both(lambda model, optimizer: runs.train(model, optimizer, 4), level, name, loss_scale=scale))


@pytest.mark.parametrize(
    "name", ["FusedAdagrad", "FusedLAMB", "FusedLARS", "FusedMixedPrecisionLamb", "FusedNovoGrad"]
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_fused_optimizer(level, name):
    """Some leave their updates in the gradients; a skipped step among the others."""
    found = []
    for combine in (None, True):
        runs.forget()
        make = getattr(apex.optimizers, name)
        model, optimizer = start(level, lambda params, make=make: make(params, lr=0.01), combine_grad=combine)
        losses = runs.train(model, optimizer, 3)
        runs.overflow(model, optimizer)
        optimizer.step()
        losses += runs.train(model, optimizer, 2, first=4)
        found.append((losses, runs.values(model), runs.values(optimizer)))
    assert_same(found)


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("level", LEVELS)
def test_accumulated_gradients(level, scale):
    """Two passes a step; and steps without zero_grad."""

    def script(model, optimizer):
        losses = []
        for step in range(6):
            if step % 2 == 0 and step < 4:
                optimizer.zero_grad()
            loss = runs.loss_of(model, step)
            runs.backward(loss, optimizer)
            if step % 2 or step > 3:
                optimizer.step()
            losses.append(loss.item())
        return losses

    assert_same(both(script, level, loss_scale=scale))


@pytest.mark.parametrize("level", LEVELS)
def test_a_delayed_pass(level):
    def script(model, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            runs.backward(runs.loss_of(model, step), optimizer, delay_unscale=True)
            runs.backward(runs.loss_of(model, step + 1), optimizer)
            optimizer.step()

    assert_same(both(script, level, loss_scale=64.0))


@pytest.mark.parametrize("name", ["sgd", "FusedAdam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_and_growth(level, name):
    def script(model, optimizer):
        scales = []
        for step in range(6):
            if step in (0, 3):
                runs.overflow(model, optimizer)
                optimizer.step()
            else:
                runs.train(model, optimizer, 1, first=step)
            scales.append(runs.scaler().loss_scale())
        return scales

    found = both(
        script,
        level,
        name,
        scale_window=2,
        scale_growth_factor=4.0,
        scale_backoff_factor=0.25,
        loss_scale="dynamic",
    )
    assert_same(found)
    assert found[0][0] == [2.0**k for k in (14, 14, 16, 14, 14, 16)]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_several_losses(level):
    def script(model, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            for loss_id in (0, 1):
                runs.backward(runs.loss_of(model, step + loss_id), optimizer, loss_id=loss_id)
            optimizer.step()

    assert_same(both(script, level, num_losses=2))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_several_optimizers(level):
    """Each has its own buffers; a loss that overflows skips the steps of those that it was for."""
    found = []
    for combine in (None, True):
        runs.forget()
        models = [runs.network(0), runs.plain(1)]
        first, second = (
            runs.OPTIMIZERS[name](model.parameters())
            for name, model in zip(("sgd", "FusedAdam"), models, strict=True)
        )
        runs.initialize(models, [first, second], opt_level=level, combine_grad=combine, num_losses=2)
        for step in range(4):
            first.zero_grad()
            second.zero_grad()
            runs.backward(runs.loss_of(models[0], step), first, loss_id=0)
            both_losses = runs.loss_of(models[0], step + 1) + runs.loss_of(models[1], step)
            factor = float("inf") if step == 2 else 1.0
            runs.backward(both_losses * factor, [first, second], loss_id=1)
            first.step()
            second.step()
        found.append([*runs.values(models[0]), *runs.values(models[1])])
    assert runs.equal(*found)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_added_group(level):
    def script(model, optimizer):
        runs.train(model, optimizer, 2)
        head = nn.Linear(3, 3, dtype=torch.float32, device="cpu").to(model[0].weight.dtype)
        with torch.no_grad():
            for p in head.parameters():
                p.fill_(0.1)
        optimizer.add_param_group(dict(params=list(head.parameters()), lr=0.2))
        whole = nn.Sequential(model, head)
        inputs, _ = runs.batch()
        for _ in range(2):
            optimizer.zero_grad()
            runs.backward(head(model(inputs).to(head.weight.dtype)).float().square().mean(), optimizer)
            optimizer.step()
        return [p.sum().item() for p in whole.parameters()]

    assert_same(both(script, level, loss_scale=8.0))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_parameter_that_joins_late(level):
    """Without a gradient it is left out; with its first one the buffers are made anew, in the middle of a sum."""

    def script(model, optimizer):
        for step in range(4):
            model.deep = step > 1
            if step != 3:
                optimizer.zero_grad()
            runs.backward(runs.loss_of(model, step), optimizer)
            optimizer.step()

    found = []
    for combine in (None, True):
        runs.forget()
        torch.manual_seed(0)
        model, optimizer = start(level, model=Deepening(), combine_grad=combine, loss_scale=8.0)
        found.append((script(model, optimizer), runs.values(model), runs.values(optimizer)))
    assert_same(found)
    assert sum(len(part.owners) for part in combined(optimizer).parts) == 4


class Deepening(nn.Module):
    """Skips its middle while `deep` is False."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(6, 8, dtype=torch.float32, device="cpu"),
            nn.Linear(8, 8, bias=False, dtype=torch.float32, device="cpu"),
            nn.Linear(8, 3, bias=False, dtype=torch.float32, device="cpu"),
        )
        self.deep = False

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(self.middle(x) if self.deep else x)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_pass_that_raises(level):
    def script(model, optimizer):
        runs.train(model, optimizer, 2)
        runs.backward(runs.loss_of(model), optimizer)  # on top of what is there
        with pytest.raises(KeyError), amp.scale_loss(runs.loss_of(model), optimizer) as loss:
            loss.backward()
            raise KeyError
        optimizer.step()

    assert_same(both(script, level, loss_scale=8.0))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_plain_pass_after_zero_grad(level):
    """Gradients from outside of scale_loss are kept as they are: a buffer that was written is not taken for zero."""

    def script(model, optimizer):
        runs.train(model, optimizer, 2)
        optimizer.zero_grad()
        for p in amp.master_params(optimizer):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            p.grad.add_(0.25)
        runs.backward(runs.loss_of(model), optimizer)
        optimizer.step()

    assert_same(both(script, level, loss_scale=8.0))


def test_resume_is_bit_exact():
    model, optimizer = start("O2", runs.OPTIMIZERS["FusedAdam"], combine_grad=True)
    runs.train(model, optimizer, 3)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    expected = runs.train(model, optimizer, 3, first=3)
    runs.forget()
    again, other = start("O2", runs.OPTIMIZERS["FusedAdam"], combine_grad=True)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    assert runs.train(again, other, 3, first=3) == expected
    assert runs.equal(runs.values(again), runs.values(model))


# ---- the buffers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_combined(level):
    model, optimizer = start(level, combine_grad=True)
    assert optimizer.get_model_combined_grads() == []
    runs.train(model, optimizer, 1)
    half, full = runs.HALF[level], torch.float32
    params = list(model.parameters())
    if level in MASTERS:
        dtypes = [[half, full], [full, full]]
        lists = [[p for p in params if p.dtype == half], [p for p in params if p.dtype == full]]
    else:
        dtypes, lists = [[full], [full]], [params]
    found = [optimizer.get_model_combined_grads(), optimizer.get_optimizer_combined_grads()]
    assert [[f.dtype for f in flats] for flats in found] == dtypes
    for flat, members in zip(found[0], lists, strict=True):
        assert flat.numel() == sum(map(get_aligned_storage_size, members))
        assert is_combined_tensor_valid(flat, [p.grad for p in members])
    masters = [p.grad for p in amp.master_params(optimizer) if p not in set(params)]
    assert is_combined_tensor_valid(found[1][0], masters) if level in MASTERS else masters == []
    assert optimizer.get_optimizer_combined_params() == optimizer.get_model_combined_params() == []


def test_masks_tell_gradients_from_gaps():
    model, optimizer = start("O1", combine_grad=True)
    runs.backward(runs.loss_of(model), optimizer)
    (flat,), (mask,) = optimizer.get_model_combined_grads(), optimizer.get_model_combined_grad_masks()
    assert mask.sum() == sum(p.numel() for p in model.parameters()) and mask.dtype == flat.dtype
    assert flat[mask == 0].eq(0).all()
    total = sum(p.grad.double().sum() for p in model.parameters())
    assert torch.allclose((flat * mask).double().sum(), total)
    assert [m.dtype for m in optimizer.get_optimizer_combined_grad_masks()] == [torch.float32]


def test_parameters_without_gradients_stay_out():
    model = runs.network()
    model[0].weight.requires_grad_(False)
    model, optimizer = start("O2", model=model, combine_grad=True)
    runs.train(model, optimizer, 2)
    assert model[0].weight.grad is None
    assert all(p is not model[0].weight for part in combined(optimizer).parts for p in part.sources)


def test_zero_grad_is_in_place():
    model, optimizer = start("O1", combine_grad=True)
    runs.train(model, optimizer, 1)
    for set_to_none in (None, True, False):
        runs.backward(runs.loss_of(model), optimizer)
        optimizer.zero_grad() if set_to_none is None else optimizer.zero_grad(set_to_none=set_to_none)
        assert all(p.grad is not None and p.grad.eq(0).all() for p in model.parameters())


def test_masters_gradients_are_spent_by_a_step():
    model, optimizer = start("O2", combine_grad=True)
    runs.backward(runs.loss_of(model), optimizer)
    masters, full = optimizer.get_optimizer_combined_grads()
    assert masters.any()
    optimizer.step()
    assert not masters.any() and full.any()


# ---- clipping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [1, 2, 3, float("inf")])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_is_torchs(level, norm):
    model, optimizer = start(level, combine_grad=True, loss_scale=16.0)
    for limit in (0.1, 100.0):
        optimizer.zero_grad()
        runs.backward(runs.loss_of(model), optimizer)
        params = list(amp.master_params(optimizer))
        twins = [nn.Parameter(p.detach().clone()) for p in params]
        for p, twin in zip(params, twins, strict=True):
            twin.grad = p.grad.clone()
        expected = nn.utils.clip_grad_norm_(twins, limit, norm)
        found = optimizer.clip_optimizer_grad_norm_fused(limit, norm)
        torch.testing.assert_close(found, expected)
        for p, twin in zip(params, twins, strict=True):
            torch.testing.assert_close(p.grad, twin.grad)
        optimizer.step()


def test_clipping_the_models_gradients():
    model, optimizer = start("O1", combine_grad=True)
    assert optimizer.clip_model_grad_norm_fused(1.0).item() == 0.0  # nothing yet
    runs.backward(runs.loss_of(model), optimizer)
    norm = optimizer.clip_model_grad_norm_fused(0.01)
    assert norm > 0.01
    assert torch.stack([p.grad.norm() for p in model.parameters()]).norm().item() == pytest.approx(
        0.01, rel=1e-3
    )
    runs.forget()
    _, optimizer = start("O2", combine_grad=True)
    with pytest.raises(RuntimeError, match="clip_optimizer_grad_norm_fused"):
        optimizer.clip_model_grad_norm_fused(1.0)


# ---- aliases that broke ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_set_to_none_are_zero(level):
    """model.zero_grad() is as good as optimizer.zero_grad(), and nothing is said."""

    def script(model, optimizer):
        for step in range(4):
            model.zero_grad()
            runs.backward(runs.loss_of(model, step), optimizer)
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error", amp.AmpWarning)
        assert_same(both(script, level, loss_scale=8.0))


REPLACE = {
    "new tensor": lambda p: setattr(p, "grad", p.grad.clone() * 2),
    ".data": lambda p: setattr(p.grad, "data", p.grad.clone() * 2),
}


@pytest.mark.parametrize("check", [None, True])
@pytest.mark.parametrize("how", REPLACE)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_replaced_gradients(level, how, check):
    """Between two passes that add up. What replaced them counts; it is reported."""

    def script(model, optimizer):
        runs.train(model, optimizer, 2)
        optimizer.zero_grad()
        runs.backward(runs.loss_of(model, 0), optimizer)
        REPLACE[how](list(amp.master_params(optimizer))[2])
        runs.backward(runs.loss_of(model, 1), optimizer)
        optimizer.step()

    with pytest.warns(
        amp.AmpWarning,
        match="combined tensors were destroyed and are recombined: at scale_loss, the gradient",
    ):
        found = both(script, level, loss_scale=8.0, check_combined_tensors=check)
    assert_same(found)


CASTS = {
    "all": lambda model: model.double().float(),
    "one layer": lambda model: model[0].double().float(),
}


@pytest.mark.parametrize("there_and_back", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("name", ["sgd", "FusedSGD"])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_model_that_was_cast_there_and_back(level, name, there_and_back):
    """It replaces the .data of parameters and of gradients, which stay the same objects."""

    def script(model, optimizer):
        runs.train(model, optimizer, 2)
        there_and_back(model)
        runs.train(model, optimizer, 3)

    with pytest.warns(amp.AmpWarning, match=r"at zero_grad\(\), the gradient"):
        assert_same(both(script, level, name, loss_scale=8.0))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_model_that_was_cast_is_refused(level):
    model, optimizer = start(level, combine_grad=True, loss_scale=8.0)
    runs.train(model, optimizer, 2)
    model.double()
    with (
        pytest.raises(amp.AmpUsageError, match=r"gradient was torch.float32, .* and is torch.float64"),
        amp.scale_loss(next(model.parameters()).sum(), optimizer),
    ):
        pass


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_replaced_by_the_pass_itself(level):
    """create_graph=True lets autograd make new ones."""

    def script(model, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(runs.loss_of(model, step), optimizer) as loss:
                loss.backward(create_graph=step > 0)
            optimizer.step()

    with pytest.warns(amp.AmpWarning, match="at the end of a backward pass"):
        assert_same(both(script, level, loss_scale=8.0))


def test_replaced_gradients_before_a_step_are_seen_with_check():
    model, optimizer = start("O1", combine_grad=True, check_combined_tensors=True, loss_scale=8.0)
    runs.train(model, optimizer, 1)
    optimizer.zero_grad()
    runs.backward(runs.loss_of(model), optimizer)
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    before = model[0].weight.detach().clone()
    optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.warns(amp.AmpWarning, match=r"at step\(\).*group 0"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)
    (flat,) = optimizer.get_model_combined_grads()
    assert is_combined_tensor_valid(flat, [p.grad for p in model.parameters()])


def test_check_without_combining_says_so(capsys):
    model = runs.network()
    amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", check_combined_tensors=True
    )
    assert "check_combined_tensors has no effect" in capsys.readouterr().out


# ---- options and misuse ----------------------------------------------------------------------------------


def test_options_are_shown(capsys):
    model = runs.network()
    amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        opt_level="O3",
        ddp_replica_count=8,
        user_cast_preferred=None,
    )
    text = capsys.readouterr().out
    for words in (
        "ddp_replica_count",
        "8",
        "combine_grad",
        "combine_ddp",
        "user_cast_preferred",
        "check_combined_tensors",
    ):
        assert words in text


@pytest.mark.parametrize(
    "level, option, words",
    [
        ("O0", dict(combine_grad=True), "combine_grad=True does not go with O0"),
        ("O3", dict(combine_grad=True), "combine_grad=True does not go with O3"),
        ("O3", dict(check_combined_tensors=True), "check_combined_tensors=True does not go"),
        ("O1", dict(combine_ddp=True), "combine_grad is not True"),
        ("O2", dict(combine_ddp=True, combine_grad=False), "combine_grad is not True"),
        ("O2", dict(combine_grad=True, master_weights=False), "need master weights"),
        ("O2", dict(combine_grad=True, combine_ddp=True), "init_process_group"),
        ("O1", dict(ddp_replica_count=0), "whole number"),
        ("O1", dict(ddp_replica_count=2.5), "whole number"),
    ],
    ids=str,
)
def test_misuse(level, option, words):
    model = runs.network()
    with pytest.raises(RuntimeError, match=words):
        runs.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, **option)
    assert not hasattr(amp._amp_state, "opt_properties")


def test_an_optimizer_with_a_method_of_that_name():
    class Own(torch.optim.SGD):
        def get_model_combined_grads(self):
            return []

    with pytest.raises(RuntimeError, match="get_model_combined_grads already"):
        start("O1", lambda params: Own(params, lr=0.1))


def test_optimizers_that_share_a_parameter():
    model = runs.network()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model[0].weight], lr=0.1)]
    with pytest.raises(RuntimeError, match="share a parameter"):
        runs.initialize(model, optimizers, opt_level="O1", combine_grad=True)


def test_scaled_gradients_that_stay_scaled():
    make = lambda params: runs.FusedSGD(params, lr=0.1, materialize_master_grads=False)  # noqa: E731
    with pytest.raises(RuntimeError, match="materialize_master_grads"):
        start("O2", make, combine_grad=True)


def test_sparse_and_double():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True, dtype=torch.float32, device="cpu"))
    model, optimizer = start("O1", lambda p: torch.optim.SGD(p, lr=0.1), model=model, combine_grad=True)
    with pytest.raises(RuntimeError, match="has a sparse gradient: it cannot be combined"):
        runs.backward(model(torch.tensor([1], device="cpu", dtype=torch.int64)).sum(), optimizer)
    runs.forget()
    model, optimizer = start("O1", model=runs.plain().double(), combine_grad=True)
    with pytest.raises(RuntimeError, match="is torch.float64: it cannot be combined"):
        runs.backward(model(runs.batch()[0].double()).sum(), optimizer)
