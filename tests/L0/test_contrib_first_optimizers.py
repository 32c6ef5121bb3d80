"""FusedAdam, FusedLAMB and FusedSGD of contrib, public apex's first ones, against float64, and in FP16_Optimizer."""

from __future__ import annotations

import copy
import inspect
import math
import pickle

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64

import apex
from apex.contrib.optimizers import FP16_Optimizer, FusedAdam, FusedLAMB
from apex.contrib.optimizers.fused_sgd import FusedSGD

pytestmark = pytest.mark.filterwarnings("ignore:FP16_Optimizer is of old")
SHAPES = ((3,), (33, 5), (1,))
ADAM = dict(lr=0.25, betas=(0.875, 0.75), eps=0.125, weight_decay=0.5)
SGD = dict(lr=0.25, momentum=0.5, weight_decay=0.125)


def parameters(device, dtype=F32, seed=0):
    return [torch.nn.Parameter(t) for t in lists.random(dtype, device, SHAPES, seed=seed)]


def gradients(device, step, dtype=F32, scale=1.0):
    return [(scale * t).to(dtype) for t in lists.random(F64, device, SHAPES, seed=100 + step)]


class Adam:
    """The step of public apex's first FusedAdam in float64."""

    def __init__(self, params, inside=False, correct=True):
        self.params, self.inside, self.correct, self.steps = lists.exact(params), inside, correct, 0
        self.m, self.v = ([torch.zeros_like(p) for p in self.params] for _ in range(2))

    def step(self, grads, scale=1.0):
        self.steps += 1
        (b1, b2), eps, lr = ADAM["betas"], ADAM["eps"], ADAM["lr"]
        if self.correct:
            lr *= math.sqrt(1 - b2**self.steps) / (1 - b1**self.steps)
        for p, m, v, g in zip(self.params, self.m, self.v, lists.exact(grads), strict=True):
            g = g / scale
            m.mul_(b1).add_((1 - b1) * g)
            v.mul_(b2).add_((1 - b2) * g * g)
            divisor = (v + eps).sqrt() if self.inside else v.sqrt() + eps
            p.sub_(lr * (m / divisor + ADAM["weight_decay"] * p))


def check(params, wanted, tolerance=1e-6):
    for p, q in zip(lists.exact(params), wanted, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, dict(eps_inside_sqrt=True), dict(bias_correction=False), dict(use_mt=True)],
                         ids=str)  # fmt: skip
def test_adam_by_its_own_gradients(variant, options):
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **ADAM, **options)
    oracle = Adam(params, options.get("eps_inside_sqrt", False), options.get("bias_correction", True))
    for step in range(3):
        grads = gradients(variant.device, step)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        assert optimizer.step(lambda: 5) == 5
        oracle.step(grads)
    check(params, oracle.params)
    assert optimizer.state[params[0]]["step"] == 3
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "reversible_adam" in name) == 3


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
@pytest.mark.parametrize(
    "copied_by", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_copies_step_as_the_optimizer_does(kind, copied_by):
    params = parameters("cpu")
    options = dict(ADAM, eps_inside_sqrt=True) if kind is FusedAdam else dict(SGD, wd_after_momentum=True)
    optimizer = kind(params, **options)
    again = copied_by(optimizer)
    for one in (optimizer, again):
        own = one.param_groups[0]["params"]
        outputs = [torch.empty_like(p.detach()) for p in own]
        for step in range(2):
            one.step(grads=gradients("cpu", step), output_params=outputs)
    assert all(map(torch.equal, params, again.param_groups[0]["params"]))
    assert again.param_groups[0]["params"][0] is not params[0]


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("how", ["list", "generator", "groups"])
def test_adam_with_gradients_outputs_and_a_scale(variant, dtype, how):
    params = parameters(variant.device)
    optimizer, oracle = FusedAdam(params, **ADAM), Adam(params)
    outputs = [torch.zeros_like(p, dtype=dtype, requires_grad=False) for p in params]
    for step in range(2):
        grads = gradients(variant.device, step, dtype, 8.0)
        give = {"list": list, "generator": lambda t: (x for x in t), "groups": lambda t: [list(t)]}[how]
        optimizer.step(grads=give(grads), output_params=give(outputs), scale=16.0)
        oracle.step(grads, 16.0)
    check(params, oracle.params)
    lists.assert_same_bits(outputs, [p.detach().to(dtype) for p in params])
    assert all(p.grad is None for p in params)


def test_adam_clips_each_group_by_its_norm():
    params = parameters("cpu")
    groups = [dict(params=params[:1], max_grad_norm=2.0), dict(params=params[1:])]
    optimizer, oracle = FusedAdam(groups, **ADAM), Adam(params)
    grads = gradients("cpu", 0)
    norms = [torch.tensor([64.0], dtype=F32, device="cpu"), None]
    optimizer.step(grads=[grads[:1], grads[1:]], scale=8.0, grad_norms=norms)
    clipped = [grads[0] / ((64.0 / 8 + 1e-6) / 2), *grads[1:]]
    oracle.step(clipped, 8.0)
    check(params, oracle.params)
    with pytest.raises(ValueError, match="needs grad_norms"):
        optimizer.step(grads=[grads[:1], grads[1:]])


def test_adam_counts_each_parameter_s_steps_and_resumes():
    params = parameters("cpu")
    optimizer = FusedAdam(params, **ADAM)
    seen = [[], [], []]
    for step in range(3):
        grads = gradients("cpu", step)
        given = [g if (step + i) % 2 == 0 else None for i, g in enumerate(grads)]
        for i, g in enumerate(given):
            if g is not None:
                seen[i].append(g)
        if step == 2:
            twins = copy.deepcopy(params)
            resumed = FusedAdam(twins, **ADAM)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            resumed.step(grads=given)
        optimizer.step(grads=given)
    assert [optimizer.state[p]["step"] for p in params] == [2, 1, 2]
    for i, p in enumerate(parameters("cpu")):
        oracle = Adam([p])
        for g in seen[i]:
            oracle.step([g])
        check([params[i]], oracle.params)
    lists.assert_same_bits(twins, params)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (lambda g: dict(grads=g[:2]), ValueError, "gradients are"),
        (lambda g: dict(grads=[g, g]), ValueError, "gradients are"),
        (lambda g: dict(grads=g, output_params=g[:1]), ValueError, "output_params are"),
        (lambda g: dict(grads=[g[0].to_sparse(), *g[1:]]), RuntimeError, "sparse"),
        (lambda g: dict(grads=[x.double() for x in g]), TypeError, "no variant takes"),
    ],
)
def test_adam_refuses(arguments, error, words):
    params = parameters("cpu")
    optimizer = FusedAdam(params, **ADAM)
    before = lists.clones([p.detach() for p in params])
    with pytest.raises(error, match=words):
        optimizer.step(**arguments(gradients("cpu", 0)))
    lists.assert_same_bits([p.detach() for p in params], before)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda p: FusedAdam(p, amsgrad=True), RuntimeError),
        (lambda p: FusedAdam(p, lr=-1.0), ValueError),
        (lambda p: FusedAdam(p, betas=(1.0, 0.9)), ValueError),
        (lambda p: FusedLAMB(p, amsgrad=True), RuntimeError),
        (lambda p: FusedSGD(p, lr=0.1, nesterov=True), ValueError),
        (lambda p: FusedSGD(p, lr=0.1, momentum=-1.0), ValueError),
    ],
)
def test_arguments_that_are_refused(make, error):
    with pytest.raises(error):
        make(parameters("cpu"))


# ---- LAMB --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_lamb_is_that_of_apex_optimizers(variant, dtype):
    params, twins = parameters(variant.device, dtype), parameters(variant.device, dtype)
    options = dict(lr=0.1, weight_decay=0.1, max_grad_norm=2.0)
    optimizer, other = FusedLAMB(params, **options), apex.optimizers.FusedLAMB(twins, **options)
    for step in range(3):
        for p, q, g in zip(params, twins, gradients(variant.device, step, dtype), strict=True):
            p.grad, q.grad = g, g.clone()
        optimizer.step()
        other.step()
    lists.assert_same_bits([p.detach() for p in params], [p.detach() for p in twins])
    assert "use_nvlamb" not in inspect.signature(FusedLAMB).parameters
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


# ---- SGD ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize(
    "options", [{}, dict(nesterov=True), dict(dampening=0.25), dict(momentum=0)], ids=str
)
def test_sgd_is_torch_s(variant, dtype, options):
    params = parameters(variant.device)
    twins = [torch.nn.Parameter(p) for p in lists.exact(params)]
    optimizer, oracle = FusedSGD(params, **(SGD | options)), torch.optim.SGD(twins, **(SGD | options))
    outputs = [torch.zeros_like(p, dtype=dtype, requires_grad=False) for p in params]
    for step in range(3):
        grads = gradients(variant.device, step, dtype, 4.0)
        given = [g if step or i else None for i, g in enumerate(grads)]  # the first one begins later
        for q, g in zip(twins, given, strict=True):
            q.grad = None if g is None else lists.exact([g])[0] / 4
        optimizer.step(grads=given, output_params=outputs, scale=4.0)
        oracle.step()
    check(params, [q.detach() for q in twins])
    lists.assert_same_bits(outputs, [p.detach().to(dtype) for p in params])


def test_sgd_weight_decay_after_momentum():
    params = parameters("cpu")
    optimizer = FusedSGD(params, wd_after_momentum=True, **SGD)
    wanted, momentum = lists.exact(params), None
    for step in range(2):
        grads = gradients("cpu", step)
        optimizer.step(grads=grads, output_params=lists.empties([p.detach() for p in params], F16))
        exact = lists.exact(grads)
        momentum = exact if momentum is None else [0.5 * m + g for m, g in zip(momentum, exact, strict=True)]
        wanted = [p - 0.25 * (m + 0.125 * p) for p, m in zip(wanted, momentum, strict=True)]
    check(params, wanted)


def test_sgd_needs_what_fp16_optimizer_gives():
    params = parameters("cpu")
    optimizer = FusedSGD(params, **SGD)
    for given in (dict(), dict(grads=gradients("cpu", 0))):
        with pytest.raises(RuntimeError, match="FP16_Optimizer"):
            optimizer.step(**given)
    optimizer._amp_stash = object()
    with pytest.raises(RuntimeError, match="takes no part in apex.amp"):
        optimizer.step(grads=gradients("cpu", 0), output_params=params)


# ---- in FP16_Optimizer ---------------------------------------------------------------------------------------

KINDS = {
    "FusedAdam": lambda params: FusedAdam(params, **ADAM),
    "FusedSGD": lambda params: FusedSGD(params, **SGD),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.1),
}


@pytest.mark.parametrize("model", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_in_fp16_optimizer(variant, kind, model):
    """Masters take float32 steps of unscaled gradients; the model is their rounding; an overflow skips."""
    params = parameters(variant.device, model)
    optimizer = FP16_Optimizer(KINDS[kind](params), static_loss_scale=64.0, verbose=False)
    twins = [torch.nn.Parameter(p.detach().float()) for p in params]
    oracle = KINDS[kind](twins)
    for step in range(3):
        grads = gradients(variant.device, step, model)
        optimizer.zero_grad()
        optimizer.backward(sum((p.float() * g.float()).sum() for p, g in zip(params, grads, strict=True)))
        scaled = [p.grad.float() / 64 for p in params]
        if kind == "FusedLAMB":
            for twin, g in zip(twins, scaled, strict=True):
                twin.grad = g
            oracle.step()
        else:
            oracle.step(grads=scaled, output_params=[torch.zeros_like(g) for g in scaled])
        optimizer.step()
    (masters,) = optimizer.fp32_groups
    check(masters, lists.exact(twins))
    lists.assert_same_bits([p.detach() for p in params], [m.detach().to(model) for m in masters])
    before = lists.clones([m.detach() for m in masters])
    params[1].grad[0, 0] = math.inf
    optimizer.step()
    lists.assert_same_bits([m.detach() for m in masters], before)
    assert optimizer.cur_iter == 4


def test_fp16_optimizer_with_parameters_that_have_no_gradient():
    params = parameters("cpu", F16)
    optimizer = FP16_Optimizer(KINDS["FusedAdam"](params), dynamic_loss_scale=True, verbose=False)
    optimizer.cur_scale = 8.0
    optimizer.backward((params[0].float() ** 2).sum())
    before = lists.clones([p.detach() for p in params])
    optimizer.step()
    assert not torch.equal(params[0].detach(), before[0])
    lists.assert_same_bits([p.detach() for p in params[1:]], before[1:])
    twin = FP16_Optimizer(KINDS["FusedAdam"](parameters("cpu", F16)), dynamic_loss_scale=True, verbose=False)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert twin.cur_scale == 8.0
    lists.assert_same_bits(
        [m.detach() for m in twin.fp32_groups[0]], [m.detach() for m in optimizer.fp32_groups[0]]
    )
