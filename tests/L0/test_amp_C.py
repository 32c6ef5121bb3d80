"""The extension amp_C of public apex: its names and argument orders, and what each function does."""

from __future__ import annotations

import inspect
import math

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag, scalar
from torch_defaults import float32_on_cpu

from apex import _lists
from apex._legacy import amp_C
from apex._loader import bindings, registry
from apex.multi_tensor_apply import multi_tensor_applier

CHUNK = 2048 * 32
SHAPES = ((33, 5), (7,), (1,), (0,), (1031,))
_START = "chunk_size noop_flag tensor_lists "
_ADAM = "beta1 beta2 epsilon step mode bias_correction weight_decay"
# Facts of csrc/amp_C_frontend.cpp in both public trees; where they agree the entry stands once.
BOTH = {
    "multi_tensor_scale": "scale",
    "multi_tensor_sgd": "wd momentum dampening lr nesterov first_run wd_after_momentum scale",
    "multi_tensor_axpby": "a b arg_to_check",
    "multi_tensor_l2norm": "per_tensor_python",
    "multi_tensor_l2norm_mp": "per_tensor_python",
    "multi_tensor_l2norm_scale": "scale per_tensor_python",
    "multi_tensor_lamb_stage1_cuda": "per_tensor_decay step beta1 beta2 epsilon global_grad_norm "
    "max_global_grad_norm",
    "multi_tensor_lamb_stage2_cuda": "per_tensor_param_norm per_tensor_update_norm lr weight_decay "
    "use_nvlamb_python",
    "multi_tensor_adam": f"lr {_ADAM}",
    "multi_tensor_adam_capturable": f"lr {_ADAM} inv_scale",
    "multi_tensor_adam_capturable_master": f"lr {_ADAM} inv_scale",
    "multi_tensor_adagrad": "lr epsilon mode weight_decay",
    "multi_tensor_novograd": "grad_norms lr beta1 beta2 epsilon step bias_correction weight_decay "
    "grad_averaging moment_mode norm_type",
    "multi_tensor_lamb": "lr beta1 beta2 epsilon step bias_correction weight_decay grad_averaging mode "
    "global_grad_norm max_grad_norm use_nvlamb_python",
    "multi_tensor_lamb_mp": "lr beta1 beta2 epsilon step bias_correction weight_decay grad_averaging mode "
    "global_grad_norm max_grad_norm use_nvlamb_python found_inf inv_scale",
}
NVIDIA = BOTH | {"multi_tensor_unscale_l2norm": "inv_scale per_tensor_python"}
ROCM = BOTH | {
    "multi_tensor_lars": "grad_norms param_norms lr trust_coefficient epsilon weight_decay momentum "
    "dampening nesterov first_run wd_after_momentum scale is_skipped"
}
_HYSTERESIS = (  # NVIDIA's alone, and not about lists
    "current_scale growth_tracker hysteresis_tracker found_inf growth_factor backoff_factor growth_interval "
    "hysteresis"
)
SIGNATURES = {name: (_START + rest).split() for name, rest in (NVIDIA | ROCM).items()}
SIGNATURES["update_scale_hysteresis"] = _HYSTERESIS.split()


def test_argument_orders():
    for name in amp_C.__all__:
        assert list(inspect.signature(getattr(amp_C, name)).parameters) == SIGNATURES[name], name


def test_complete_means_all_of_both_trees():
    """Megatron-LM, transformers and DeepSpeed take the module's presence for that of all its functions."""
    assert set(amp_C.__all__) == set(SIGNATURES)
    assert registry.extensions()["amp_C"].state == "complete"


def test_star_import():
    found = {}
    exec("from apex._legacy.amp_C import *", found)
    assert set(amp_C.__all__) <= set(found)
    assert not {"torch", "bindings"} & set(found)


@pytest.fixture(params=["compiled entries", "dispatcher"])
def entrance(request, monkeypatch):
    """By the module _C, and without it."""
    if request.param == "dispatcher":
        monkeypatch.setattr(_lists, "module", lambda: None)
    elif bindings.load().module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")


pytestmark = pytest.mark.usefixtures("entrance")


def state(device, dtypes=(F32, F32, F32, F32), squared=3):
    """One list a dtype; list `squared` holds squares."""
    found = [lists.random(dtype, device, SHAPES, seed=k) for k, dtype in enumerate(dtypes)]
    if squared < len(found):
        found[squared] = [x.square() for x in found[squared]]
    return found


def check(found, expected, tolerance=2e-6):
    for tensor, value in zip(found, expected, strict=True):
        own = 0.0 if tensor.dtype in (F32, F64) else lists.ROUNDING[tensor.dtype]
        torch.testing.assert_close(
            lists.exact([tensor])[0], value, rtol=tolerance + own, atol=tolerance + own / 64
        )


# ---- scaling and norms -------------------------------------------------------------------------------------


def test_scale(variant):
    inputs, outputs = state(variant.device, (F16, F32))
    noop_flag = flag(variant.device)
    amp_C.multi_tensor_scale(CHUNK, noop_flag, [inputs, outputs], 0.5)
    check(outputs, [x / 2 for x in lists.exact(inputs)])
    inputs[0].view(-1)[0] = float("inf")
    multi_tensor_applier(amp_C.multi_tensor_scale, noop_flag, [inputs, outputs], 0.5)
    assert noop_flag.item() == 1


def test_axpby(variant):
    x, y, out = state(variant.device, (F16, F32, F32))
    amp_C.multi_tensor_axpby(CHUNK, flag(variant.device), [x, y, out], 0.5, -2.0, -1)
    check(out, [0.5 * a - 2 * b for a, b in zip(lists.exact(x), lists.exact(y), strict=True)])
    noop_flag = flag(variant.device)
    y[0].view(-1)[0] = float("nan")
    amp_C.multi_tensor_axpby(CHUNK, noop_flag, [x, y, out], 0.5, -2.0, 0)
    assert noop_flag.item() == 0
    amp_C.multi_tensor_axpby(CHUNK, noop_flag, [x, y, out], 0.5, -2.0, 1)
    assert noop_flag.item() == 1


def _check_norms(found, tensors, per_tensor, factor=1.0):
    total, each = found
    values = [x * factor for x in lists.exact(tensors)]
    assert total.shape == (1,) and total.dtype == each.dtype == F32
    assert each.shape == ((len(tensors),) if per_tensor else (0,))
    assert math.isclose(total.item(), lists.norm(values), rel_tol=1e-6)
    if per_tensor:
        torch.testing.assert_close(
            each.cpu().to(F64),
            torch.tensor([lists.norm([v]) for v in values], dtype=F64, device="cpu"),
            rtol=1e-6,
            atol=0,
        )


@pytest.mark.parametrize("per_tensor", [None, False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_norms(variant, dtype, per_tensor):
    tensors, outputs = state(variant.device, (dtype, dtype))
    untouched = lists.clones(tensors)
    arguments = CHUNK, flag(variant.device)
    _check_norms(amp_C.multi_tensor_l2norm(*arguments, [tensors], per_tensor), tensors, per_tensor)
    _check_norms(amp_C.multi_tensor_l2norm_mp(*arguments, [tensors], per_tensor), tensors, per_tensor)
    inv_scale = scalar(0.25, variant.device)
    found = amp_C.multi_tensor_unscale_l2norm(*arguments, [tensors], inv_scale, per_tensor)
    _check_norms(found, tensors, per_tensor, 0.25)
    found = amp_C.multi_tensor_l2norm_scale(*arguments, [tensors, outputs], 0.5, per_tensor)
    _check_norms(found, tensors, per_tensor)
    check(outputs, [x / 2 for x in lists.exact(tensors)])
    lists.assert_same_bits(tensors, untouched)
    assert arguments[1].item() == 0


def test_norms_of_nothing(variant):
    for per_tensor in (None, True):
        total, each = amp_C.multi_tensor_l2norm(CHUNK, flag(variant.device), [[]], per_tensor)
        assert total.tolist() == [0] and each.tolist() == [] and total.device.type == variant.device.type


def test_norms_and_the_flag(variant):
    """All raise it; only l2norm_mp reads it."""
    tensors = [torch.full((3,), float("inf"), device=variant.device, dtype=F32)]
    good = [torch.ones(4, device=variant.device, dtype=F32)]
    noop_flag = flag(variant.device)
    assert amp_C.multi_tensor_l2norm(CHUNK, noop_flag, [tensors])[0].isinf()
    assert noop_flag.item() == 1
    assert amp_C.multi_tensor_l2norm(CHUNK, noop_flag, [good])[0].item() == 2
    assert amp_C.multi_tensor_unscale_l2norm(CHUNK, noop_flag, [good], scalar(2.0, variant.device))[0] == 4
    assert amp_C.multi_tensor_l2norm_mp(CHUNK, noop_flag, [good])[0].item() == 0
    noop_flag.zero_()
    amp_C.multi_tensor_l2norm_mp(CHUNK, noop_flag, [tensors])
    assert noop_flag.item() == 1


# ---- optimizers --------------------------------------------------------------------------------------------


def _torch_step(kind, gradients, parameters, **options):
    """The parameters after one step of a torch optimizer in float64, and its states."""
    copies = [torch.nn.Parameter(p) for p in lists.exact(parameters)]
    for p, g in zip(copies, lists.exact(gradients), strict=True):
        p.grad = g
    optimizer = kind(copies, **options)
    return copies, optimizer


@pytest.mark.parametrize("with_model", [False, True], ids=["", "model copies"])
def test_sgd(variant, with_model):
    g, p, m = state(variant.device, (F16, F32, F32))
    model = [[x.to(F16) for x in p]] if with_model else []
    copies, oracle = _torch_step(torch.optim.SGD, [x.float() / 4 for x in g], p, lr=0.1, momentum=0.9,
                                 weight_decay=0.1, nesterov=True)  # fmt: skip
    for q, buffer in zip(copies, lists.exact(m), strict=True):
        oracle.state[q]["momentum_buffer"] = buffer
    oracle.step()
    step = amp_C.multi_tensor_sgd
    arguments = [g, p, m, *model], 0.1, 0.9, 0.0, 0.1, True, False, False, 0.25
    step(CHUNK, flag(variant.device), *arguments)
    check(p, [q.detach() for q in copies])
    check(m, [oracle.state[q]["momentum_buffer"] for q in copies])
    if with_model:
        check(model[0], lists.exact(p), 0.0)
    before = lists.clones(p)
    step(CHUNK, flag(variant.device, 1), *arguments)
    lists.assert_same_bits(p, before)


def _adam(g, p, m, v, lr, step, mode, inv_scale=1.0, decay=0.1, b1=0.9, b2=0.99, eps=1e-6):
    results = [], [], []
    for gradient, q, first, second in zip(*map(lists.exact, (g, p, m, v)), strict=True):
        gradient = gradient * inv_scale + (decay * q if mode == 0 else 0)
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * gradient**2
        update = first / (1 - b1**step) / ((second / (1 - b2**step)).sqrt() + eps)
        values = q - lr * (update + (decay * q if mode else 0)), first, second
        for result, value in zip(results, values, strict=True):
            result.append(value)
    return results


@pytest.mark.parametrize("mode", [0, 1], ids=["adam", "adamw"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_adam(variant, dtype, mode):
    tensors = state(variant.device, (dtype, dtype, F32, F32))
    wanted = _adam(*tensors, 0.01, 3, mode)
    noop_flag = flag(variant.device, 1)  # which is not read
    amp_C.multi_tensor_adam(CHUNK, noop_flag, tensors, 0.01, 0.9, 0.99, 1e-6, 3, mode, 1, 0.1)
    for found, value in zip(tensors[1:], wanted, strict=True):
        check(found, value)


@pytest.mark.parametrize("masters", [False, True], ids=["", "masters"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_adam_capturable(variant, dtype, masters):
    """The gradients come out unscaled; a raised flag leaves all as it is."""
    device = variant.device
    tensors = state(device, (dtype, dtype, F32, F32))
    function, updated = amp_C.multi_tensor_adam_capturable, tensors
    if masters:
        function = amp_C.multi_tensor_adam_capturable_master
        tensors = [*tensors, [p.float() + 2.0**-20 for p in tensors[1]]]
        updated = [tensors[0], tensors[4], *tensors[2:4]]
    lr, step, inv_scale = scalar(0.01, device), scalar(3, device, torch.int32), scalar(0.5, device)
    scalars = lr, 0.9, 0.99, 1e-6, step, 1, 1, 0.1, inv_scale
    before = [lists.clones(column) for column in tensors]
    function(CHUNK, flag(device, 1), tensors, *scalars)
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)
    wanted = _adam(*updated, lr.item(), 3, 1, 0.5)
    function(CHUNK, flag(device), tensors, *scalars)
    for found, value in zip(updated[1:], wanted, strict=True):
        check(found, value)
    check(tensors[0], [g / 2 for g in lists.exact(before[0])])
    if masters:
        lists.assert_same_bits(tensors[1], [master.to(dtype) for master in tensors[4]])
    assert step.item() == 3


def test_adagrad(variant):
    g, p, h = state(variant.device, (F32, F32, F32), squared=2)
    copies, oracle = _torch_step(
        float32_on_cpu()(torch.optim.Adagrad), g, p, lr=0.1, weight_decay=0.1, eps=1e-6
    )
    for q, total in zip(copies, lists.exact(h), strict=True):
        oracle.state[q]["sum"] = total
    oracle.step()
    amp_C.multi_tensor_adagrad(CHUNK, flag(variant.device, 1), [g, p, h], 0.1, 1e-6, 0, 0.1)
    check(p, [q.detach() for q in copies])
    check(h, [oracle.state[q]["sum"] for q in copies])


@pytest.mark.parametrize("norm_type", [2, 0], ids=["l2", "maximum"])
def test_novograd(variant, norm_type):
    g, p, m = state(variant.device, (F32, F32, F32))
    norms = torch.arange(1.0, len(g) + 1, device=variant.device, dtype=F32)
    wanted_p, wanted_m, wanted_n = [], [], []
    for gradient, q, first, old in zip(*map(lists.exact, (g, p, m)), norms.tolist(), strict=True):
        if norm_type == 2:
            new = math.sqrt(0.99 * old**2 + 0.01 * float((gradient**2).sum()))
        else:
            new = 0.99 * old + 0.01 * float(gradient.abs().max() if gradient.numel() else 0)
        denominator = new / math.sqrt(1 - 0.99**3) + 1e-6
        first = 0.9 * first + 0.1 * (gradient / denominator + 0.1 * q)
        wanted_p.append(q - 0.01 * first / (1 - 0.9**3))
        wanted_m.append(first)
        wanted_n.append(new)
    amp_C.multi_tensor_novograd(
        CHUNK, flag(variant.device, 1), [g, p, m], norms, 0.01, 0.9, 0.99, 1e-6, 3, 1, 0.1, 1, 0, norm_type
    )
    check(p, wanted_p)
    check(m, wanted_m)
    filled = [i for i, x in enumerate(g) if x.numel()]
    check([norms[filled]], [torch.tensor(wanted_n, dtype=F64, device="cpu")[filled]])


def _lamb(g, p, m, v, lr, step, clip, decay=0.1):
    """AdamW's update of the clipped gradient, scaled by the ratio of norms."""
    results = [], [], [], []
    for gradient, q, first, second in zip(*map(lists.exact, (g, p, m, v)), strict=True):
        moved, first, second = (
            x[0] for x in _adam([gradient * clip], [q], [first], [second], 1.0, step, 1, decay=decay)
        )
        update = q - moved
        norms = float(q.norm()), float(update.norm())
        ratio = norms[0] / norms[1] if all(norms) else 1.0
        for result, value in zip(results, (q - lr * ratio * update, first, second, update), strict=True):
            result.append(value)
    return results


@pytest.mark.parametrize("kind", ["plain", "two stages", "mp", "mp with masters"])
def test_lamb(variant, kind):
    device = variant.device
    masters = kind.endswith("masters")
    g, p, m, v = state(device, (F16 if masters else F32, F32, F32, F32))
    wanted = _lamb(g, p, m, v, 0.01, 3, 0.5)
    norm, limit = scalar(4.0, device), 2.0
    if kind == "plain":
        amp_C.multi_tensor_lamb(
            CHUNK, flag(device), [g, p, m, v], 0.01, 0.9, 0.99, 1e-6, 3, 1, 0.1, 1, 1, norm, limit, None
        )
    elif kind == "two stages":
        first, second = amp_C.multi_tensor_lamb_stage1_cuda, amp_C.multi_tensor_lamb_stage2_cuda
        updates = lists.empties(g)
        decay = torch.full((len(g),), 0.1, device=device, dtype=F32)
        first(CHUNK, flag(device), [g, p, m, v, updates], decay, 3, 0.9, 0.99, 1e-6, norm, limit)
        norms = [amp_C.multi_tensor_l2norm(CHUNK, flag(device), [x], True)[1] for x in (p, updates)]
        second(CHUNK, flag(device), [p, updates], *norms, 0.01, 0.1, None)
        g = updates
    else:
        model = [[x.to(F16) for x in p]] if masters else []
        step = scalar(3, device, torch.int32)
        arguments = (
            [g, p, m, v, *model], scalar(0.01, device), 0.9, 0.99, 1e-6, step, 1, 0.1, 1, 1, norm,
            scalar(limit, device), False, scalar(0.0, device), scalar(1.0, device),
        )  # fmt: skip
        before = lists.clones(p)
        amp_C.multi_tensor_lamb_mp(CHUNK, flag(device, 1), *arguments)
        lists.assert_same_bits(p, before)
        amp_C.multi_tensor_lamb_mp(CHUNK, flag(device), *arguments)
        assert step.item() == 3
        if masters:
            lists.assert_same_bits(model[0], [x.to(F16) for x in p])
    tolerance = 1e-3 if masters else 1e-5  # updates pass through the gradients' dtype
    for found, value in zip((p, m, v, g), wanted, strict=True):
        check(found, value, tolerance)


@pytest.mark.parametrize("is_skipped", [False, True], ids=["", "skipped"])
def test_lars(variant, is_skipped):
    step = amp_C.multi_tensor_lars
    g, p, m = state(variant.device, (F32, F32, F32))
    norms = [amp_C.multi_tensor_l2norm(CHUNK, flag(variant.device), [x], True)[1] for x in (g, p)]
    wanted_p, wanted_m = [], []
    for gradient, q, buffer in zip(*map(lists.exact, (g, p, m)), strict=True):
        g_norm, p_norm = float(gradient.norm()), float(q.norm())
        ratio = 0.02 * p_norm / (g_norm + 0.1 * p_norm + 1e-6) if g_norm and p_norm else 1.0
        move = 0.5 * (1.0 if is_skipped else ratio) * (gradient + 0.1 * q)
        buffer = 0.9 * buffer - move
        wanted_p.append(q + buffer)
        wanted_m.append(buffer)
    scalars = 0.5, 0.02, 1e-6, 0.1, 0.9, 0.3, False, True, True, 7.0, is_skipped
    step(CHUNK, flag(variant.device), [g, p, m], *norms, *scalars)
    check(p, wanted_p)
    check(m, wanted_m)


def test_update_scale_hysteresis(variant):
    scale = scalar(8.0, variant.device)
    growth, left = (scalar(n, variant.device, torch.int32) for n in (0, 1))
    found = scalar(1.0, variant.device)
    assert amp_C.update_scale_hysteresis(scale, growth, left, found, 2.0, 0.5, 100, 1) is scale
    assert scale.item() == 4 and left.item() == 0


def test_under_compile(variant, counting_backend):
    """One graph: the functions are traced through to the dispatcher's ops."""

    def clip(gradients, noop_flag):
        total, _ = amp_C.multi_tensor_l2norm(CHUNK, noop_flag, [gradients], False)
        amp_C.multi_tensor_scale(CHUNK, noop_flag, [gradients, gradients], 0.5)
        return total * 2

    gradients = lists.random(F32, variant.device, SHAPES)
    wanted = lists.norm(lists.exact(gradients))
    before = lists.exact(gradients)
    total = torch.compile(clip, fullgraph=True, backend=counting_backend)(gradients, flag(variant.device))
    assert math.isclose(total.item(), 2 * wanted, rel_tol=1e-6)
    check(gradients, [x / 2 for x in before])
