"""What amp calls when: the gradient policy of an optimizer, between scale_loss and step()."""

from __future__ import annotations

import linecache

import amp_runs as runs
import pytest
import torch

from apex import amp, fp16_utils
from apex.amp._combined.policy import Combined
from apex.amp._policies import Masters, Plain, ScaledModel
from apex.contrib import optimizers as contrib

METHODS = (
    *("before_backward", "begin", "stop", "abandon", "after_backward"),
    *("before_step", "update_models", "after_step", "zero_grad", "add_group"),
)
CLASSES = {
    "plain": Plain,
    "masters": Masters,
    "scaled model": ScaledModel,
    "combined": Combined,
    "combined masters": Combined,
}
OPEN = ["before_backward", "begin"]
PASS = [*OPEN, "after_backward"]


class Boom(Exception):
    pass


def boom(*_):
    raise Boom


class Recorded:
    """A model, its optimizer, and the calls of the methods of its policy, and of the optimizer's own step."""

    def __init__(self, kind):
        self.model, self.optimizer = runs.start(kind)
        self.policy, self.calls = self.optimizer._amp_stash.policy, []
        assert type(self.policy) is CLASSES[kind]
        for name in METHODS:
            self._record(vars(self.policy), name, getattr(self.policy, name))
        self._record(self.optimizer._amp_stash.methods, "step", self.optimizer._amp_stash.methods["step"])

    def _record(self, where, name, function):
        def recorded(*arguments, **keywords):
            self.calls.append(name)
            return function(*arguments, **keywords)

        where[name] = recorded

    def one_pass(self, **how):
        runs.backward(runs.loss_of(self.model), self.optimizer, **how)

    def broken_pass(self):
        with pytest.raises(Boom), amp.scale_loss(runs.loss_of(self.model), self.optimizer) as scaled_loss:
            scaled_loss.backward()
            raise Boom

    def taken(self):
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture(params=CLASSES)
def recorded(request):
    return Recorded(request.param)


def copies(recorded):
    """Whether amp copies masters to the model: FusedSGD's launch writes both."""
    return bool(recorded.policy.masters()) and type(recorded.policy) is not ScaledModel


def test_a_pass_and_a_step(recorded):
    step = ["before_step", "step", *(["update_models"] if copies(recorded) else []), "after_step"]
    for _ in range(2):
        recorded.optimizer.zero_grad()
        recorded.one_pass()
        recorded.optimizer.step()
        assert recorded.taken() == ["zero_grad", *PASS, *step]


def test_gradients_that_wait_to_be_unscaled(recorded):
    recorded.one_pass(delay_unscale=True)
    recorded.one_pass(delay_unscale=True)
    recorded.one_pass()
    assert recorded.taken() == [*OPEN, "begin", "begin", "after_backward"]


def test_what_raises(recorded):
    recorded.broken_pass()
    assert recorded.taken() == [*OPEN, "stop", "abandon"]
    recorded.one_pass(delay_unscale=True)
    recorded.broken_pass()
    assert recorded.taken() == [*OPEN, "begin", "stop"]  # what waits, waits on
    recorded.one_pass()
    assert recorded.taken() == ["begin", "after_backward"]


def test_unscaling_that_raises(recorded, monkeypatch):
    monkeypatch.setattr(recorded.optimizer, "_post_amp_backward", boom)
    with pytest.raises(Boom):
        recorded.one_pass()
    assert recorded.taken() == [*OPEN, "abandon"]


def test_preparing_that_raises(recorded, monkeypatch):
    """Of two optimizers, the second: the first is as it was, and the second not open."""
    other = runs.plain(1)
    with pytest.warns(amp.AmpWarning, match="called again"):
        other, second = runs.initialize(other, torch.optim.SGD(other.parameters(), 0.1), opt_level="O1")
    monkeypatch.setattr(second, "_prepare_amp_backward", boom)
    with pytest.raises(Boom):
        runs.backward(runs.loss_of(recorded.model), [recorded.optimizer, second])
    assert recorded.taken() == ["before_backward", "stop", "abandon"]
    assert not recorded.optimizer._amp_stash.open and not second._amp_stash.open


def test_a_skipped_step(recorded):
    """On the host: SGD with momentum, and FusedSGD over the model's gradients, do not read found_inf."""
    runs.overflow(recorded.model, recorded.optimizer)
    assert recorded.optimizer._amp_stash.already_patched
    recorded.taken()
    recorded.optimizer.step()
    assert recorded.taken() == ["before_step", "after_step"]
    recorded.one_pass()
    recorded.optimizer.step()
    assert "step" in recorded.taken()


def test_a_closure_comes_first(recorded):
    def closure():
        recorded.calls.append("closure")
        assert torch.is_grad_enabled()
        recorded.one_pass()
        return 3.0

    with torch.no_grad():
        assert recorded.optimizer.step(closure) == 3.0
    assert recorded.taken()[: len(PASS) + 3] == ["closure", *PASS, "before_step", "step"]


def test_a_group_more(recorded):
    more = torch.nn.Linear(3, 3, dtype=recorded.model[0].weight.dtype, device="cpu")
    recorded.optimizer.add_param_group({"params": list(more.parameters())})
    assert recorded.taken() == ["add_group"]


def test_a_second_pass_inside_the_first(recorded):
    with amp.scale_loss(runs.loss_of(recorded.model), recorded.optimizer) as scaled_loss:
        with pytest.raises(amp.AmpUsageError, match="entered again"):
            recorded.one_pass()
        with pytest.raises(amp.AmpUsageError, match="inside amp.scale_loss"):
            recorded.optimizer.step()
        scaled_loss.backward()
    assert recorded.taken() == PASS


def test_a_scale_of_one_leaves_plain_gradients_alone():
    model = runs.plain()
    model, optimizer = runs.initialize(
        model, runs.OPTIMIZERS["sgd"](model.parameters()), opt_level="O1", loss_scale=1
    )
    policy = optimizer._amp_stash.policy
    for name in METHODS[:5]:
        setattr(policy, name, boom)
    runs.backward(runs.loss_of(model), optimizer)
    assert model[0].weight.grad is not None


class TestLists:
    """User code reads the lists of _amp_stash while gradients from before a pass are kept in C++."""

    @pytest.mark.parametrize("name", ["all_fp32_from_fp32", "all_fp32"])
    def test_stashes_hold_what_was_set_aside(self, name):
        model = runs.network()
        level = "O2" if "from" in name else "O1"
        model, optimizer = runs.initialize(
            model, runs.OPTIMIZERS["FusedAdam"](model.parameters()), opt_level=level
        )
        runs.backward(runs.loss_of(model), optimizer)
        stash = optimizer._amp_stash
        params = getattr(stash, name + "_params")
        before = [p.grad.clone() for p in params]
        with amp.scale_loss(runs.loss_of(model, 1), optimizer) as scaled_loss:
            assert runs.equal(getattr(stash, name + "_grad_stash"), before)
            scaled_loss.backward()
        assert not any(getattr(stash, name + "_grad_stash"))
        assert not runs.equal([p.grad for p in params], before)

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_unscaling_of_the_users_own(self, level):
        """As ONNX Runtime does it: amp's after_backward is replaced by one over the public lists."""
        from apex.amp import _process_optimizer as public

        def post_backward(self, scaler):
            stash = self._amp_stash
            self._amp_lazy_init()
            if level == "O2":
                pairs = zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True)
                for param, master in pairs:
                    held = 0 if master.grad is None else master.grad
                    master.grad = held + param.grad.float() / scaler.loss_scale()
                public.post_backward_models_are_masters(
                    scaler, stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash
                )
            else:
                public.post_backward_models_are_masters(
                    scaler, stash.all_fp32_params, stash.all_fp32_grad_stash
                )

        found = []
        for own in (False, True):
            runs.forget()
            model = runs.network()
            make = runs.OPTIMIZERS["FusedAdam"]
            model, optimizer = runs.initialize(
                model, make(model.parameters()), opt_level=level, loss_scale=8.0
            )
            if own:
                optimizer._post_amp_backward = post_backward.__get__(optimizer)
            for step in range(2):
                for part in range(3):
                    runs.backward(runs.loss_of(model, 3 * step + part), optimizer)
                optimizer.step()
                optimizer.zero_grad()
            found.append(runs.values(model) + runs.values(optimizer))
        assert runs.equal(*found)


class TestWarnings:
    """They name the line of the script that called amp, however deep inside it they arise."""

    @staticmethod
    def check(told, line):
        (warning,) = told
        assert warning.filename == __file__ and linecache.getline(__file__, warning.lineno).strip() == line

    @pytest.mark.parametrize("scheduled", [False, True])
    def test_a_step_without_scale_loss(self, scheduled):
        model, optimizer = runs.start("masters")
        if scheduled:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        runs.loss_of(model).backward()
        with pytest.warns(amp.AmpWarning, match="updates nothing") as told:
            optimizer.step()
        self.check(told, "optimizer.step()")

    def test_a_second_initialize(self):
        runs.start("plain")
        model = runs.plain()
        with pytest.warns(amp.AmpWarning, match="called again") as told:
            amp.initialize(model, opt_level="O1", verbosity=0)
        self.check(told, 'amp.initialize(model, opt_level="O1", verbosity=0)')

    def test_a_gradient_that_was_replaced(self):
        model, optimizer = runs.start("combined")
        runs.backward(runs.loss_of(model), optimizer)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        with pytest.warns(amp.AmpWarning, match="recombined") as told:
            optimizer.zero_grad()
        self.check(told, "optimizer.zero_grad()")

    def test_a_gradient_that_was_replaced_inside_scale_loss(self):
        model, optimizer = runs.start("combined")
        runs.backward(runs.loss_of(model), optimizer)
        context = amp.scale_loss(runs.loss_of(model), optimizer)
        context.__enter__().backward()
        model[0].weight.grad = torch.ones_like(model[0].weight)
        with pytest.warns(amp.AmpWarning, match="recombined") as told:
            context.__exit__(None, None, None)
        self.check(told, "context.__exit__(None, None, None)")

    @pytest.mark.parametrize("kind", [fp16_utils.FP16_Optimizer, contrib.FP16_Optimizer])
    def test_a_class_of_old(self, kind):
        params = [torch.nn.Parameter(torch.ones(2, dtype=torch.float16, device="cpu"))]
        with pytest.warns(DeprecationWarning, match="is of old") as told:
            kind(torch.optim.SGD(params, 0.1), verbose=False)
        self.check(told, "kind(torch.optim.SGD(params, 0.1), verbose=False)")
