"""apex.contrib.openfold_triton: attention with mask and bias, layer norm, Adam with a moving average."""

import copy
import pickle

import pytest
import torch

from apex.contrib import openfold_triton
from apex.contrib.openfold_triton import _layer_norm_config_hopper, fused_adam_swa, mha
from apex.contrib.openfold_triton.fused_adam_swa import AdamMathType, FusedAdamSWA

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def numbers(*shape, seed=0, dtype=F32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64, device="cpu").to(device=device, dtype=dtype)


# ---- attention -----------------------------------------------------------------------------------------------


def written_out(q, k, v, mask, bias, inf):
    """The formula in float64."""
    scores = q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + (mask.double() - 1) * inf
    if bias is not None:
        scores = scores + bias.double()
    return scores.softmax(-1) @ v.double()


@pytest.mark.parametrize("dtype,bound", [(F64, 1e-12), (F32, 1e-5), (BF16, 3e-2), (F16, 4e-3)])
@pytest.mark.parametrize("lead", [(1, 3), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_attention(dtype, bound, lead, with_mask, with_bias):
    """Values and gradients; the bound is a few roundings of the dtype, of values near 1."""
    heads, length, width = 4, 13, 16
    q, k, v = (numbers(*lead, heads, length, width, seed=s, dtype=dtype).requires_grad_() for s in range(3))
    mask = (numbers(*lead, 1, 1, length, seed=3) > -0.5).to(dtype) if with_mask else None
    ones = [1] * len(lead)
    bias = numbers(*ones, heads, length, length, seed=4, dtype=dtype).requires_grad_() if with_bias else None
    leaves = [q, k, v, bias] if with_bias else [q, k, v]
    if with_bias:
        found = openfold_triton.AttnTri(q, k, v, mask, bias, 1e9, True)
    elif with_mask:
        found = openfold_triton.AttnNoBiasJIT(q, k, v, mask, 1e9)
    else:
        found = openfold_triton.AttnTri(q, k, v)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wanted = written_out(*exact[:3], mask, exact[3] if with_bias else None, 1e9)
    gradient = numbers(*wanted.shape, seed=5)
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)
    for mine, right in zip(
        torch.autograd.grad(found, leaves, gradient.to(dtype)),
        torch.autograd.grad(wanted, exact, gradient.to(dtype).double()),
        strict=True,
    ):
        scale = right.abs().max().clamp(min=1.0)
        assert mine.dtype == dtype and mine.shape == right.shape
        torch.testing.assert_close(mine.double() / scale, right / scale, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_a_row_without_a_key_has_a_finite_value(dtype):
    q = numbers(1, 2, 4, 8, 16, dtype=dtype)
    mask = torch.zeros(1, 2, 1, 1, 8, dtype=dtype, device="cpu")
    bias = numbers(1, 1, 4, 8, 8, dtype=dtype)
    assert openfold_triton.AttnBiasJIT(q, q, q, mask, bias, 1e9).isfinite().all()


def test_a_bias_with_more_dimensions_than_the_query():
    q, bias = numbers(3, 4, 8, 16), numbers(1, 1, 4, 8, 8)
    torch.testing.assert_close(
        openfold_triton.AttnTri(q, q, q, None, bias), openfold_triton.AttnTri(q, q, q, None, bias[0])
    )


def test_the_switch_and_the_shapes():
    assert not mha.is_enabled()
    mha.enable()
    assert mha.is_enabled()
    mha.disable()
    assert not mha.is_enabled()
    assert openfold_triton.CanSchTriMHA([1, 256, 4, 256, 16]) is True
    assert openfold_triton.CanSchTriMHA([1, 256, 4, 256, 16], has_bias=False) is False
    assert openfold_triton.CanSchTriMHA([1, 256, 4, 256, 16], inf=1e4) is False


@pytest.mark.parametrize(
    "q,k,v,error",
    [
        (numbers(8, 16), numbers(8, 16), numbers(8, 16), ValueError),
        (numbers(2, 2, 8, 16), numbers(1, 2, 2, 8, 16), numbers(2, 2, 8, 16), ValueError),
        (numbers(2, 2, 8, 16), numbers(2, 2, 8, 16, dtype=F64), numbers(2, 2, 8, 16), TypeError),
        (numbers(2, 3, 4, 8, 16), numbers(3, 2, 4, 8, 16), numbers(2, 3, 4, 8, 16), ValueError),
        (numbers(2, 3, 4, 8, 16), numbers(6, 1, 4, 8, 16), numbers(1, 6, 4, 8, 16), ValueError),
        (numbers(2, 4, 8, 16), numbers(2, 2, 8, 16), numbers(2, 2, 8, 16), ValueError),
        (numbers(2, 4, 8, 16), numbers(2, 4, 8, 16), numbers(2, 4, 7, 16), ValueError),
        (numbers(2, 4, 8, 16), numbers(2, 4, 8, 12), numbers(2, 4, 8, 16), ValueError),
    ],
)
def test_what_is_no_attention_is_refused(q, k, v, error):
    with pytest.raises(error, match="attention takes"):
        openfold_triton.AttnTri(q, k, v)


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", [(6,), (2, 1, 1, 7), (2, 2, 3, 1, 1, 7), (3, 5, 7)], ids=str)
def test_a_mask_or_bias_that_does_not_broadcast_is_refused(name, shape):
    q, k = numbers(2, 3, 4, 5, 16), numbers(2, 3, 4, 7, 16)
    given = {name: numbers(*shape)}
    with pytest.raises(ValueError, match=f"attention takes a {name} that broadcasts"):
        openfold_triton.AttnTri(q, k, k, given.get("mask"), given.get("bias"))


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (5, 1), (5, 7), (2, 1, 1, 1, 7), (1, 2, 3, 4, 5, 7)], ids=str
)
def test_masks_and_biases_broadcast(shape):
    q, k, v = numbers(2, 3, 4, 5, 16), numbers(2, 3, 4, 7, 16, seed=1), numbers(2, 3, 4, 7, 16, seed=2)
    mask, bias = (numbers(*shape, seed=3) > -0.5).to(F32), numbers(*shape, seed=4)
    for m, b in ((mask, None), (None, bias), (mask, bias)):
        wanted = written_out(q, k, v, m, b, 4.0).reshape(2, 3, 4, 5, 16)
        torch.testing.assert_close(
            openfold_triton.AttnTri(q, k, v, m, b, 4.0).double(), wanted, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("one", ["query", "key and value"])
def test_dimensions_of_one_broadcast(one):
    shared, own = (1, 1, 1), (2, 3, 4)
    q = numbers(*(shared if one == "query" else own), 5, 16)
    k, v = (numbers(*(own if one == "query" else shared), 7, 16, seed=s) for s in (1, 2))
    found = openfold_triton.AttnTri(q, k, v, None, None)
    torch.testing.assert_close(found.double(), written_out(q, k, v, None, None, 0.0), rtol=1e-5, atol=1e-5)


def test_scripted():
    q, k, mask, bias = numbers(2, 3, 4, 5, 16), numbers(1, 3, 4, 7, 16), numbers(7) > 0, numbers(4, 5, 7)
    for function, added in ((mha.AttnBiasJIT, (mask, bias)), (mha.AttnNoBiasJIT, (mask,))):
        scripted = torch.jit.script(function)
        torch.testing.assert_close(scripted(q, k, k, *added, 1e9), function(q, k, k, *added, 1e9))
        with pytest.raises(torch.jit.Error, match="dimensions before these"):
            scripted(q, k[:, :2], k, *added, 1e9)


def test_compiled_without_breaks():
    q, bias = numbers(1, 2, 4, 8, 16).requires_grad_(), numbers(1, 1, 4, 8, 8)
    mask = torch.ones(1, 2, 1, 1, 8, dtype=F32, device="cpu")
    compiled = torch.compile(openfold_triton.AttnBiasJIT, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(q, q, q, mask, bias, 1e9), openfold_triton.AttnBiasJIT(q, q, q, mask, bias, 1e9)
    )


# ---- layer norm ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("strided", [False, True])
def test_layer_norm(dtype, strided):
    x = numbers(2, 5, 7, 128, dtype=dtype)
    x = x.transpose(1, 2).requires_grad_() if strided else x.requires_grad_()
    weight, bias = (
        numbers(128, seed=1, dtype=dtype).requires_grad_(),
        numbers(128, seed=2, dtype=dtype).requires_grad_(),
    )
    found = openfold_triton.LayerNormSmallShapeOptImpl.apply(x, (128,), weight, bias, 1e-5)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    wanted = torch.nn.functional.layer_norm(exact[0], (128,), exact[1], exact[2], 1e-5)
    bound = 1e-5 if dtype == F32 else 4e-2
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)
    gradient = numbers(*wanted.shape, seed=3, dtype=dtype)
    for mine, right in zip(
        torch.autograd.grad(found, (x, weight, bias), gradient),
        torch.autograd.grad(wanted, exact, gradient.double()),
        strict=True,
    ):
        scale = right.abs().max()
        torch.testing.assert_close(mine.double() / scale, right / scale, rtol=bound, atol=bound)


def test_layer_norm_keeps_its_dtype_under_autocast():
    x = numbers(3, 16).requires_grad_()
    weight, bias = numbers(16, seed=1), numbers(16, seed=2)
    with torch.autocast("cpu", BF16):
        found = openfold_triton.LayerNormSmallShapeOptImpl.apply(x, (16,), weight, bias)
    assert found.dtype == F32
    torch.testing.assert_close(found, torch.nn.functional.layer_norm(x, (16,), weight, bias))
    meta = openfold_triton.LayerNormSmallShapeOptImpl.apply(x.to("meta"), (16,), None, None)
    assert meta.dtype == F32 and meta.device.type == "meta"


def test_tuned_settings_have_a_place():
    """OpenFold's loader puts them into the kernels; none is needed here."""
    for ranks in (0, 1, 2, 4, 8):
        for name, cache in _layer_norm_config_hopper._auto_tuned_config_hopper[ranks].items():
            openfold_triton._tuneable_triton_kernels[name].cache = cache
    assert openfold_triton.sync_triton_auto_tune_cache_across_gpus(strict=True, verbose=True) is None


# ---- Adam with a moving average ------------------------------------------------------------------------------

SHAPES = [(3,), (17, 5), (128,), (0,), ()]


def lists(copied=F32, dtype=F32, device="cpu"):
    params = [
        torch.nn.Parameter(numbers(*s, seed=i, dtype=dtype, device=device)) for i, s in enumerate(SHAPES)
    ]
    copies = [torch.nn.Parameter(p.detach().to(copied)) for p in params]
    return params, copies, [torch.zeros_like(p.detach()) for p in params]


def with_gradients(copies, seed):
    for number, c in enumerate(copies):
        c.grad = numbers(*c.shape, seed=seed + number, dtype=c.dtype, device=c.device)


def reference(params, lr, steps, gradients, decay, decoupled, rate, clip):
    """torch's Adam and AdamW in float64, and the average by its definition."""
    exact = [torch.nn.Parameter(p.detach().double()) for p in params]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(exact, lr=lr, weight_decay=decay)
    averages = None
    for step in range(steps):
        for p, g in zip(exact, gradients[step], strict=True):
            p.grad = g.double() * clip
        optimizer.step()
        if averages is None:
            averages = [p.detach().clone() for p in exact]
        else:
            averages = [a * rate + p.detach() * (1 - rate) for a, p in zip(averages, exact, strict=True)]
    return exact, averages


@pytest.mark.parametrize("mode", list(AdamMathType))
@pytest.mark.parametrize(
    "dtype,copied,bound", [(F32, BF16, 2e-6), (F32, F16, 2e-6), (F32, F32, 2e-6), (F64, F64, 1e-12)]
)
@pytest.mark.parametrize("clip", [None, 0.5, "tensor"])
def test_steps_are_adam_s_and_the_average_follows(mode, dtype, copied, bound, clip):
    params, copies, averages = lists(copied, dtype)
    begin = [p.detach().clone() for p in params]
    optimizer = FusedAdamSWA(params, copies, averages, 0.9, lr=0.1, weight_decay=0.01, adam_math_mode=mode)
    given = torch.tensor(0.5, dtype=F32, device="cpu") if clip == "tensor" else clip
    gradients = []
    for step in range(4):
        with_gradients(copies, 10 * step)
        gradients.append([c.grad.clone() for c in copies])
        assert optimizer.step(grad_clip_scale=given) is None
    exact, average = reference(
        begin, 0.1, 4, gradients, 0.01, mode is AdamMathType.ApexAdamW, 0.9, 1.0 if clip is None else 0.5
    )
    for p, c, a, right, mean in zip(params, copies, averages, exact, average, strict=True):
        torch.testing.assert_close(p.detach().double(), right.detach(), rtol=bound, atol=bound)
        torch.testing.assert_close(a.double(), mean, rtol=bound, atol=bound)
        assert torch.equal(c.detach(), p.detach().to(copied))
    assert optimizer.swa_param_groups[0]["n_averaged"] == 4


def test_a_parameter_without_a_gradient_stays_and_others_move():
    params, copies, averages = lists()
    begin = [p.detach().clone() for p in params]
    optimizer = FusedAdamSWA(params, copies, averages, 0.9)
    with_gradients(copies, 0)
    copies[0].grad = None
    optimizer.step()
    assert torch.equal(params[0], begin[0]) and not torch.equal(params[1], begin[1])
    assert torch.equal(averages[0], begin[0])


def test_it_goes_on_from_torch_s_adam_and_from_its_own_checkpoint():
    params, copies, averages = lists(F64, F64)
    adam = torch.optim.Adam(params, lr=0.1, weight_decay=0.01)
    for step in range(2):
        for p, c in zip(params, copies, strict=True):
            c.grad = p.grad = numbers(*p.shape, seed=step, dtype=F64)
        adam.step()
    twin = copy.deepcopy(params)
    for p, t in zip(params, twin, strict=True):
        t.grad = p.grad
    theirs = torch.optim.Adam(twin, lr=0.1, weight_decay=0.01)
    theirs.load_state_dict(copy.deepcopy(adam.state_dict()))
    optimizer = FusedAdamSWA.from_optim(adam, params, copies, averages, 0.9)
    optimizer.step()
    theirs.step()
    for p, t in zip(params, twin, strict=True):
        torch.testing.assert_close(p, t, rtol=1e-12, atol=1e-12)
    other = FusedAdamSWA(*lists(F64, F64), 0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.swa_param_groups[0]["n_averaged"] == 1 and other.param_groups[0]["step"] == 3
    assert "n_averaged" not in other.param_groups[0]


def test_a_fresh_adam_begins_at_the_first_step():
    params, copies, averages = lists()
    optimizer = FusedAdamSWA.from_optim(torch.optim.Adam(params), params, copies, averages, 0.9)
    with_gradients(copies, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1


def test_zero_grad_reaches_the_copies():
    params, copies, averages = lists()
    optimizer = FusedAdamSWA(params, copies, averages, 0.9)
    with_gradients(copies, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(not c.grad.any() for c in copies)
    optimizer.zero_grad()
    assert all(c.grad is None for c in copies)


def refused(change):
    params, copies, averages = lists(BF16)
    arguments = dict(params=params, compute_params=copies, swa_params=averages, swa_decay_rate=0.9)
    return FusedAdamSWA(**{**arguments, **change(params, copies, averages)})


@pytest.mark.parametrize(
    "change,error,words",
    [
        (lambda p, c, a: {"swa_params": []}, ValueError, "swa_params"),
        (lambda p, c, a: {"params": p[1:]}, ValueError, "one length"),
        (lambda p, c, a: {"params": p[1:] + p[:1]}, ValueError, "shapes"),
        (lambda p, c, a: {"swa_params": [t.double() for t in a]}, ValueError, "one dtype"),
        (lambda p, c, a: {"compute_params": [t.double() for t in c]}, TypeError, "float32"),
        (lambda p, c, a: {"swa_decay_rate": 1.0}, ValueError, "swa_decay_rate"),
        (lambda p, c, a: {"lr": -1.0}, ValueError, "lr"),
        (lambda p, c, a: {"adam_math_mode": 1}, ValueError, "AdamMathType"),
        (lambda p, c, a: {"amsgrad": True}, NotImplementedError, "amsgrad"),
        (lambda p, c, a: {"capturable": True}, NotImplementedError, "capturable"),
        (lambda p, c, a: {"master_weights": True}, NotImplementedError, "master_weights"),
    ],
)
def test_bad_arguments_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        refused(change)


def test_several_groups_and_sparse_gradients_are_refused():
    optimizer = refused(lambda p, c, a: {})
    grad = torch.ones(3, dtype=BF16, device="cpu").to_sparse()
    optimizer.compute_param_groups[0]["params"][0].grad = grad
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(numbers(3))]})
    with pytest.raises(RuntimeError, match="multiple param groups"):
        optimizer.step()


def sparse(optimizer):
    grad = torch.ones(17, 5, dtype=BF16, device="cpu").to_sparse()
    optimizer.compute_param_groups[0]["params"][1].grad = grad


def another_shape(role):
    def change(optimizer):
        groups = {"copy": optimizer.compute_param_groups, "average": optimizer.swa_param_groups}
        groups[role][0]["params"][1].data = numbers(4, dtype=BF16 if role == "copy" else F32)

    return change


def a_state_of_another(optimizer):
    state = optimizer.state[optimizer.param_groups[0]["params"][2]]
    state.update(exp_avg=numbers(4), exp_avg_sq=numbers(4))


def a_dtype_of_its_own(optimizer):
    """Which comes in the second of two launches, where no kernel has it."""
    model = optimizer.compute_param_groups[0]["params"][1]
    model.grad, model.data = None, model.data.double()
    model.grad = numbers(17, 5, dtype=F64)


@pytest.mark.parametrize(
    "change,clip,error",
    [
        (sparse, None, RuntimeError),
        (another_shape("copy"), None, ValueError),
        (another_shape("average"), None, ValueError),
        (a_state_of_another, None, ValueError),
        (a_dtype_of_its_own, None, TypeError),
        (lambda o: o.swa_param_groups[0]["params"].pop(), None, ValueError),
        (lambda o: o.compute_param_groups[0]["params"].pop(), None, ValueError),
        (lambda o: o.param_groups[0].update(lr="fast"), None, ValueError),
        (lambda o: o.param_groups[0].update(betas=(0.9,)), None, ValueError),
        (lambda o: None, torch.ones(2, dtype=F32, device="cpu"), ValueError),
        (lambda o: None, "half", TypeError),
    ],
)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_step_that_is_refused_changes_nothing(change, clip, error, stepped):
    optimizer = refused(lambda p, c, a: {"compute_params": [c[0].detach().half(), *c[1:]]})
    group, averages = optimizer.param_groups[0], optimizer.swa_param_groups[0]
    copies = list(optimizer.compute_param_groups[0]["params"])
    with_gradients(copies, 0)
    if stepped:
        optimizer.step()
    change(optimizer)

    def everything():
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [t.detach().clone() for t in (*group["params"], *copies, *averages["params"], *states)]

    before, counts = everything(), (group.get("step"), averages["n_averaged"])
    with pytest.raises(error):
        optimizer.step(grad_clip_scale=clip)
    after = everything()
    assert len(after) == len(before) and all(map(torch.equal, before, after))
    assert (group.get("step"), averages["n_averaged"]) == counts == ((1, 1) if stepped else (None, 0))


@pytest.mark.parametrize(
    "copied_by", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_copies_step_as_the_optimizer_does(copied_by):
    params, copies, averages = lists(F32)
    optimizer = FusedAdamSWA(params, copies, averages, 0.5, lr=0.1, adam_math_mode=AdamMathType.ApexAdamW)
    with_gradients(copies, 0)
    optimizer.step()
    other = copied_by(optimizer)
    others = [
        g[0]["params"] for g in (other.param_groups, other.compute_param_groups, other.swa_param_groups)
    ]
    for tensors in (copies, others[1]):
        with_gradients(tensors, 10)
    other.step()
    assert not torch.equal(params[0], others[0][0])
    optimizer.step()
    for mine, its in zip((params, copies, averages), others, strict=True):
        assert all(map(torch.equal, mine, its)) and mine[0] is not its[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda p, c, a: {"swa_params": [t.detach() for t in p]},
        lambda p, c, a: {"swa_params": [a[2][:3], *a[1:]]},
        lambda p, c, a: {"compute_params": [c[2].detach()[:3], *c[1:]]},
        lambda p, c, a: {"params": [p[2].detach()[:3], *p[1:]]},
    ],
    ids=["averages are parameters", "two averages", "two copies", "two parameters"],
)
def test_tensors_that_share_memory_are_refused(change):
    with pytest.raises(ValueError, match="share memory"):
        refused(change)


def test_a_parameter_may_be_its_own_copy():
    params, _, averages = lists()
    FusedAdamSWA(params, params, averages, 0.9)


@pytest.mark.parametrize("what", ["params", "compute_params", "swa_params"])
@pytest.mark.parametrize(
    "given",
    [numbers(3), [("weight", numbers(3))], [{"params": [numbers(3)]}], [None]],
    ids=lambda g: type(g).__name__,
)
def test_what_is_no_list_of_tensors_is_refused(what, given):
    with pytest.raises(TypeError, match=f"{what} is a list of tensors"):
        refused(lambda p, c, a: {what: given})


def stepped_adam():
    params = [torch.nn.Parameter(numbers(*s, seed=i)) for i, s in enumerate(SHAPES)]
    adam = torch.optim.Adam(params, lr=torch.tensor(0.1, dtype=F32, device="cpu"))
    with_gradients(params, 0)
    adam.step()
    return params, adam


def test_what_came_of_an_adam_shares_nothing_with_it():
    params, adam = stepped_adam()
    kept = [{name: value.clone() for name, value in adam.state[p].items()} for p in params]
    copies = [p.detach().clone() for p in params]
    optimizer = FusedAdamSWA.from_optim(adam, *lists(F32), 0.9)
    with_gradients(optimizer.compute_param_groups[0]["params"], 10)
    optimizer.step()
    optimizer.param_groups[0]["lr"].zero_()
    assert all(
        torch.equal(adam.state[p][name], k[name]) for p, k in zip(params, kept, strict=True) for name in k
    )
    assert adam.param_groups[0]["lr"] > 0 and all(map(torch.equal, params, copies))


def test_an_adam_of_other_parameters_or_none_is_refused():
    _, adam = stepped_adam()
    params, copies, averages = lists()
    with pytest.raises(ValueError, match="fp32_params"):
        FusedAdamSWA.from_optim(adam, params[::-1], copies[::-1], averages[::-1], 0.9)
    with pytest.raises(ValueError, match="fp32_params"):
        FusedAdamSWA.from_optim(adam, params[1:], copies[1:], averages[1:], 0.9)
    for other in (None, torch.optim.SGD(params, lr=0.1)):
        with pytest.raises(TypeError, match=r"goes on from a torch.optim.Adam, not from"):
            FusedAdamSWA.from_optim(other, params, copies, averages, 0.9)


@pytest.mark.parametrize("change", [dict(maximize=True), dict(decoupled_weight_decay=True)], ids=str)
def test_what_has_no_counterpart_is_refused(change):
    params, copies, averages = lists()
    adam = torch.optim.Adam(params)
    adam.param_groups[0].update(change)
    with pytest.raises(ValueError, match=next(iter(change))):
        FusedAdamSWA.from_optim(adam, params, copies, averages, 0.9)


@pytest.mark.gpu
@pytest.mark.parametrize("copied", [BF16, F32])
def test_steps_on_a_gpu_are_the_cpu_s(copied):
    results = []
    for device in ("cpu", "cuda"):
        params, copies, averages = lists(copied, F32, device)
        optimizer = fused_adam_swa.FusedAdamSWA(params, copies, averages, 0.9, lr=0.1, weight_decay=0.01)
        for step in range(3):
            with_gradients(copies, step)
            optimizer.step(grad_clip_scale=0.5)
        results.append([t.detach().cpu() for t in (*params, *averages)])
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(cpu, gpu, rtol=1e-5, atol=1e-6)
