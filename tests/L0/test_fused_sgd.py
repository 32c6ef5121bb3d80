"""FusedSGD against torch.optim.SGD in float64, on everything that can serve it."""

from __future__ import annotations

import collections
import copy
import pickle
import types

import lists
import pytest
import torch
import training
from lists import BF16, F16, F32, F64, scalar
from torch.utils._python_dispatch import TorchDispatchMode

from apex.optimizers import FusedSGD
from apex.optimizers._scalars import learning_rate

DTYPES = (F32, F16, BF16, F64)
OPTIONS = [
    dict(lr=0.1),
    dict(lr=0.1, weight_decay=0.1),
    dict(lr=0.1, momentum=0.9),
    dict(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
]
MOMENTUM = OPTIONS[3]


def _pair(device, dtype=F32, shapes=training.SHAPES, **options):
    """FusedSGD, torch's SGD, their parameters."""
    params = training.parameters(dtype, device, shapes)
    twins = training.twins_of(params)
    return FusedSGD(params, **options), torch.optim.SGD(twins, **options), params, twins


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_torchs(variant, dtype, options):
    fused, oracle, params, twins = _pair(variant.device, dtype, **options)
    training.train(fused, oracle, params, twins)
    training.assert_trained(params, twins)


def test_large_tensors(variant):
    fused, oracle, params, twins = _pair(variant.device, BF16, lists.SHAPES, **MOMENTUM)
    training.train(fused, oracle, params, twins, steps=2)
    training.assert_trained(params, twins, steps=2)


@pytest.mark.parametrize("nesterov", [False, True])
def test_decay_after_momentum(variant, nesterov):
    """Public apex's own option."""
    options = dict(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    params = training.parameters(F32, variant.device)
    twins = training.twins_of(params)

    def update(state, p, g):
        state["buffer"] = 0.9 * state["buffer"] + g if state else g
        step = g + 0.9 * state["buffer"] if nesterov else state["buffer"]
        return p - 0.1 * (step + 0.1 * p)

    training.train(
        FusedSGD(params, wd_after_momentum=True, **options), training.Oracle(twins, update), params, twins
    )
    training.assert_trained(params, twins)


def test_first_steps_come_one_by_one(variant):
    """Each parameter's first gradient enters its buffer whole, as in torch; a missing one changes nothing."""
    fused, oracle, params, twins = _pair(variant.device, **MOMENTUM)
    for step, without in enumerate([(0, 3), (3,), (2,), ()], start=1):
        before = lists.clones([params[i] for i in without])
        training.give_gradients(params, twins, step, without=without)
        fused.step()
        oracle.step()
        lists.assert_same_bits([params[i] for i in without], before)
    training.assert_trained(params, twins, steps=4)


def test_memory_orders(variant):
    params = [torch.nn.Parameter(t) for t in lists.channels_last(F32, variant.device)]
    params += [torch.nn.Parameter(t) for t in lists.misaligned(lists.random(F32, variant.device, ((5, 9),)))]
    twins = training.twins_of(params)
    strides = [p.stride() for p in params]
    training.train(FusedSGD(params, **MOMENTUM), torch.optim.SGD(twins, **MOMENTUM), params, twins)
    training.assert_trained(params, twins)
    assert [p.stride() for p in params] == strides


def test_gradients_of_other_strides(variant):
    params = [torch.nn.Parameter(t) for t in lists.channels_last(F32, variant.device)]
    twins = training.twins_of(params)
    fused, oracle = FusedSGD(params, **MOMENTUM), torch.optim.SGD(twins, **MOMENTUM)
    training.give_gradients(params, twins, 1)
    for p in params:
        p.grad = p.grad.contiguous()
    fused.step()
    oracle.step()
    training.assert_trained(params, twins, steps=1)


def test_a_parameter_with_gaps(variant):
    """No kernel takes it; the reference does."""
    variant.mixed = True
    params = [torch.nn.Parameter(torch.randn(6, 10, device=variant.device, dtype=F32)[:, ::3])]
    twins = training.twins_of(params)
    training.train(FusedSGD(params, **MOMENTUM), torch.optim.SGD(twins, **MOMENTUM), params, twins)
    training.assert_trained(params, twins)


def test_one_launch_a_dtype(variant):
    params = [p for dtype in DTYPES * 2 for p in training.parameters(dtype, variant.device)]
    twins = training.twins_of(params)
    training.train(FusedSGD(params, **MOMENTUM), torch.optim.SGD(twins, **MOMENTUM), params, twins)
    training.assert_trained(params, twins)
    assert training.launches(variant, "multi_tensor_sgd") in (None, 3 * len(DTYPES))


def test_gradients_of_another_dtype(variant):
    for dtype in (F16, BF16):
        (p,) = training.parameters(dtype, variant.device, ((9,),))
        before = p.detach().clone()
        if not training.any_grad_dtype(p, F32):
            pytest.skip(f"torch {torch.__version__} gives gradients the parameter's dtype")
        FusedSGD([p], lr=0.25, momentum=0.9).step()
        lists.assert_near([p], [x - 0.25 for x in lists.exact([before])])


def test_groups(variant):
    params = training.parameters(F32, variant.device)
    twins = training.twins_of(params)

    def groups(p):
        return [
            dict(params=p[:2], lr=0.2, momentum=0.5),
            dict(params=p[2:4], nesterov=True),
            dict(params=p[4:]),
        ]

    fused, oracle = (
        kind(groups(p), lr=0.1, momentum=0.9) for kind, p in ((FusedSGD, params), (torch.optim.SGD, twins))
    )
    training.train(fused, oracle, params, twins)
    extra = training.parameters(F32, variant.device, ((3,),), seed=9)
    extra_twins = training.twins_of(extra)
    fused.add_param_group(dict(params=extra))
    oracle.add_param_group(dict(params=extra_twins))
    training.train(fused, oracle, params + extra, twins + extra_twins)
    training.assert_trained(params + extra, twins + extra_twins, steps=6)


def test_nothing_to_do(variant):
    FusedSGD(training.parameters(F32, variant.device), lr=0.1).step()
    FusedSGD([dict(params=[])], lr=0.1).step()
    assert not training.launches(variant, "multi_tensor_sgd")


def test_closure_and_zero_grad(variant):
    (p,) = training.parameters(F32, variant.device, ((5,),))
    optimizer = FusedSGD([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    optimizer.zero_grad()
    assert p.grad.eq(0).all()
    FusedSGD([p], lr=0.1, set_grad_none=True).zero_grad()
    assert p.grad is None


class Counted(TorchDispatchMode):
    """Counts torch's ops by name."""

    def __init__(self):
        super().__init__()
        self.ops = collections.Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops[str(op.overloadpacket)] += 1
        return op(*args, **(kwargs or {}))


def test_gradients_are_zeroed_by_dtype():
    """In place, without history, and not one by one."""
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype, device="cpu")) for dtype in (F32, F32, F16, F32)]
    params.append(torch.nn.Parameter(torch.ones(3, dtype=F32, device="cpu")))  # without gradient
    x = torch.ones(3, requires_grad=True, dtype=F32, device="cpu")
    for p in params[:3]:
        p.grad = torch.ones_like(p)
    params[0].grad = (2 * x).sin()  # as create_graph leaves them
    params[3].grad = torch.ones(3, requires_grad=True, dtype=F32, device="cpu")
    grads = [p.grad for p in params]
    optimizer = FusedSGD(params, lr=0.1)
    with Counted() as counted:
        optimizer.zero_grad()
    assert counted.ops["aten._foreach_zero_"] == 2 and not counted.ops["aten.zero_"]
    for p, grad in zip(params, grads, strict=True):
        assert p.grad is grad
        assert grad is None or not (grad.any() or grad.requires_grad or grad.grad_fn)


# ---- states --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buffers_have_the_parameters_dtype(variant, dtype):
    """As torch's and public apex's have."""
    fused, oracle, params, twins = _pair(variant.device, dtype, **MOMENTUM)
    training.train(fused, oracle, params, twins, steps=2)
    buffers = training.state_values(fused, "momentum_buffer")
    assert all(b.dtype == dtype for b in buffers)
    values = lists.exact(training.state_values(oracle, "momentum_buffer"))
    decayed = 2 * MOMENTUM["weight_decay"] * lists.ROUNDING[dtype] * 4  # from the parameter's rounding
    lists.assert_near(buffers, values, arithmetic=8, smallest=decayed + 16 * lists.ROUNDING[buffers[0].dtype])


def test_no_buffers_without_momentum(variant):
    fused, oracle, params, twins = _pair(variant.device, lr=0.1)
    training.train(fused, oracle, params, twins)
    assert not training.state_values(fused, "momentum_buffer")


def test_momentum_that_comes_and_goes(variant):
    fused, oracle, params, twins = _pair(variant.device, lr=0.1)
    for momentum in (0.0, 0.9, 0.9, 0.0, 0.5):
        fused.param_groups[0]["momentum"] = oracle.param_groups[0]["momentum"] = momentum
        training.train(fused, oracle, params, twins, steps=1)
    training.assert_trained(params, twins, steps=5)


def test_a_skipped_first_step_is_still_to_come(variant):
    fused, oracle, params, twins = _pair(variant.device, **MOMENTUM)
    training.give_gradients(params, twins, 7)
    fused.found_inf = scalar(1.0, variant.device)
    fused.step()
    del fused.found_inf
    assert all(b.eq(0).all() and b.signbit().all() for b in training.state_values(fused, "momentum_buffer"))
    training.train(fused, oracle, params, twins)
    training.assert_trained(params, twins)


def test_state_dict_round_trip(variant):
    fused, _, params, twins = _pair(variant.device, BF16, **MOMENTUM)
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    training.train(fused, training.Oracle(twins, lambda state, p, g: p), params, twins, steps=2, without=(2,))
    other = FusedSGD(again, **MOMENTUM)
    other.load_state_dict(copy.deepcopy(fused.state_dict()))
    for p, q in zip(again, params, strict=True):
        p.data.copy_(q)
    for step in (3, 4):
        training.give_gradients(params, twins, step)
        training.give_gradients(again, twins, step)
        fused.step()
        other.step()
    lists.assert_same_bits(again, params)
    lists.assert_same_bits(*(training.state_values(o, "momentum_buffer") for o in (other, fused)))


@pytest.mark.parametrize("options", [dict(lr=0.1), MOMENTUM], ids=str)
def test_continues_torchs_checkpoint(variant, options):
    _, oracle, params, twins = _pair(variant.device, F32, **options)
    training.train(
        training.Oracle(params, lambda state, p, g: p), oracle, params, twins, steps=2, without=(2,)
    )
    with torch.no_grad():
        for p, twin in zip(params, twins, strict=True):
            p.copy_(twin)
    fused = FusedSGD(params, lr=99.0)
    fused.load_state_dict(oracle.state_dict())
    for step in (3, 4):
        training.give_gradients(params, twins, step)
        fused.step()
        oracle.step()
    training.assert_trained(params, twins, steps=2)


def test_a_loaded_buffers_negative_zeros_are_values(variant):
    """Other optimizers store -0.0 like any result; here it would say that no step was taken."""
    (p,) = training.parameters(F32, variant.device, ((3,),))
    p.grad = torch.ones_like(p)
    fused = FusedSGD([p], lr=0.0, momentum=0.9, dampening=0.5)
    fused.step()
    checkpoint = copy.deepcopy(fused.state_dict())
    checkpoint["state"][0]["momentum_buffer"] = torch.tensor([-0.0, 1.0, -0.0], dtype=F32, device="cpu")
    fused.load_state_dict(checkpoint)
    fused.step()
    expected = torch.tensor([0.5, 1.4, 0.5], dtype=F64, device="cpu")
    lists.assert_near(training.state_values(fused, "momentum_buffer"), [expected])


def test_continues_public_apexs_checkpoint(variant):
    """Its buffers have the parameter's dtype."""
    (p,) = training.parameters(F16, variant.device, ((5,),))
    p.grad = torch.zeros_like(p)
    fused = FusedSGD([p], lr=0.0, momentum=0.5)
    fused.step()
    checkpoint = copy.deepcopy(fused.state_dict())
    checkpoint["state"][0]["momentum_buffer"] = torch.full((5,), 3.0, dtype=F16, device="cpu")
    fused.load_state_dict(checkpoint)
    fused.step()
    (buffer,) = training.state_values(fused, "momentum_buffer")
    assert buffer.dtype == F16 and buffer.eq(1.5).all()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("options", OPTIONS[2:], ids=str)
def test_is_torchs_of_the_same_dtype(variant, dtype, options):
    """torch.optim.SGD with half parameters and so with half buffers: they differ by roundings of a step alone."""
    params, twins = (training.parameters(dtype, device) for device in (variant.device, "cpu"))
    fused, oracle = FusedSGD(params, **options), torch.optim.SGD(twins, **options)
    for step in range(5):
        for index, (p, twin) in enumerate(zip(params, twins, strict=True)):
            (gradient,) = lists.random(dtype, "cpu", [p.shape], seed=100 * step + index)
            p.grad, twin.grad = gradient.to(p.device), gradient.clone()
        fused.step()
        oracle.step()
        found, wanted = (training.state_values(o, "momentum_buffer") for o in (fused, oracle))
        assert [b.dtype for b in found] == [b.dtype for b in wanted]
        lists.assert_near(
            params, lists.exact(twins), arithmetic=0, smallest=4 * (step + 1) * lists.ROUNDING[dtype]
        )


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_underflow_is_no_first_step(variant, dtype):
    """A buffer that rounds to -0 has taken its step: dampening goes on."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    p = torch.nn.Parameter(torch.zeros(3, dtype=dtype, device=variant.device))
    fused = FusedSGD([p], lr=1.0, momentum=0.5, dampening=0.5)
    for gradient in (-smallest, 0.0, 8.0):
        p.grad = torch.full_like(p, gradient)
        fused.step()
    (buffer,) = training.state_values(fused, "momentum_buffer")
    assert buffer.eq(4.0).all()


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_copies_keep_their_options(variant, again):
    options = dict(lr=0.1, momentum=0.9, wd_after_momentum=True, materialize_master_grads=False)
    fused = FusedSGD(training.parameters(F32, variant.device), **options)
    copied = again(fused)
    assert copied.wd_after_momentum and not copied.materialize_master_grads
    for p in copied.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    copied.step()


def test_get_momentums(variant):
    """Public apex's helper: the buffers, and whether this is their first step."""
    params = training.parameters(F32, variant.device)
    fused = FusedSGD(params, **MOMENTUM)
    buffers, first = fused.get_momentums(params)
    assert first and [b.shape for b in buffers] == [p.shape for p in params]
    again, first = fused.get_momentums(params)
    assert not first and all(a is b for a, b in zip(again, buffers, strict=True))


# ---- scalars on the device, loss scaling ---------------------------------------------------------------


def test_a_tensor_as_learning_rate(variant):
    lr = torch.tensor(0.1, device=variant.device, dtype=F32)
    fused, _, params, twins = _pair(variant.device, lr=lr, momentum=0.9)
    oracle = torch.optim.SGD(twins, lr=0.1, momentum=0.9)
    training.train(fused, oracle, params, twins)
    lr.fill_(0.5)
    oracle.param_groups[0]["lr"] = 0.5
    training.train(fused, oracle, params, twins)
    training.assert_trained(params, twins, steps=6)


@pytest.mark.parametrize("dtype", [F32, F64, F16], ids=str)
def test_a_rate_on_the_device_is_read_there_as_float32(dtype):
    device = torch.device("meta")
    for kept_there in (False, True):
        scalars = learning_rate({"lr": torch.empty((), dtype=dtype, device=device)}, device, kept_there)
        assert scalars["lr"] == 0.0 and scalars["lr_tensor"].dtype == F32
        assert scalars["lr_tensor"].device == device


def test_a_rate_on_the_cpu_is_a_number_unless_it_is_kept_on_the_device():
    group = {"lr": torch.full((), 0.5, dtype=F64, device="cpu")}
    for device in (torch.device("meta"), torch.device("cpu")):
        assert learning_rate(group, device) == dict(lr=0.5, lr_tensor=None)
        kept = learning_rate(group, device, kept_there=True)
        assert kept["lr"] == 0.0 and kept["lr_tensor"].device == device and kept["lr_tensor"].dtype == F32
        assert learning_rate({"lr": 0.25}, device, kept_there=True) == dict(lr=0.25, lr_tensor=None)


def test_unscales_on_the_device(variant):
    """By what torch.amp.GradScaler leaves on the optimizer."""
    fused, oracle, params, twins = _pair(variant.device, F16, **MOMENTUM)
    fused.grad_scale = scalar(4.0, variant.device)
    fused.found_inf = scalar(0.0, variant.device)
    training.train(fused, oracle, params, twins, scale=4.0)
    training.assert_trained(params, twins)


def test_under_a_grad_scaler(variant):
    fused, oracle, params, twins = _pair(variant.device, F32, **MOMENTUM)
    scaler = torch.amp.GradScaler(variant.device.type, init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.zeros((), device=variant.device, dtype=F32))  # makes the scale
    for step in (1, 2, 3):
        training.give_gradients(params, twins, step, scale=scaler.get_scale())
        if step == 2:
            params[-1].grad[-1] = float("inf")
        else:
            oracle.step()
        scaler.step(fused)
        scaler.update()
    assert scaler.get_scale() == 512.0
    training.assert_trained(params, twins)


@pytest.mark.gpu
def test_a_captured_step(variant):
    """Replays take new gradients, a new learning rate and a raised flag."""
    lr = torch.tensor(0.1, device=variant.device, dtype=F32)
    fused, _, params, twins = _pair(variant.device, F32, lr=lr, momentum=0.9, dampening=0.5)
    oracle = torch.optim.SGD(twins, lr=0.1, momentum=0.9, dampening=0.5)
    training.replay(fused, oracle, params, twins, lr)
    training.assert_trained(params, twins, steps=4)


# ---- amp's master weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("half", [F16, BF16], ids=str)
def test_amps_master_weights(variant, half, materialize, momentum):
    """In amp's stash: masters stand in the groups, and step() keeps the half parameters as rounded copies.

    Without momentum, which the op with copies has, it leaves them to amp.
    """
    models = training.parameters(half, variant.device)
    full = training.parameters(F32, variant.device, ((3,), (130,)), seed=5)
    masters = [torch.nn.Parameter(p.detach().float()) for p in models]
    twins = training.twins_of(masters + full)
    options = dict(lr=0.1, momentum=momentum, dampening=0.5 if momentum else 0.0, weight_decay=0.1)
    fused = FusedSGD(masters + full, materialize_master_grads=materialize, **options)
    fused._amp_stash = types.SimpleNamespace(
        fp16_groups=[models], fp32_from_fp16_groups=[masters], fp32_from_fp32_groups=[full]
    )
    oracle = torch.optim.SGD(twins, **options)
    for step, without in enumerate([(1, 3), (), (2,)], start=1):
        training.give_gradients(models + full, twins, step, scale=4.0, without=without)
        if materialize:
            for model, master in zip(models, masters, strict=True):
                master.grad, model.grad = None if model.grad is None else model.grad.float(), None
        fused.most_recent_scale, fused.scale_set_by_backward = 4.0, True
        fused.step()
        oracle.step()
        assert fused.most_recent_scale == 1.0 and not fused.scale_set_by_backward
    training.assert_trained(masters + full, twins)
    assert fused.writes_models() == (momentum != 0)
    if momentum:
        lists.assert_near(models, lists.exact(masters), arithmetic=0)


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, options",
    [
        ("lr must not be negative", dict(lr=-1.0)),
        ("lr must not be negative", dict(lr=float("nan"))),
        ("momentum must not be negative", dict(lr=0.1, momentum=-0.1)),
        ("weight_decay must not be negative", dict(lr=0.1, weight_decay=-0.1)),
        ("Nesterov momentum requires", dict(lr=0.1, nesterov=True)),
        ("Nesterov momentum requires", dict(lr=0.1, nesterov=True, momentum=0.9, dampening=0.1)),
        ("didn't specify a value of required", dict()),
    ],
)
def test_bad_options(words, options):
    with pytest.raises(ValueError, match=words):
        FusedSGD([torch.nn.Parameter(torch.ones(1, dtype=F32, device="cpu"))], **options)


def test_bad_parameters(variant):
    def step(p, grad):
        p.grad = grad
        FusedSGD([p], lr=0.1, momentum=0.9).step()

    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64, device=variant.device))
    with pytest.raises(TypeError, match="parameter 0 of group 0 is torch.complex64"):
        step(p, torch.ones_like(p))
    p = torch.nn.Parameter(torch.ones(3, 2, device=variant.device, dtype=F32))
    with pytest.raises(RuntimeError, match="sparse gradient"):
        step(p, torch.ones_like(p).to_sparse())
