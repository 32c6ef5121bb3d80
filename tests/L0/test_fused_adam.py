"""FusedAdam against torch.optim in float64, and everything that users did to optimizers of public apex."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
import warnings
from types import SimpleNamespace

import lists
import pytest
import torch
import training
from lists import BF16, F16, F32, F64

from apex._loader import bindings
from apex.optimizers import FusedAdam

SHAPES = ((33, 5), (7,), (1,), (2, 3, 4, 5), (1031,))
HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)


def parameters(device, dtype=F32, shapes=SHAPES, seed=1):
    return [torch.nn.Parameter(x) for x in lists.random(dtype, device, shapes, seed=seed)]


def set_gradients(params, seed):
    """New gradients, the same for one seed whatever the device; their layout is the parameter's."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        value = torch.randn(p.shape, generator=generator, dtype=F64, device="cpu")
        p.grad = torch.empty_like(p).copy_(value)


def twin(params, **options):
    """The same parameters in float64 on the CPU under torch's optimizer: the oracle."""
    options = HYPER | options
    kind = torch.optim.AdamW if options.pop("adam_w_mode", True) else torch.optim.Adam
    copies = [torch.nn.Parameter(p.detach().to("cpu", F64)) for p in params]
    return copies, kind(copies, **options)


def step_both(params, optimizer, copies, oracle, seed):
    """One step of each, from the same gradients as the parameter's dtype holds them."""
    set_gradients(params, seed)
    for p, q in zip(params, copies, strict=True):
        q.grad = None if p.grad is None else p.grad.to("cpu", F64)
    optimizer.step()
    oracle.step()


def assert_close(params, copies, tolerance=1e-6):
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p.detach().to("cpu", F64), q.detach(), rtol=tolerance, atol=tolerance)


def bits(params, optimizer):
    """Everything that a step changes, copied."""
    states = [value for p in params for value in optimizer.state.get(p, {}).values()]
    return lists.clones([p.detach() for p in params] + states)


def train(params, optimizer, seeds):
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()


# ---- parity ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
def test_parity_over_steps(variant, adam_w_mode, decay, capturable):
    params = parameters(variant.device)
    options = dict(adam_w_mode=adam_w_mode, weight_decay=decay)
    optimizer = FusedAdam(params, **(HYPER | options), capturable=capturable)
    copies, oracle = twin(params, **options)
    for seed in range(8):
        step_both(params, optimizer, copies, oracle, seed)
    assert_close(params, copies)
    for p, q in zip(params, copies, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            found, wanted = optimizer.state[p][name], oracle.state[q][name]
            torch.testing.assert_close(found.cpu().to(F64), wanted, rtol=1e-5, atol=1e-7)
    assert int(optimizer.param_groups[0]["step"]) == 8


def test_double(variant):
    params = parameters(variant.device, F64)
    optimizer = FusedAdam(params, **HYPER)
    copies, oracle = twin(params)
    for seed in range(8):
        step_both(params, optimizer, copies, oracle, seed)
    assert_close(params, copies, 1e-13)
    assert all(state["exp_avg"].dtype == F64 for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_low_precision_rounds_once_a_step(variant, dtype):
    """Each step is torch's from the values that are there, rounded once; moments are float32."""
    params = parameters(variant.device, dtype)
    optimizer = FusedAdam(params, **HYPER)
    for step in range(1, 5):
        copies, oracle = twin(params)
        for p, q in zip(params, copies, strict=True):
            if step > 1:
                state = {name: optimizer.state[p][name].cpu().to(F64) for name in ("exp_avg", "exp_avg_sq")}
                oracle.state[q] = {"step": torch.tensor(float(step - 1), dtype=F32, device="cpu"), **state}
        step_both(params, optimizer, copies, oracle, step)
        lists.assert_near([p.detach() for p in params], [q.detach() for q in copies], smallest=1e-6)
    assert all(state["exp_avg"].dtype == F32 for state in optimizer.state.values())


def test_groups_with_options_of_their_own(variant):
    params = parameters(variant.device)
    copies, _ = twin(params)

    def groups(p):
        return [
            {"params": p[:2], "lr": 0.1, "weight_decay": 0.0},
            {"params": p[2:3], "betas": (0.5, 0.7), "eps": 1e-3},
            {"params": p[3:]},
        ]

    optimizer, oracle = FusedAdam(groups(params), **HYPER), torch.optim.AdamW(groups(copies), **HYPER)
    for seed in range(4):
        step_both(params, optimizer, copies, oracle, seed)
    assert_close(params, copies)


def test_without_bias_correction(variant):
    params = parameters(variant.device, shapes=((5,),))
    optimizer = FusedAdam(params, lr=0.5, betas=(0.5, 0.75), eps=0.0, weight_decay=0.0, bias_correction=False)
    before = params[0].detach().clone()
    params[0].grad = torch.full((5,), 2.0, device=variant.device, dtype=F32)
    optimizer.step()  # exp_avg 1, exp_avg_sq 1
    torch.testing.assert_close(params[0].detach(), before - 0.5)


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("master_weights", [False, True], ids=["", "masters"])
def test_without_bindings(monkeypatch, capturable, master_weights):
    """A torch that nothing was compiled for: the same steps, by the reference alone."""
    monkeypatch.setattr(bindings, "load", lambda: bindings.Loaded("reference", None, "none here"))
    params = parameters("cpu")
    params.append(torch.nn.Parameter(torch.ones(4, dtype=F32, device="cpu")))
    optimizer = FusedAdam(params, **HYPER, capturable=capturable, master_weights=master_weights)
    copies, oracle = twin(params)
    for seed in range(6):
        step_both(params, optimizer, copies, oracle, seed)
        if seed == 2:  # states in the user's hands, as further below
            for p, q in ((params[1], copies[1]), (params[2], copies[2])):
                optimizer.state[p]["exp_avg"] = torch.ones_like(p)
                oracle.state[q]["exp_avg"] = torch.ones_like(q)
    assert_close(params, copies)
    assert int(optimizer.param_groups[0]["step"]) == 6


def test_learning_rate_schedule(variant):
    params = parameters(variant.device)
    copies, oracle = twin(params)
    optimizer = FusedAdam(params, **HYPER)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, oracle)]
    for seed in range(4):
        step_both(params, optimizer, copies, oracle, seed)
        for schedule in schedules:
            schedule.step()
    assert_close(params, copies)


def test_one_launch_a_dtype(variant):
    if not variant.simt:
        pytest.skip("launches are counted on the executor")
    params = [p for dtype in (F32, F16, BF16) for p in parameters(variant.device, dtype)]
    optimizer = FusedAdam(params, **HYPER)
    train(params, optimizer, range(2))
    launches = {name: n for name, n in variant.kernels.items() if "adam" in name}
    assert launches == {f"multi_tensor_adam_{t}_{t}": 2 for t in ("f32", "f16", "bf16")}
    variant.kernels.clear()
    optimizer.step()
    assert "multi_tensor_table_write" not in variant.kernels  # no address changed: nothing is uploaded


def test_hundreds_of_parameters(variant):
    params = parameters(variant.device, shapes=[(n % 23,) for n in range(lists.MANY)])
    optimizer = FusedAdam(params, **HYPER)
    copies, oracle = twin(params)
    for seed in range(2):
        step_both(params, optimizer, copies, oracle, seed)
    assert_close(params, copies)


def test_same_bits_again(variant):
    results = []
    for _ in range(2):
        params = parameters(variant.device)
        optimizer = FusedAdam(params, **HYPER)
        train(params, optimizer, range(4))
        results.append(bits(params, optimizer))
    lists.assert_same_bits(*results)


# ---- which parameters have gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
def test_the_group_counts_its_steps(variant, capturable):
    """Report 29: {float32 a, bfloat16 b}, b with a gradient every second step only. The count is the group's:
    it advances once a step(), and b's correction goes by it."""
    a, b = parameters(variant.device, F32, ((5,),)) + parameters(variant.device, BF16, ((6,),))
    optimizer = FusedAdam([a, b], lr=2.0**-7, weight_decay=0.0, capturable=capturable)
    copies, oracle = twin([a], lr=2.0**-7, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    moments = torch.zeros(2, 6, dtype=F64, device="cpu")
    for step in range(1, 11):
        set_gradients([a, b], step)
        copies[0].grad = a.grad.cpu().to(F64)
        expected = b.detach().cpu().to(F64)
        if step % 2:
            b.grad = None
        else:
            g = b.grad.cpu().to(F64)
            moments[0].lerp_(g, 0.1)
            moments[1].lerp_(g * g, 0.001)
            m, v = moments[0] / (1 - 0.9**step), moments[1] / (1 - 0.999**step)
            expected -= 2.0**-7 * m / (v.sqrt() + 1e-8)
        optimizer.step()
        oracle.step()
        assert int(optimizer.param_groups[0]["step"]) == step
        lists.assert_near([b.detach()], [expected], smallest=1e-6)
    assert_close([a], copies)


def test_a_parameter_without_gradient_is_left_alone(variant):
    """Report 53: an unused layer. No state is made for it before its first gradient."""
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER)
    before = [p.detach().clone() for p in params]
    set_gradients(params, 1)
    params[1].grad = params[3].grad = None
    optimizer.step()
    for i, p in enumerate(params):
        assert (i in (1, 3)) == torch.equal(p.detach(), before[i])
        assert (i in (1, 3)) == (not optimizer.state.get(p))
    set_gradients(params, 2)
    optimizer.step()
    assert all(len(optimizer.state[p]) == 2 for p in params)
    lone = bits(params[1:2], optimizer)
    params[1].grad = None
    optimizer.step()
    lists.assert_same_bits(bits(params[1:2], optimizer), lone)


def test_no_gradient_at_all(variant):
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER)
    before = bits(params, optimizer)
    optimizer.step()
    lists.assert_same_bits(bits(params, optimizer), before)
    assert not any("adam" in name for name in variant.kernels)


def test_empty_groups_and_empty_parameters(variant):
    empty = torch.nn.Parameter(torch.empty(0, 3, device=variant.device, dtype=F32))
    params = parameters(variant.device)
    optimizer = FusedAdam(
        [{"params": []}, {"params": [empty]}, {"params": [empty.detach().clone(), *params]}]
    )
    set_gradients([empty, *params], 1)
    optimizer.step()
    optimizer.step()
    assert params[0].grad is not None and optimizer.param_groups[2]["step"] == 2


@pytest.mark.parametrize("order", [0, 1], ids=["empty last", "empty first"])
def test_empty_parameters_do_not_keep_the_step_from_counting(variant, order):
    """The launch that advances a step on the device must be one that takes place."""
    params = parameters(variant.device, F32, ((5,),)) + parameters(variant.device, BF16, ((0,),))
    optimizer = FusedAdam(params[::-1] if order else params, lr=0.1, capturable=True)
    train(params, optimizer, range(3))
    assert optimizer.param_groups[0]["step"].item() == 3
    empty = parameters(variant.device, F32, ((0,),))
    optimizer = FusedAdam(empty, lr=0.1, capturable=True)
    train(empty, optimizer, range(3))
    assert optimizer.param_groups[0]["step"].item() == 3


def test_gradient_accumulation_into_the_same_tensors(variant):
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER, set_grad_none=False)
    set_gradients(params, 1)
    kept = [p.grad for p in params]
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is g and not g.any() for p, g in zip(params, kept, strict=True))
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params)


# ---- memory ------------------------------------------------------------------------------------------------


def test_parameters_that_are_views(variant):
    """A flat buffer, as distributed optimizers keep: views begin anywhere."""
    sizes = (5, 1, 64, 3, 17)
    flat = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1), dtype=F32, device="cpu").to(
        variant.device
    )
    before = flat.clone()
    params = [torch.nn.Parameter(view) for view in flat.split(sizes)]
    assert all(p.data_ptr() == v.data_ptr() for p, v in zip(params, flat.split(sizes), strict=True))
    optimizer = FusedAdam(params, **HYPER)
    copies, oracle = twin(params)
    for seed in range(3):
        step_both(params, optimizer, copies, oracle, seed)
    assert_close(params, copies)
    assert not torch.equal(flat, before)


def test_channels_last(variant):
    image = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(1), dtype=F32, device="cpu").to(
        variant.device
    )
    params = [torch.nn.Parameter(image.to(memory_format=torch.channels_last))]
    optimizer = FusedAdam(params, **HYPER)
    copies, oracle = twin(params)
    for seed in range(3):
        step_both(params, optimizer, copies, oracle, seed)
    assert_close(params, copies)
    assert params[0].is_contiguous(memory_format=torch.channels_last)
    assert optimizer.state[params[0]]["exp_avg"].stride() == params[0].stride()


def test_gradients_with_other_strides(variant):
    """Elements are matched by index, not by place in memory; gaps and repeats too."""
    params = parameters(variant.device, shapes=((4, 6), (2, 3, 5, 7), (4, 9), (6, 4)))
    optimizer = FusedAdam(params, **HYPER)
    copies, oracle = twin(params)
    for seed in range(3):
        set_gradients(params, seed)
        params[0].grad = params[0].grad.t().contiguous().t()
        params[1].grad = params[1].grad.to(memory_format=torch.channels_last)
        params[2].grad = torch.full((4, 1), 0.5 + seed, device=variant.device, dtype=F32).expand(4, 9)
        params[3].grad = torch.randn(6, 12, device=variant.device, dtype=F32)[:, ::3]
        for p, q in zip(params, copies, strict=True):
            q.grad = p.grad.to("cpu", F64)
        optimizer.step()
        oracle.step()
    assert_close(params, copies)


def test_gradients_and_data_replaced(variant):
    """New tensors between steps: the plan follows addresses, layouts and dtypes."""
    params = parameters(variant.device, shapes=((4, 6), (2, 3, 5, 7)))
    optimizer = FusedAdam(params, **HYPER)
    copies, oracle = twin(params)
    step_both(params, optimizer, copies, oracle, 1)
    for p in params:
        p.data = p.data.clone()
    step_both(params, optimizer, copies, oracle, 2)
    params[0].data = params[0].data.t().contiguous().t()
    params[1].data = params[1].data.to(memory_format=torch.channels_last)
    step_both(params, optimizer, copies, oracle, 3)
    step_both(params, optimizer, copies, oracle, 4)
    assert_close(params, copies)
    assert optimizer.state[params[1]]["exp_avg"].stride() == params[1].stride()


def test_model_turned_to_half_between_steps(variant):
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER)
    train(params, optimizer, [1])
    for p in params:
        p.data = p.data.to(BF16)
        p.grad = None
    train(params, optimizer, [2])
    assert all(p.dtype == BF16 and p.isfinite().all() for p in params)
    assert optimizer.param_groups[0]["step"] == 2


def test_parameter_that_is_no_dense_tensor(variant):
    """Rows with gaps between them: no kernel takes it, the reference does."""
    variant.mixed = True
    p = torch.nn.Parameter(torch.randn(6, 10, device=variant.device, dtype=F32)[:, :7])
    optimizer = FusedAdam([p], **HYPER)
    copies, oracle = twin([p])
    for seed in range(3):
        step_both([p], optimizer, copies, oracle, seed)
    assert_close([p], copies)


def test_writes_are_counted(variant):
    """Stepping between forward and backward is an error of autograd, not a wrong gradient."""
    p = torch.nn.Parameter(torch.ones(3, device=variant.device, dtype=F32))
    optimizer = FusedAdam([p], lr=0.1)
    loss = (p * p).sum()
    p.grad = torch.ones(3, device=variant.device, dtype=F32)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- what is refused ---------------------------------------------------------------------------------------


def test_constructor_refuses():
    p = [torch.nn.Parameter(torch.ones(3, dtype=F32, device="cpu"))]
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedAdam(p, amsgrad=True)
    negative = [{name: -1.0} for name in ("lr", "eps", "weight_decay")]
    for wrong in (*negative, dict(betas=(1.0, 0.9)), dict(betas=(0.9, -0.1))):
        with pytest.raises(ValueError):
            FusedAdam(p, **wrong)
    with pytest.raises(ValueError, match="empty parameter list"):
        FusedAdam([])


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_deprecated_arguments(name):
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(3, dtype=F32, device="cpu"))])
    with pytest.raises(RuntimeError, match="takes no gradients"):
        optimizer.step(**{name: 1.0})


def test_devices_that_do_not_go_together(variant):
    """Report 32: named by index and device before anything runs. Meta stands for the other device."""
    params = parameters(variant.device)
    params.append(torch.nn.Parameter(torch.ones(3, device="meta", dtype=F32)))
    optimizer = FusedAdam(params, **HYPER)
    set_gradients(params[:-1], 1)
    before = bits(params[:-1], optimizer)
    with pytest.raises(ValueError, match=r"parameter 5 of group 0 is on meta but parameter 0 is on"):
        optimizer.step()
    lists.assert_same_bits([p.detach() for p in params[:-1]], before)
    assert not variant.kernels and not variant.references


@pytest.mark.parametrize("freed", ["gradient", "parameter", "state", "gradient of other strides"])
def test_a_tensor_whose_memory_was_freed(freed):
    """As FSDP frees storages: neither read, nor taken for a parameter without gradient."""
    param = torch.nn.Parameter(torch.ones(4, 3, dtype=F32, device="cpu"))
    param.grad = (
        torch.ones(3, 4, dtype=F32, device="cpu").t()
        if "strides" in freed
        else torch.ones(4, 3, dtype=F32, device="cpu")
    )
    optimizer = FusedAdam([param])
    optimizer.step()
    tensors = {"parameter": param, "state": optimizer.state[param]["exp_avg"]}
    tensors.get(freed, param.grad).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"\[0\] has no memory"):
        optimizer.step()


def test_sparse_gradient(variant):
    params = parameters(variant.device, shapes=((5, 3), (7,)))
    optimizer = FusedAdam(params, **HYPER)
    set_gradients(params, 1)
    params[0].grad = torch.ones(5, 3, device=variant.device, dtype=F32).to_sparse()
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 has a sparse gradient"):
        optimizer.step()
    lists.assert_same_bits([p.detach() for p in params], before)
    set_gradients(params, 2)
    optimizer.step()
    params[0].grad = torch.ones(5, 3, device=variant.device, dtype=F32).to_sparse()
    before = [p.detach().clone() for p in params]
    with pytest.raises((RuntimeError, TypeError), match="sparse"):
        optimizer.step()
    lists.assert_same_bits([p.detach() for p in params], before)
    assert optimizer.param_groups[0]["step"] == 1


def test_integers():
    optimizer = FusedAdam([torch.ones(3, dtype=torch.int64, device="cpu")])
    with pytest.raises(TypeError, match="parameter 0 of group 0 is torch.int64"):
        optimizer.step()


# ---- closures, hooks, compilation --------------------------------------------------------------------------


def test_closure(variant):
    p = torch.nn.Parameter(torch.full((3,), 2.0, device=variant.device, dtype=F32))
    optimizer = FusedAdam([p], lr=0.1, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 12
    torch.testing.assert_close(p.detach(), torch.full_like(p, 1.9))


def test_hooks(variant):
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER)
    seen = []
    optimizer.register_step_pre_hook(lambda *a: seen.append("before"))
    optimizer.register_step_post_hook(lambda *a: seen.append("after"))
    train(params, optimizer, [1])
    assert seen == ["before", "after"]


def test_compiled_training_step(variant, counting_backend):
    """step() is opaque to torch.compile: the graphs around it are compiled, once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8, dtype=F32, device="cpu"),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 1, dtype=F32, device="cpu"),
    ).to(variant.device)
    other = copy.deepcopy(model)
    optimizer, plain = FusedAdam(model.parameters(), **HYPER), FusedAdam(other.parameters(), **HYPER)
    x = torch.randn(16, 4, device=variant.device, dtype=F32)

    def training_step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = torch.compile(training_step, backend=counting_backend)
    losses = []
    for i in range(5):
        losses.append(compiled(model, optimizer, x).item())
        training_step(other, plain, x)
        if i == 1:
            compilations = counting_backend.frame_count
    assert counting_backend.frame_count == compilations > 0
    assert losses == sorted(losses, reverse=True)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


# ---- capturable --------------------------------------------------------------------------------------------


def test_capturable_agrees_with_eager(variant):
    """With a learning rate that float32 holds, bit for bit."""
    results = []
    for capturable in (False, True):
        params = parameters(variant.device) + parameters(variant.device, BF16)
        optimizer = FusedAdam(params, lr=2.0**-7, weight_decay=0.1, capturable=capturable)
        train(params, optimizer, range(4))
        results.append(bits(params, optimizer))
    if variant.name != "reference":  # which takes powers of a tensor, not of a number
        lists.assert_same_bits(*results)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_learning_rate_in_place(variant):
    """Report 30: what a replay reads is the tensor in the group."""
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER, capturable=True)
    lr, step = optimizer.param_groups[0]["lr"], None
    copies, oracle = twin(params)
    for seed, rate in enumerate((0.01, 0.5, 0.0)):
        lr.fill_(rate)
        oracle.param_groups[0]["lr"] = rate
        step_both(params, optimizer, copies, oracle, seed)
        step = step if step is not None else optimizer.param_groups[0]["step"]
        assert optimizer.param_groups[0]["lr"] is lr and optimizer.param_groups[0]["step"] is step
    assert_close(params, copies)
    assert step.item() == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(F32,), (F32, BF16)], ids=["one dtype", "two dtypes"])
def test_a_captured_step(variant, dtypes):
    """Report 30: replays take new gradients, a new learning rate and a raised flag, and count their steps."""
    params = [p for dtype in dtypes for p in training.parameters(dtype, variant.device)]
    twins = training.twins_of(params)
    optimizer = FusedAdam(params, lr=0.1, capturable=True)
    oracle = torch.optim.AdamW(twins, lr=0.1, weight_decay=0.0)
    training.replay(optimizer, oracle, params, twins, optimizer.param_groups[0]["lr"])
    training.assert_trained(params, twins, steps=4)
    assert optimizer.param_groups[0]["step"].item() == 3


@pytest.mark.parametrize("unscaled_before", [False, True], ids=["", "unscale_ first"])
def test_gradient_scaler(variant, unscaled_before):
    """An overflow changes neither parameters, moments nor step; gradients are unscaled once."""
    # torch's check for overflows takes bfloat16 on the CPU alone; float16 it refuses to unscale.
    second = F32 if variant.name == "cuda" else BF16
    params = parameters(variant.device) + parameters(variant.device, second, ((9,),))
    optimizer = FusedAdam(params, **HYPER, capturable=True)
    copies, oracle = twin(params[:-1])
    scaler = torch.amp.GradScaler(variant.device.type, init_scale=2.0**10, growth_interval=100)
    scaler.scale(torch.ones(1, device=variant.device, dtype=F32))  # makes the scale's tensor

    def scaled_step(seed, bad=False):
        set_gradients(params, seed)
        for p, q in zip(params, copies, strict=False):
            q.grad = p.grad.cpu().to(F64)
        for p in params:
            p.grad *= scaler.get_scale()
        if bad:
            params[2].grad.view(-1)[0] = float("inf")
        if unscaled_before:
            scaler.unscale_(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's: it will hand the scale over otherwise
            scaler.step(optimizer)
        scaler.update()

    for seed in (1, 2):
        scaled_step(seed)
        oracle.step()
    assert_close(params[:-1], copies)
    before = bits(params, optimizer)
    scaled_step(3, bad=True)
    lists.assert_same_bits(bits(params, optimizer), before)
    assert optimizer.param_groups[0]["step"].item() == 2 and scaler.get_scale() == 2.0**9
    scaled_step(4)
    oracle.step()
    assert_close(params[:-1], copies)
    assert optimizer.param_groups[0]["step"].item() == 3


def test_gradient_scaler_of_a_later_torch(variant):
    """torch announces to set grad_scale and found_inf on the optimizer in place of passing the scaler."""
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER, capturable=True)
    copies, oracle = twin(params)
    set_gradients(params, 1)
    for p, q in zip(params, copies, strict=True):
        q.grad = p.grad.cpu().to(F64)
        p.grad *= 4
    optimizer.grad_scale = torch.tensor(4.0, device=variant.device, dtype=F32)
    optimizer.found_inf = torch.tensor(0.0, device=variant.device, dtype=F32)
    optimizer.step()
    oracle.step()
    assert_close(params, copies)
    before = bits(params, optimizer)
    optimizer.found_inf = torch.tensor(1.0, device=variant.device, dtype=F32)
    optimizer.step()
    lists.assert_same_bits(bits(params, optimizer), before)


def test_scaler_without_capturable(variant):
    """torch unscales and skips by itself."""
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER)
    copies, oracle = twin(params)
    scaler = torch.amp.GradScaler(variant.device.type, init_scale=4.0)
    scaler.scale(torch.ones(1, device=variant.device, dtype=F32))
    for seed, bad in enumerate((False, True, False)):
        set_gradients(params, seed)
        for p, q in zip(params, copies, strict=True):
            q.grad = p.grad.cpu().to(F64)
            p.grad *= scaler.get_scale()
        if bad:
            params[0].grad.view(-1)[0] = float("nan")
        else:
            oracle.step()
        scaler.step(optimizer)
        scaler.update()
    assert_close(params, copies)
    assert optimizer.param_groups[0]["step"] == 2


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
def test_gradients_of_another_dtype(variant, capturable):
    """Report 30: a float32 parameter of 16 elements with a bfloat16 gradient."""
    p = torch.nn.Parameter(torch.ones(16, device=variant.device, dtype=F32))
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch lets no parameter have a gradient of another dtype")
    p.grad_dtype = BF16
    optimizer = FusedAdam([p], lr=2.0**-7, weight_decay=0.0, capturable=capturable)
    copies, oracle = twin([p], lr=2.0**-7, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    for seed in range(3):
        gradient = torch.randn(16, generator=torch.Generator().manual_seed(seed), dtype=F32, device="cpu").to(
            BF16
        )
        p.grad, copies[0].grad = gradient.to(variant.device), gradient.to(F64)
        optimizer.step()
        oracle.step()
    assert_close([p], copies)


# ---- master weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_master_weights(variant, dtype, capturable):
    """Report 31: two groups of unequal length, 100 steps against float32 AdamW, cast down."""
    params = parameters(variant.device, dtype, ((5,), (33, 3), (1,), (7, 2)))
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]
    optimizer = FusedAdam(groups, **HYPER, master_weights=True, capturable=capturable)
    copies, _ = twin(params)
    oracle = torch.optim.AdamW([{"params": copies[:1]}, {"params": copies[1:], "lr": 0.05}], **HYPER)
    for seed in range(100):
        step_both(params, optimizer, copies, oracle, seed)
        for p in params:
            master = optimizer.state[p]["master_param"]
            assert master.dtype == F32 and torch.equal(p.detach(), master.to(dtype))
    masters = [m for group in optimizer.param_groups_master for m in group["params"]]
    assert [len(group["params"]) for group in optimizer.param_groups_master] == [1, 3]
    assert all(m is optimizer.state[p]["master_param"] for m, p in zip(masters, params, strict=True))
    assert_close(masters, copies, 1e-4)


def test_masters_survive_a_checkpoint(variant):
    """They hold what the rounded parameters have lost."""
    params = parameters(variant.device, BF16)
    optimizer = FusedAdam(params, **HYPER, master_weights=True)
    train(params, optimizer, range(3))
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = FusedAdam(again, **HYPER, master_weights=True)
    resumed.load_state_dict(_through_a_file(optimizer.state_dict()))
    for p, q in zip(params, again, strict=True):
        assert resumed.state[q]["master_param"].dtype == F32
        assert torch.equal(resumed.state[q]["master_param"], optimizer.state[p]["master_param"])
    for o, ps in ((optimizer, params), (resumed, again)):
        train(ps, o, range(3, 6))
    lists.assert_same_bits(bits(params, optimizer), bits(again, resumed))


# ---- checkpoints -------------------------------------------------------------------------------------------


def _through_a_file(state):
    """Saved, and loaded as a cautious user does."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("master_weights", [False, True], ids=["", "masters"])
def test_resume_equals_an_unbroken_run(variant, capturable, master_weights):
    def make():
        params = parameters(variant.device, F32 if not master_weights else F16)
        options = dict(capturable=capturable, master_weights=master_weights)
        return params, FusedAdam(params, **HYPER, **options)

    params, optimizer = make()
    train(params, optimizer, range(6))
    first, broken = make()
    train(first, broken, range(3))
    state = _through_a_file(broken.state_dict())
    second, resumed = make()
    for p, q in zip(first, second, strict=True):
        q.data.copy_(p.data)
    resumed.load_state_dict(state)
    train(second, resumed, range(3, 6))
    lists.assert_same_bits(bits(params, optimizer), bits(second, resumed))
    assert int(resumed.param_groups[0]["step"]) == 6


def test_layout_of_a_checkpoint(variant):
    """Public apex's: the count in the group, the moments by parameter; beside these torch's count."""
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER)
    train(params, optimizer, range(2))
    state = optimizer.state_dict()
    assert set(state["state"]) == set(range(len(params)))
    assert all(set(entry) == {"exp_avg", "exp_avg_sq", "step"} for entry in state["state"].values())
    assert all(set(optimizer.state[p]) == {"exp_avg", "exp_avg_sq"} for p in params)
    assert state["param_groups"][0]["step"] == 2


def test_state_keeps_its_precision(variant):
    """torch would round the moments to the parameter's dtype when it loads them."""
    params = parameters(variant.device, F16)
    optimizer = FusedAdam(params, **HYPER)
    train(params, optimizer, range(3))
    resumed = FusedAdam(params, **HYPER)
    resumed.load_state_dict(optimizer.state_dict())
    for p in params:
        for name, value in optimizer.state[p].items():
            assert resumed.state[p][name].dtype == F32 and torch.equal(resumed.state[p][name], value)
            assert resumed.state[p][name] is not value


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
def test_checkpoint_of_torch(variant, capturable):
    """torch.optim.AdamW counts by parameter; the run goes on where it was."""
    params = parameters(variant.device)
    copies, oracle = twin(params)
    start = FusedAdam(params, **HYPER)
    for seed in range(3):
        step_both(params, start, copies, oracle, seed)
    for p, q in zip(params, copies, strict=True):
        p.data.copy_(q.data)
    optimizer = FusedAdam(params, **HYPER, capturable=capturable)
    optimizer.load_state_dict(_through_a_file(oracle.state_dict()))
    assert int(optimizer.param_groups[0]["step"]) == 3
    assert all(set(optimizer.state[p]) == {"exp_avg", "exp_avg_sq"} for p in params)
    for seed in range(3, 6):
        step_both(params, optimizer, copies, oracle, seed)
    assert_close(params, copies)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_checkpoint_that_cannot_be_continued(option):
    params = parameters("cpu", shapes=((3,),))
    other = torch.optim.AdamW(params, **{option: True})
    train(params, other, [1])
    with pytest.raises(ValueError, match=option):
        FusedAdam(params).load_state_dict(other.state_dict())


def test_checkpoint_of_another_kind(variant):
    """capturable and not: a count and a rate are numbers in one, tensors in the other."""
    for first, second in ((False, True), (True, False)):
        params = parameters(variant.device)
        optimizer = FusedAdam(params, **(HYPER | dict(lr=2.0**-7)), capturable=first)
        train(params, optimizer, range(3))
        resumed = FusedAdam(params, **(HYPER | dict(lr=1.0)), capturable=second)
        resumed.load_state_dict(_through_a_file(optimizer.state_dict()))
        group = resumed.param_groups[0]
        assert isinstance(group["step"], torch.Tensor) == isinstance(group["lr"], torch.Tensor) == second
        assert int(group["step"]) == 3 and float(group["lr"]) == 2.0**-7
        train(params, resumed, [4])
        assert int(group["step"]) == 4


def test_a_loaded_state_of_another_shape():
    params = parameters("cpu", shapes=((3,),))
    optimizer = FusedAdam(params)
    train(params, optimizer, [1])
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.ones(4, dtype=F32, device="cpu")
    with pytest.raises(ValueError, match="shape"):
        FusedAdam(params).load_state_dict(state)


# ---- states in the user's hands ----------------------------------------------------------------------------


def _replace_entry(optimizer, p):
    optimizer.state[p]["exp_avg"] = torch.ones_like(optimizer.state[p]["exp_avg"])


def _replace_dict(optimizer, p):
    optimizer.state[p] = {name: torch.ones_like(value) for name, value in optimizer.state[p].items()}


def _replace_data(optimizer, p):
    optimizer.state[p]["exp_avg"].data = torch.ones_like(optimizer.state[p]["exp_avg"])


def _fill(optimizer, p):
    optimizer.state[p]["exp_avg"].fill_(1.0)


def _replace_all(optimizer, p):
    _replace_entry(optimizer, p)
    optimizer.state = type(optimizer.state)(dict, optimizer.state)


def _delete_and_set(optimizer, p):
    value = optimizer.state[p].pop("exp_avg")
    optimizer.state[p]["exp_avg"] = torch.ones_like(value)


@pytest.mark.parametrize(
    "change", [_replace_entry, _replace_dict, _replace_data, _fill, _replace_all, _delete_and_set]
)
@pytest.mark.parametrize("which", [0, -1])
def test_a_replaced_state_is_used(variant, change, which):
    """Whoever writes opt.state[p]["exp_avg"] means it; the step must not go on with what was there."""
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER)
    train(params, optimizer, range(2))
    change(optimizer, params[which])
    before = {name: value.cpu().to(F64) for name, value in optimizer.state[params[which]].items()}
    assert before["exp_avg"].eq(1).all()
    gradient = params[which].grad.cpu().to(F64)
    others = optimizer.state[params[1]]["exp_avg"]
    optimizer.step()
    beta = HYPER["betas"][0]
    found = optimizer.state[params[which]]["exp_avg"]
    torch.testing.assert_close(found.cpu().to(F64), beta * before["exp_avg"] + (1 - beta) * gradient)
    assert optimizer.state[params[1]]["exp_avg"] is others


def test_a_dropped_state_begins_anew(variant):
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER)
    train(params, optimizer, range(2))
    del optimizer.state[params[0]]
    optimizer.state[params[1]].clear()
    optimizer.step()
    beta = HYPER["betas"][0]
    for p in params[:2]:
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], (1 - beta) * p.grad)
    optimizer.state.clear()
    optimizer.step()
    for p in params:
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], (1 - beta) * p.grad)


def test_a_replaced_state_of_another_layout_or_kind(variant):
    params = parameters(variant.device, shapes=((4, 6),))
    optimizer = FusedAdam(params, **HYPER)
    train(params, optimizer, range(2))
    p = params[0]
    other = torch.arange(24.0, device=variant.device, dtype=F32).view(6, 4).t()
    wanted = 0.9 * other.clone() + 0.1 * p.grad
    optimizer.state[p]["exp_avg"] = other
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], wanted)
    before = p.detach().clone()
    optimizer.state[p]["exp_avg"] = torch.zeros(5, device=variant.device, dtype=F32)
    with pytest.raises((ValueError, RuntimeError)):
        optimizer.step()
    assert torch.equal(p.detach(), before)


def test_what_others_keep_in_the_state_costs_nothing(variant):
    """An entry of the user's own, changed at every step, makes no new plan."""
    params = parameters(variant.device)
    optimizer = FusedAdam(params, **HYPER)
    train(params, optimizer, [0])
    for p in params:
        optimizer.state[p]["seen"] = 0
    optimizer.step()
    plan = optimizer._plans[0][1]
    optimizer.step()
    assert optimizer._plans[0][1] is plan


def test_add_param_group(variant):
    params = parameters(variant.device)
    copies, _ = twin(params)
    optimizer, oracle = FusedAdam(params[:2], **HYPER), torch.optim.AdamW(copies[:2], **HYPER)
    step_both(params[:2], optimizer, copies[:2], oracle, 1)
    optimizer.add_param_group({"params": params[2:]})
    oracle.add_param_group({"params": copies[2:]})
    for seed in (2, 3):
        step_both(params, optimizer, copies, oracle, seed)
    assert_close(params, copies)
    assert [group["step"] for group in optimizer.param_groups] == [3, 2]


def test_parameters_exchanged_in_a_group(variant):
    """As pruning and growing do: the list of a group is the user's."""
    params = parameters(variant.device)
    optimizer = FusedAdam(params[:3], **HYPER)
    train(params[:3], optimizer, [1])
    optimizer.param_groups[0]["params"][1] = params[4]
    before = params[1].detach().clone()
    old = params[4].detach().clone()
    train(params, optimizer, [2])
    assert torch.equal(params[1].detach(), before) and not torch.equal(params[4].detach(), old)


@pytest.mark.parametrize("how", ["copy", "pickle"])
@pytest.mark.parametrize("scheduled", [False, True], ids=["", "scheduled"])
def test_copies(variant, how, scheduled):
    """A copy has all options and goes on by itself; a scheduler may have wrapped step()."""
    params = parameters(variant.device, F16)
    options = dict(adam_w_mode=False, capturable=True, master_weights=True, set_grad_none=False)
    optimizer = FusedAdam(params, **HYPER, **options)
    train(params, optimizer, range(2))
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
    copied = copy.deepcopy(optimizer) if how == "copy" else pickle.loads(pickle.dumps(optimizer))
    again = copied.param_groups[0]["params"]
    assert (copied.adam_w_mode, copied.capturable, copied.master_weights) == (0, True, True)
    assert not copied.set_grad_none and copied._step_supports_amp_scaling
    before = bits(params, optimizer)
    train(again, copied, range(2, 4))
    lists.assert_same_bits(bits(params, optimizer), before)
    train(params, optimizer, range(2, 4))
    lists.assert_same_bits(bits(params, optimizer), bits(again, copied))


# ---- threads and processes ---------------------------------------------------------------------------------


def test_optimizers_in_threads(variant):
    """Eight at once, and each ends where it would have ended alone."""
    runs = [parameters(variant.device, seed=seed) for seed in range(8)]
    wanted = []
    for params in runs:
        alone = [torch.nn.Parameter(p.detach().clone()) for p in params]
        optimizer = FusedAdam(alone, **HYPER)
        train(alone, optimizer, range(5))
        wanted.append(bits(alone, optimizer))
    results, errors = [None] * 8, []
    barrier = threading.Barrier(8)

    def run(index):
        try:
            optimizer = FusedAdam(runs[index], **HYPER)
            barrier.wait()
            train(runs[index], optimizer, range(5))
            results[index] = bits(runs[index], optimizer)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    for found, value in zip(results, wanted, strict=True):
        lists.assert_same_bits(found, value)


def test_step_in_a_forked_child(variant):
    """After steps in the parent, on tensors large enough for torch's threads, which the child lacks."""
    if variant.device.type != "cpu":
        pytest.skip("a forked child cannot use the parent's GPU; the host tests see that it is told so")
    shapes = ((200_000,),) if not variant.simt else ((1031,),)
    params = parameters(variant.device, shapes=shapes)
    optimizer = FusedAdam(params, **HYPER)
    train(params, optimizer, range(2))
    results, sent = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            import signal

            signal.alarm(60)
            torch.set_num_threads(1)  # as in torch's own workers: OpenMP's threads do not survive a fork
            train(params, optimizer, range(2, 4))
            os.write(sent, params[0].detach().double().sum().numpy().tobytes())
        finally:
            os._exit(0)
    os.close(sent)
    with os.fdopen(results, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    train(params, optimizer, range(2, 4))
    assert answer == params[0].detach().double().sum().numpy().tobytes()


@pytest.mark.parametrize("steps", [test_gradients_with_other_strides, test_gradients_and_data_replaced])
def test_without_bindings_layouts_are_followed_too(monkeypatch, steps):
    monkeypatch.setattr(bindings, "load", lambda: bindings.Loaded("reference", None, "none here"))
    steps(SimpleNamespace(device=torch.device("cpu")))
