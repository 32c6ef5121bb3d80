"""What users of public apex reported about amp, each as a test of its kind."""

from __future__ import annotations

import math
import subprocess
import sys
import types
import warnings

import amp_runs as runs
import pytest
import torch
from torch import nn
from torch_defaults import float32_on_cpu

from apex import amp
from apex.contrib.layer_norm import FastLayerNorm
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.optimizers import FusedAdam

# ---- half inputs meet float32 weights (NVIDIA/apex 760, 979, 1379; transformers 1172) --------------------


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("level", ["O1", "O4", "O2", "O5"])
def test_a_norm_after_a_linear_layer(norm, level):
    model = nn.Sequential(nn.Linear(6, 8, dtype=torch.float32, device="cpu"), float32_on_cpu()(norm)(8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runs.initialize(model, optimizer, opt_level=level)
    y = model(torch.randn(5, 6, dtype=torch.float32, device="cpu") * 300)
    assert y.dtype == torch.float32 and y.isfinite().all()
    runs.backward(y.square().sum(), optimizer)
    assert all(p.grad.dtype == torch.float32 for p in amp.master_params(optimizer))


@pytest.mark.parametrize("norm", [FusedLayerNorm, FusedRMSNorm, FastLayerNorm])
@pytest.mark.parametrize("level", ["O1", "O4", "O2", "O5"])
def test_a_fused_norm_after_a_linear_layer(norm, level):
    """The norm's output has its input's dtype, which is the linear layer's; FastLayerNorm's has its weights'."""
    model = nn.Sequential(nn.Linear(6, 8, dtype=torch.float32, device="cpu"), float32_on_cpu()(norm)(8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runs.initialize(model, optimizer, opt_level=level)
    y = model(torch.randn(5, 6, dtype=torch.float32, device="cpu"))
    half = {} if norm is FastLayerNorm else {"O1": torch.float16, "O4": torch.bfloat16}
    assert y.dtype == half.get(level, torch.float32) and y.isfinite().all()
    runs.backward(y.float().square().sum(), optimizer)
    assert all(p.grad.dtype == torch.float32 for p in amp.master_params(optimizer))


# ---- scale_loss without initialize (NVIDIA/apex 398, 210, 1408) ------------------------------------------

STATED = r"(?s)amp.scale_loss was called before amp.initialize.*model, optimizer = amp.initialize\(model"


def test_scale_loss_first():
    model = runs.plain()
    with pytest.raises(RuntimeError, match=STATED):
        runs.backward(runs.loss_of(model), torch.optim.SGD(model.parameters(), 0.1))
    with (
        pytest.raises(RuntimeError, match=STATED),
        amp.scale_loss(torch.ones((), dtype=torch.float32, device="cpu"), None),
    ):
        pass


def test_scale_loss_after_an_initialize_that_failed():
    model = runs.plain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for wrong in (dict(opt_level="O9"), dict(opt_level="O1", master_weights=True), dict(loss_scale="much")):
        with pytest.raises(RuntimeError):
            runs.initialize(model, optimizer, **wrong)
        with pytest.raises(RuntimeError, match=STATED):
            runs.backward(runs.loss_of(model), optimizer)
    assert model[0].weight.dtype == torch.float32
    runs.initialize(model, optimizer, opt_level="O2")
    runs.train(model, optimizer, 1)


def test_initialize_in_one_module_and_scale_loss_in_another():
    one, other = types.ModuleType("one"), types.ModuleType("other")
    exec(
        "from apex import amp\ndef start(*a): return amp.initialize(*a, opt_level='O2', verbosity=0)",
        vars(one),
    )
    exec("import apex.amp as mixed\ndef scaled(*a): return mixed.scale_loss(*a)", vars(other))
    model = runs.plain()
    model, optimizer = one.start(model, torch.optim.SGD(model.parameters(), 0.1))
    with other.scaled(runs.loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def test_names_that_user_code_imports():
    code = """
from apex import amp
from apex.amp._amp_state import _amp_state, AmpState, master_params, maybe_print, warn_or_err
from apex.amp.scaler import LossScaler, scale_check_overflow_python, axpby_check_overflow_python
from apex.amp.frontend import Properties, O0, O1, O2, O3, O4, O5, opt_levels, initialize, state_dict
from apex.amp.handle import AmpHandle, NoOpHandle, scale_loss, disable_casts
from apex.amp.opt import OptimWrapper
from apex.amp._initialize import O2StateDictHook, applier, to_type, check_models, check_optimizers
from apex.amp._process_optimizer import AmpOptimizerState
from apex.amp import compat, rnn_compat, utils, wrap
from apex.amp.amp import init, half_function, register_half_function
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
assert amp._amp_state is _amp_state and not hasattr(_amp_state, "opt_properties")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- the order of initialize and load (NVIDIA/apex 180, 250; DeepLearningExamples 397) --------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_both_orders_of_initialize_and_load(level):
    weights = runs.network(seed=3).state_dict()
    x = runs.batch()[0]
    outputs, masters = [], []
    for load_first in (True, False):
        runs.forget()
        model = runs.network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if load_first:
            model.load_state_dict(weights)
        model, optimizer = runs.initialize(model, optimizer, opt_level=level)
        if not load_first:
            model.load_state_dict(weights)
        masters.append(runs.values(optimizer))
        before = model.eval()(x).float()
        model.train()
        with torch.no_grad():  # a step of nothing must not bring old weights back
            optimizer.zero_grad()
        runs.backward(model(x).float().sum() * 0, optimizer)
        optimizer.step()
        outputs.append(before)
    assert torch.equal(*outputs) and runs.equal(*masters)
    for (name, _), master in zip(model.named_parameters(), masters[0], strict=True):
        assert torch.equal(master, weights[name])
    reference = runs.network(seed=3).eval()
    torch.testing.assert_close(outputs[0], reference(x).float(), rtol=0.03, atol=0.03)


# ---- an optimizer over other tensors, a step before any backward (NVIDIA/apex 341) -------------------------


@pytest.mark.parametrize("level", runs.LEVELS)
def test_an_optimizer_over_foreign_tensors(level):
    model, foreign = (
        nn.Linear(1, 1, dtype=torch.float32, device="cpu"),
        torch.zeros(3, requires_grad=True, dtype=torch.float32, device="cpu"),
    )
    with pytest.raises(RuntimeError, match=r"(?s)none of them is trained.*model.parameters\(\)"):
        runs.initialize(model, torch.optim.SGD([foreign], 0.1), opt_level=level)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD([foreign], 0.1)]
    with pytest.warns(amp.AmpWarning, match="optimizer 1 holds no parameter of the models"):
        runs.initialize(model, optimizers, opt_level=level, dynamic_init_scale=2.0**8)
    loss = (model(torch.ones(2, 1, dtype=torch.float32, device="cpu")).float() + foreign.sum()).sum()
    runs.backward(loss, optimizers)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(foreign.detach(), torch.full((3,), -0.2, dtype=torch.float32, device="cpu"))


@pytest.mark.parametrize("kind", runs.OPTIMIZERS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_backward_pass_without_scale_loss_is_told(level, kind):
    model = runs.network()
    _, optimizer = runs.initialize(model, runs.OPTIMIZERS[kind](model.parameters()), opt_level=level)
    runs.loss_of(model).backward()
    with pytest.warns(amp.AmpWarning, match=r"(?s)updates nothing.*with amp.scale_loss\(loss, optimizer\)"):
        optimizer.step()
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error", amp.AmpWarning)
        runs.train(model, optimizer, 2)
        optimizer.zero_grad()
        optimizer.step()


@pytest.mark.parametrize("kind", runs.OPTIMIZERS)
@pytest.mark.parametrize("level", runs.LEVELS)
def test_a_step_before_any_backward(level, kind):
    model = runs.network()
    _, optimizer = runs.initialize(model, runs.OPTIMIZERS[kind](model.parameters()), opt_level=level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = runs.values(model)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    assert runs.equal(runs.values(model), before)
    runs.train(model, optimizer, 1)


# ---- unused parameters (NVIDIA/apex 131) -----------------------------------------------------------------


@pytest.mark.parametrize("kind", runs.OPTIMIZERS)
@pytest.mark.parametrize("level", runs.LEVELS)
def test_unused_parameters(level, kind):
    model = nn.ModuleList(
        [
            nn.Linear(2, 2, dtype=torch.float32, device="cpu"),
            nn.Linear(2, 2, dtype=torch.float32, device="cpu"),
        ]
    )
    model.forward = lambda x: model[0](x)
    _, optimizer = runs.initialize(model, runs.OPTIMIZERS[kind](model.parameters()), opt_level=level)
    before = runs.values(model)
    for _ in range(2):
        runs.backward(model(torch.ones(3, 2, dtype=torch.float32, device="cpu")).float().mean(), optimizer)
    assert all(p.grad is None for p in model[1].parameters())
    assert all(p.grad is None for p in list(amp.master_params(optimizer))[2:])  # no zero-filled copies
    optimizer.step()
    after = runs.values(model)
    assert runs.equal(after[2:], before[2:]) and not any(map(torch.equal, after[:2], before[:2]))


# ---- a scheduler from before initialize (NVIDIA/apex 535, pytorch 27595) -----------------------------------


@pytest.mark.parametrize("kind", ["sgd", "FusedAdam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("before", [False, True])
def test_a_scheduler_does_not_warn(level, kind, before):
    model = runs.plain()
    optimizer = runs.OPTIMIZERS[kind](model.parameters())
    if before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    runs.initialize(model, optimizer, opt_level=level)
    if not before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rate = optimizer.param_groups[0]["lr"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.overflow(model, optimizer)
        optimizer.step()  # the first step of all is skipped, and counts
        scheduler.step()
        for _ in range(3):
            runs.train(model, optimizer, 1)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == rate / 16


def test_a_scheduler_still_warns_of_a_missing_step():
    model = runs.plain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    runs.initialize(model, optimizer, opt_level="O2")
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


# ---- class weights and buffers, norms without weights (NVIDIA/apex 837, 1635, 133) --------------------------


class WithLoss(nn.Module):
    def __init__(self, criterion):
        super().__init__()
        self.layer = nn.Linear(6, 3, dtype=torch.float32, device="cpu")
        self.criterion = criterion

    def forward(self, x, y=None):
        x = self.layer(x)
        return x if y is None else self.criterion(x, y)


@pytest.mark.parametrize("level", runs.LEVELS)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "criterion, target",
    [
        (
            lambda: nn.CrossEntropyLoss(
                weight=torch.tensor([1e-6, 1.0, 3e5], dtype=torch.float32, device="cpu")
            ),
            "classes",
        ),
        (
            lambda: nn.NLLLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float32, device="cpu")),
            "classes",
        ),
        (
            lambda: nn.BCEWithLogitsLoss(
                pos_weight=torch.tensor([1.0, 2.0, 3e5], dtype=torch.float32, device="cpu")
            ),
            "rows",
        ),
        (lambda: nn.MSELoss(), "rows"),
    ],
    ids=["CrossEntropyLoss", "NLLLoss", "BCEWithLogitsLoss", "MSELoss"],
)
def test_a_loss_in_the_model_runs_in_float32(level, inside, criterion, target):
    torch.manual_seed(0)
    model = WithLoss(criterion())
    x, y = runs.batch()
    y = y if target == "classes" else torch.rand(16, 3, dtype=torch.float32, device="cpu")
    expected = model(x, y)
    _, optimizer = runs.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level)
    loss = model(x, y) if inside else model.criterion(model(x), y)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.03, atol=0.03)
    runs.backward(loss, optimizer)
    buffers = [b for b in model.criterion.buffers()]
    assert all(b.dtype == torch.float32 and b.isfinite().all() for b in buffers)


@pytest.mark.parametrize("level", runs.LEVELS)
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm1d(8, affine=False, dtype=torch.float32, device="cpu"),
        lambda: nn.BatchNorm1d(8, affine=False, track_running_stats=False, dtype=torch.float32, device="cpu"),
        lambda: nn.GroupNorm(4, 8, dtype=torch.float32, device="cpu"),
        lambda: nn.LayerNorm(8, elementwise_affine=False, dtype=torch.float32, device="cpu"),
        lambda: nn.LayerNorm(8, dtype=torch.float32, device="cpu"),
        lambda: nn.GroupNorm(2, 8, affine=False, dtype=torch.float32, device="cpu"),
    ],
)
def test_norms_without_weights_take_half(level, norm):
    model = nn.Sequential(
        nn.Linear(6, 8, dtype=torch.float32, device="cpu"),
        norm(),
        nn.Linear(8, 3, dtype=torch.float32, device="cpu"),
    )
    _, optimizer = runs.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level)
    for training in (True, False):
        model.train(training)
        losses = runs.train(model, optimizer, 2)
        assert all(map(math.isfinite, losses))


# ---- the interface of old ---------------------------------------------------------------------------------


def test_handles_of_old():
    model = runs.plain()
    handle = amp.init()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = runs.values(model)
    with pytest.warns(DeprecationWarning, match="amp.initialize"):
        with handle.scale_loss(runs.loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert all(p.grad.abs().max() < 10 for p in model.parameters())
        with handle.scale_loss(runs.loss_of(model) * float("inf"), optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert runs.equal(runs.values(model), before)
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2)
    wrapped.zero_grad()
    for step in range(2):
        with wrapped.scale_loss(runs.loss_of(model, step)) as scaled_loss:
            scaled_loss.backward()
    with pytest.raises(RuntimeError, match="num_loss=3"), wrapped.scale_loss(runs.loss_of(model)):
        pass
    before_it_raised = [p.grad.clone() for p in model.parameters()]
    fresh = handle.wrap_optimizer(optimizer)
    with pytest.raises(KeyError), fresh.scale_loss(runs.loss_of(model)) as scaled_loss:
        scaled_loss.backward()
        raise KeyError
    assert runs.equal([p.grad for p in model.parameters()], before_it_raised)
    reference = runs.plain()
    with amp.disable_casts():
        (runs.loss_of(reference, 0) + runs.loss_of(reference, 1)).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.01, atol=0.002)
    wrapped.step()
    assert not runs.equal(runs.values(model), before) and wrapped.param_groups is optimizer.param_groups
    assert not amp.init(enabled=False).is_active()


def test_a_deep_copied_optimizer_is_bare():
    """Schedules are tried on copies; the copy must not step the original."""
    import copy

    model = runs.plain()
    _, optimizer = runs.initialize(model, FusedAdam(model.parameters()), opt_level="O1")
    before = runs.values(model)
    other = copy.deepcopy(optimizer)
    for p in amp.master_params(other):
        p.grad = torch.ones_like(p)
    other.step()
    assert runs.equal(runs.values(model), before)
