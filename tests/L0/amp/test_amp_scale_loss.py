"""amp.scale_loss and what follows it: gradients, skipped steps, accumulation, several of everything."""

from __future__ import annotations

import warnings

import amp_runs as runs
import pytest
import torch

from apex import amp
from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

SCALED = ("O1", "O2", "O3", "O4", "O5")
ON_DEVICE = {
    "FusedAdam": lambda p: FusedAdam(p, lr=0.01),
    "FusedAdam capturable": lambda p: FusedAdam(p, lr=0.01, capturable=True),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.05, momentum=0.9),
    "FusedAdagrad": lambda p: FusedAdagrad(p, lr=0.05),
    "FusedLARS": lambda p: FusedLARS(p, lr=0.5, momentum=0.9),
    "FusedNovoGrad": lambda p: FusedNovoGrad(p, lr=0.05),
    "FusedMixedPrecisionLamb": lambda p: FusedMixedPrecisionLamb(p, lr=0.01),
    "torch fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "torch fused SGD": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
}
ON_HOST = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "torch fused SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "FusedLAMB": lambda p: FusedLAMB(p, lr=0.01),
    "FusedSGD unmaterialized": lambda p: FusedSGD(p, lr=0.05, momentum=0.9, materialize_master_grads=False),
}


def start(make=ON_HOST["SGD"], level="O1", model=runs.plain, **options):
    model = model()
    return runs.initialize(model, make(model.parameters()), opt_level=level, **options)


@pytest.fixture
def no_sync(monkeypatch):
    """A switch: from its call on, what would wait for a GPU raises."""

    def refuse(self, *_):
        raise AssertionError("the host asked a tensor for its value")

    def on():
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, refuse)

    return on


# ---- gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 128.0, "dynamic"])
@pytest.mark.parametrize("level", runs.LEVELS)
def test_gradients_are_those_of_the_unscaled_loss(level, scale):
    model, optimizer = start(level=level, loss_scale=scale)
    reference = runs.plain()
    runs.loss_of(reference).backward()
    runs.backward(runs.loss_of(model), optimizer)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(runs.HALF.get(level), 1e-6)
    for p, q in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=8 * tolerance, atol=tolerance)


@pytest.mark.parametrize("make", [*ON_DEVICE.values(), *ON_HOST.values()], ids=[*ON_DEVICE, *ON_HOST])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_trains_as_the_bare_optimizer_does(level, make):
    model, optimizer = start(make, level, loss_scale="dynamic", dynamic_init_scale=2.0**8)
    losses = runs.train(model, optimizer, 5)
    runs.forget()
    reference = runs.plain()
    bare, expected = make(reference.parameters()), []
    for step in range(5):
        bare.zero_grad()
        loss = runs.loss_of(reference, step)
        loss.backward()
        bare.step()
        expected.append(loss.item())
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(runs.HALF.get(level), 1e-5)
    torch.testing.assert_close(
        torch.tensor(losses, dtype=torch.float32, device="cpu"),
        torch.tensor(expected, dtype=torch.float32, device="cpu"),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("level", SCALED)
def test_model_weights_are_roundings_of_their_masters(level):
    model, optimizer = start(level=level, model=runs.network)
    runs.train(model, optimizer, 3)
    for p, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert torch.equal(p, master.to(p.dtype))


# ---- overflow --------------------------------------------------------------------------------------------


def state_of(optimizer):
    copies = [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    groups = [g["step"].clone() for g in optimizer.param_groups if isinstance(g.get("step"), torch.Tensor)]
    return copies + groups


@pytest.mark.parametrize("make", [*ON_DEVICE.values(), *ON_HOST.values()], ids=[*ON_DEVICE, *ON_HOST])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_after_an_overflow_is_skipped(level, make, capsys):
    model, optimizer = start(make, level, dynamic_init_scale=2.0**8)
    runs.train(model, optimizer, 2)
    before, state = runs.values(model) + runs.values(optimizer), state_of(optimizer)
    amp._amp_state.verbosity = 1
    runs.overflow(model, optimizer)
    optimizer.step()
    assert runs.equal(runs.values(model) + runs.values(optimizer), before)
    assert runs.equal(state_of(optimizer), state)
    assert runs.scaler().loss_scale() == 2.0**7 and runs.scaler()._unskipped == 0
    assert capsys.readouterr().out.count("loss scaler 0 reduces its loss scale to 128.0") == 1
    continued = runs.train(model, optimizer, 2, first=2)

    runs.forget()
    model, optimizer = start(make, level, dynamic_init_scale=2.0**8)
    assert runs.train(model, optimizer, 4)[2:] == pytest.approx(
        continued, rel=1e-2 if level == "O2" else 1e-3
    )


@pytest.mark.parametrize("make", ON_DEVICE.values(), ids=ON_DEVICE)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_host_does_not_wait(level, make, no_sync):
    """Neither scale_loss nor step asks the device, overflow or not."""
    model, optimizer = start(make, level, dynamic_init_scale=2.0**8)
    runs.train(model, optimizer, 2)
    before = runs.values(optimizer)
    no_sync()
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        optimizer.zero_grad()
        runs.backward(runs.loss_of(model, step) * factor, optimizer)
        optimizer.step()
    after = runs.values(optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_overflow_in_one_of_several_passes_skips_the_step():
    for make in (ON_HOST["SGD"], ON_DEVICE["FusedAdam"]):
        for bad in (0, 1):
            runs.forget()
            model, optimizer = start(make)
            before = runs.values(model)
            for index in range(2):
                runs.backward(runs.loss_of(model, index) * (float("inf") if index == bad else 1.0), optimizer)
            optimizer.step()
            assert runs.equal(runs.values(model), before)
            optimizer.zero_grad()
            runs.train(model, optimizer, 1)
            assert not runs.equal(runs.values(model), before)


def test_the_scale_recovers():
    model, optimizer = start(ON_DEVICE["FusedAdam"], "O2", scale_window=2, dynamic_init_scale=2.0**6)
    runs.overflow(model, optimizer)
    optimizer.step()
    runs.train(model, optimizer, 4)
    assert runs.scaler().loss_scale() == 2.0**7


@pytest.mark.parametrize("make", [ON_DEVICE["FusedAdam"], ON_HOST["SGD"]])
def test_delay_overflow_check(make):
    """The caller decides, as the public BERT scripts do."""
    model, optimizer = start(make)
    before = runs.values(model)
    for bad in (True, False):
        optimizer.zero_grad()
        loss = runs.loss_of(model) * (float("inf") if bad else 1.0)
        runs.backward(loss, optimizer, delay_overflow_check=True)
        had_overflow = runs.scaler().update_scale()
        assert had_overflow is bad
        if not had_overflow:
            optimizer.step()
        assert runs.equal(runs.values(model), before) == bad


# ---- several passes --------------------------------------------------------------------------------------


ACCUMULATE = ("FusedSGD", "SGD", "FusedSGD unmaterialized")


@pytest.mark.parametrize("kind", ACCUMULATE)
@pytest.mark.parametrize("level", SCALED)
def test_accumulation(level, kind):
    """Two passes give the sum, whether both unscale or only the last does."""
    make = (ON_DEVICE | ON_HOST)[kind]
    scale = {"loss_scale": 128.0} if level in ("O3", "O5") else {"dynamic_init_scale": 2.0**6}
    results = []
    for delayed in (False, True):
        runs.forget()
        model, optimizer = start(make, level, runs.network, **scale)
        runs.backward(runs.loss_of(model, 0), optimizer, delay_unscale=delayed)
        runs.backward(runs.loss_of(model, 1), optimizer)
        optimizer.step()
        results.append(runs.values(optimizer))
    runs.forget()
    reference = runs.network()
    bare = make(reference.parameters())
    for step in range(2):
        runs.loss_of(reference, step).backward()
    bare.step()
    half = runs.HALF[level]
    tolerance = 2e-3 if half == torch.float16 else 2e-2
    for values in results:
        for found, expected in zip(values, runs.values(reference), strict=True):
            torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_full_precision_parameters_accumulate_under_a_scale_of_one():
    """O5: batch norms have no masters, and public apex forgot their gradients of the passes before."""
    model, optimizer = start(level="O5", model=runs.network)
    for step in range(2):
        runs.backward(runs.loss_of(model, step), optimizer)
    reference = runs.network()
    for step in range(2):
        runs.loss_of(reference, step).backward()
    torch.testing.assert_close(model[1].weight.grad, reference[1].weight.grad, rtol=0.05, atol=0.02)


def test_a_delayed_pass_after_one_that_was_not():
    model, optimizer = start(level="O1", loss_scale=64.0)
    for index, delayed in enumerate((False, True, False)):
        runs.backward(runs.loss_of(model, index), optimizer, delay_unscale=delayed)
    found = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    for index in range(3):
        runs.backward(runs.loss_of(model, index), optimizer)
    for a, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_zero_grad(level):
    for make, none in ((ON_HOST["SGD"], True), (ON_DEVICE["FusedSGD"], False)):
        runs.forget()
        model, optimizer = start(make, level)
        runs.backward(runs.loss_of(model), optimizer, delay_unscale=True)
        optimizer.zero_grad()
        assert all((p.grad is None) if none else not p.grad.any() for p in model.parameters())
        optimizer.step()  # nothing is scaled any more
        runs.backward(runs.loss_of(model), optimizer)
        optimizer.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in (*model.parameters(), *amp.master_params(optimizer)))


def test_a_closure():
    for level in ("O0", "O1", "O2"):
        for make in (ON_HOST["SGD"], ON_DEVICE["FusedAdam"]):
            runs.forget()
            model, optimizer = start(make, level)
            factor = 1.0

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = runs.loss_of(model)
                runs.backward(loss * factor, optimizer)  # noqa: B023
                return loss

            first = optimizer.step(closure)
            assert optimizer.step(closure) < first
            if level != "O0":
                before, factor = runs.values(model), float("inf")
                optimizer.step(closure)
                assert runs.equal(runs.values(model), before)


# ---- several models, optimizers and losses ---------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_two_models_two_optimizers_three_losses(level):
    """The public test of this name, against the same in float32."""

    def run(level):
        runs.forget()
        models = [runs.plain(0), runs.plain(1)]
        optimizers = [torch.optim.SGD(models[0].parameters(), 0.1), FusedSGD(models[1].parameters(), 0.1)]
        models, optimizers = runs.initialize(models, optimizers, opt_level=level, num_losses=3)
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            runs.backward(runs.loss_of(models[0], step), optimizers[0], loss_id=0)
            runs.backward(runs.loss_of(models[1], step), optimizers[1], loss_id=1)
            both = runs.loss_of(models[0], step + 9) + runs.loss_of(models[1], step + 9)
            runs.backward(both, optimizers, loss_id=2)
            for optimizer in optimizers:
                optimizer.step()
        return [v.float() for m in models for v in runs.values(m)]

    tolerance = 5e-3 if runs.HALF[level] == torch.float16 else 4e-2
    for found, expected in zip(run(level), run("O0"), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("second", ["FusedSGD", "sgd"])
def test_an_overflow_of_one_loss_skips_its_optimizers_only(second):
    models = [runs.plain(0), runs.plain(1)]
    optimizers = [FusedAdam(models[0].parameters()), runs.OPTIMIZERS[second](models[1].parameters())]
    runs.initialize(models, optimizers, opt_level="O1", num_losses=2)
    before = [runs.values(m) for m in models]
    runs.backward(runs.loss_of(models[0]) * float("nan"), optimizers[0], loss_id=0)
    runs.backward(runs.loss_of(models[1]), optimizers[1], loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
    assert runs.equal(runs.values(models[0]), before[0]) and not runs.equal(runs.values(models[1]), before[1])
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [2.0**15, 2.0**16]


@pytest.mark.parametrize("level", SCALED)
def test_optimizers_of_one_pass_that_share_parameters(level):
    """Each gradient is unscaled once."""
    model = runs.plain()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(model[0].parameters(), 0.1)]
    runs.initialize(model, optimizers, opt_level=level, loss_scale=64.0)
    reference = runs.plain()
    for step in range(2):
        runs.backward(runs.loss_of(model, step), optimizers)
        runs.loss_of(reference, step).backward()
    tolerance = 5e-3 if runs.HALF[level] == torch.float16 else 4e-2
    for p, q in zip(amp.master_params(optimizers[0]), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=8 * tolerance, atol=tolerance)


def test_lbfgs():
    model, optimizer = start(lambda p: torch.optim.LBFGS(p, max_iter=3), "O4")

    def closure():
        optimizer.zero_grad()
        loss = runs.loss_of(model)
        runs.backward(loss, optimizer)
        return loss

    first = optimizer.step(closure)
    assert runs.loss_of(model) < first
    for level in ("O1", "O5"):
        runs.forget()
        model, optimizer = start(torch.optim.LBFGS, level)
        with pytest.raises(RuntimeError, match="LBFGS"):
            optimizer.step(closure)


# ---- misuse ----------------------------------------------------------------------------------------------


def test_nested():
    model, optimizer = start(level="O2")
    before = runs.values(optimizer)
    with pytest.raises(RuntimeError, match=r"(?s)inside it already.*before the second"):  # noqa: SIM117
        with (
            amp.scale_loss(runs.loss_of(model), optimizer),
            amp.scale_loss(runs.loss_of(model, 1), [optimizer]),
        ):
            pass
    runs.train(model, optimizer, 1)  # and all is well afterwards
    assert not runs.equal(runs.values(optimizer), before)


def test_nested_over_other_optimizers():
    """They have nothing in common, so this is allowed."""
    models = [runs.plain(0), runs.plain(1)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    runs.initialize(models, optimizers, opt_level="O1", num_losses=2)
    with amp.scale_loss(runs.loss_of(models[0]), optimizers[0], loss_id=0) as first:
        with amp.scale_loss(runs.loss_of(models[1]), optimizers[1], loss_id=1) as second:
            second.backward()
        first.backward()
    assert all(p.grad.abs().max() < 10 for m in models for p in m.parameters())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_step_inside(level):
    model, optimizer = start(level=level)
    before = runs.values(optimizer)
    with pytest.raises(RuntimeError, match=r"(?s)inside amp.scale_loss.*after the with"):  # noqa: SIM117
        with amp.scale_loss(runs.loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
            optimizer.step()
    assert runs.equal(runs.values(optimizer), before)


def test_step_while_gradients_are_scaled():
    model, optimizer = start()
    runs.backward(runs.loss_of(model), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="still scaled"):
        optimizer.step()


def test_a_delayed_pass_for_another_loss():
    model, optimizer = start(num_losses=2)
    runs.backward(runs.loss_of(model), optimizer, loss_id=0, delay_unscale=True)
    with pytest.raises(RuntimeError, match="wait to be unscaled by loss scaler 0"):
        runs.backward(runs.loss_of(model), optimizer, loss_id=1)


@pytest.mark.parametrize("optimizers", [None, [], [None]], ids=str)
def test_no_optimizer(optimizers):
    model, _ = start()
    with pytest.raises(RuntimeError, match="needs the optimizers"):
        runs.backward(runs.loss_of(model), optimizers)


@pytest.mark.parametrize("level, told", [("O1", True), ("O3", False), ("O4", False)])
def test_an_optimizer_that_was_not_named(level, told):
    """Its gradients are scaled still, and its step would be 2^16 times too long: told once, where a scale is."""
    model = runs.plain()
    first, second = (torch.optim.SGD(model[i].parameters(), 1e-6) for i in (0, 2))
    amp.initialize(model, [first, second], opt_level=level, verbosity=0)

    def steps():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first.step()
            second.step()
        return ["scaled still" in str(w.message) for w in caught]

    def backward(optimizers):
        for optimizer in (first, second):
            optimizer.zero_grad()
        runs.backward(runs.loss_of(model), optimizers)

    backward([first, second])
    assert not any(steps())
    backward(first)
    second.zero_grad()  # as the discriminator's after the generator's pass
    assert not any(steps())
    for again in (False, True):
        backward(first)
        assert any(steps()) == (told and not again)


def test_an_optimizer_that_amp_does_not_know():
    model, _ = start()
    with pytest.raises(RuntimeError, match="did not go through amp.initialize"):
        runs.backward(runs.loss_of(model), torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(TypeError, match="takes optimizers, not Sequential"):
        runs.backward(runs.loss_of(model), model)


@pytest.mark.parametrize("wrong", [lambda loss: loss.item(), lambda loss: [loss], lambda loss: None])
def test_a_loss_that_is_no_tensor(wrong):
    model, optimizer = start()
    with pytest.raises(TypeError, match="loss is no tensor"):
        runs.backward(wrong(runs.loss_of(model)), optimizer)
    runs.train(model, optimizer, 1)


@pytest.mark.parametrize("loss_id", [1, -1, "0"])
def test_no_such_loss(loss_id):
    model, optimizer = start()
    with pytest.raises(ValueError, match="num_losses"):
        runs.backward(runs.loss_of(model), optimizer, loss_id=loss_id)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_backward_pass_that_raises(level):
    """Gradients are what they were before it."""
    model, optimizer = start(level=level, loss_scale=8.0)
    runs.backward(runs.loss_of(model), optimizer)
    before = [p.grad.clone() for p in amp.master_params(optimizer)]
    with pytest.raises(KeyError), amp.scale_loss(runs.loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
        raise KeyError
    assert runs.equal([p.grad for p in amp.master_params(optimizer)], before)
    optimizer.step()
