"""Products of layers in eager mode, which C++ makes: as the function in Python does, bit for bit, and by few frames."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
import weakref

import pytest
import te_common
import torch
from te_common import (
    DEVICES,
    RECIPES,
    clean,  # noqa: F401  a fixture
    random,
    train,
)
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad

import apex
import apex.transformer_engine.pytorch as te
from apex.transformer_engine.common import recipe
from apex.transformer_engine.pytorch import _casts, _eager, _linear, _scaling, _state

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
layer = functools.partial(te_common.layer, dtype=BF16)
HERE = {name: RECIPES[name] for name in ("delayed", "delayed-e4m3", "current")} | {
    "powers of two": recipe.Float8CurrentScaling(
        fp8_quant_fwd_inp=recipe.QParams(power_2_scale=True, amax_epsilon=0.5),
        fp8_quant_bwd_grad=recipe.QParams(power_2_scale=True),
        fp8_gemm_wgrad=recipe.MMParams(use_split_accumulator=False),
    )
}
FOLDER = os.path.dirname(apex.__file__)
OF = pytest.mark.parametrize("of", HERE.values(), ids=HERE)
pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.skipif(_eager._layer is None, reason="no compiled bindings: Python's function serves"),
]


def refuse(*_, **__):
    raise AssertionError("the function in Python was called")


@pytest.fixture
def in_cpp(monkeypatch):
    """Whatever is multiplied in FP8 is so by C++."""
    monkeypatch.setattr(_linear.Linear, "apply", refuse)


def in_python(monkeypatch):
    monkeypatch.setattr(_eager, "_layer", None)
    monkeypatch.setattr(_casts, "_new_scales", None)


def steps_of(made, of, x, steps=3, **options):
    """All that some steps leave behind."""
    found = []
    for _ in range(steps):
        y = train(made, of, x, **options)
        found += [y.detach(), x.grad, *(parameter.grad for parameter in made.parameters())]
    state = made.fp8_meta
    for scaling in (state["scaling_fwd"], state["scaling_bwd"]):
        found += [scaling.scale, scaling.scale_inv, scaling.amax_history.clone()]
    return found


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", [(24, 32, 48), (7, 130, 260), (1, 5, 3)], ids=str)
@OF
def test_as_in_python(of, shape, dtype, device, monkeypatch):
    *rows, inputs, outputs = shape
    x = random(*rows, inputs, dtype=dtype, device=device, grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(_linear.Linear, "apply", refuse)
        found = steps_of(layer(inputs, outputs, dtype=dtype, device=device), of, x)
    with monkeypatch.context() as patch:
        in_python(patch)
        same(found, steps_of(layer(inputs, outputs, dtype=dtype, device=device), of, x))


NORMS = {
    "layer": {},
    "rms": {"normalization": "RMSNorm"},
    "layer, 1 + gamma": {"zero_centered_gamma": True, "bias": False},
    "rms, 1 + gamma": {"normalization": "RMSNorm", "zero_centered_gamma": True, "eps": 0.5},
}
OF_NORM = pytest.mark.parametrize("options", NORMS.values(), ids=NORMS)


def norm_first(inputs=32, outputs=48, dtype=BF16, device="cpu", norm_dtype=None, **options):
    """A te.LayerNormLinear of which no parameter is 0 or 1 alone."""
    torch.manual_seed(3)
    made = te.LayerNormLinear(inputs, outputs, params_dtype=dtype, device=device, **options)
    for parameter in (made.layer_norm_weight, made.layer_norm_bias, made.bias):
        if parameter is not None:
            torch.nn.init.normal_(parameter)
    for parameter in (made.layer_norm_weight, made.layer_norm_bias):
        if parameter is not None and norm_dtype is not None:
            parameter.data = parameter.data.to(norm_dtype)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, norm_dtype", [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("shape", [(24, 32, 48), (7, 130, 260), (1, 2, 5, 3)], ids=str)
@pytest.mark.parametrize("of", ["delayed", "delayed-e4m3"])
@OF_NORM
def test_a_norm_first_as_in_python(options, of, shape, dtype, norm_dtype, device, monkeypatch):
    *rows, inputs, outputs = shape
    x = random(*rows, inputs, dtype=dtype, device=device, grad=True)
    results = []
    for patched in (False, True):
        with monkeypatch.context() as patch:
            if patched:
                in_python(patch)
            else:
                patch.setattr(_linear.Linear, "apply", refuse)
            made = norm_first(inputs, outputs, dtype=dtype, norm_dtype=norm_dtype, device=device, **options)
            results.append(steps_of(made, RECIPES[of], x))
    same(*results)


@pytest.mark.parametrize("wanted", itertools.product([False, True], repeat=4), ids=str)
def test_whichever_gradients_of_a_norm_first_are_wanted(wanted, monkeypatch):
    """Of input, gamma, beta and weight; under an autocast of its own."""
    results = []
    for patched in (False, True):
        with monkeypatch.context() as patch:
            if patched:
                in_python(patch)
            made, x = norm_first(dtype=F32, bias=False), random(3, 2, 32, grad=wanted[0])
            of_norm = made.layer_norm_weight, made.layer_norm_bias
            for parameter, want in zip((*of_norm, made.weight), wanted[1:], strict=True):
                parameter.requires_grad_(want)
            with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]), torch.autocast("cpu", BF16):
                y = made(x)
            assert y.dtype == BF16 and y.requires_grad == any(wanted)
            if y.requires_grad:
                assert patched or "ApexFp8Linear" in y.grad_fn.name()
                y.backward(random(*y.shape, seed=9, dtype=BF16))
            results.append([y.detach(), x.grad, *(parameter.grad for parameter in made.parameters())])
    same(*results)


@OF_NORM
def test_compiled_autograd_of_a_norm_first(options, in_cpp):
    results = []
    for compiled in (False, True):
        made, x, grad = (
            norm_first(**options),
            random(4, 4, 32, dtype=BF16, grad=True),
            random(4, 4, 48, dtype=BF16),
        )
        with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
            y = made(x)
        if compiled:
            with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
                y.backward(grad)
        else:
            y.backward(grad)
        results.append([x.grad, *(parameter.grad for parameter in made.parameters())])
    same(*results)


@pytest.mark.parametrize("of_weight", [False, True])
def test_second_derivatives_of_a_norm_first_are_refused(of_weight, in_cpp):
    """They would be without what goes through mean and deviation."""
    made, x = norm_first(), random(16, 32, dtype=BF16, grad=True)
    made.requires_grad_(of_weight)
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        y = made(x)
    (first,) = torch.autograd.grad(y, x, random(16, 48, dtype=BF16), create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        first.sum().backward()


@pytest.mark.parametrize("wanted", itertools.product([False, True], repeat=3), ids=str)
@pytest.mark.parametrize("bias_dtype", [BF16, F32, None], ids=str)
def test_whichever_gradients_are_wanted(wanted, bias_dtype, monkeypatch):
    """Of any leading dimensions, under an autocast of its own, with a bias of any dtype or none."""
    results = []
    for patched in (False, True):
        with monkeypatch.context() as patch:
            if patched:
                in_python(patch)
            made = layer(dtype=F32, bias=bias_dtype is not None)
            if bias_dtype is not None:
                made.bias.data = made.bias.data.to(bias_dtype)
            x = random(3, 2, 32, grad=wanted[0])
            made.weight.requires_grad_(wanted[1])
            if bias_dtype is not None:
                made.bias.requires_grad_(wanted[2])
            with te.fp8_autocast(fp8_recipe=RECIPES["current"]), torch.autocast("cpu", BF16):
                y = made(x)
            assert y.dtype == BF16 and y.requires_grad == (
                any(wanted[:2]) or (wanted[2] and bias_dtype is not None)
            )
            if y.requires_grad:
                y.backward(random(*y.shape, seed=9, dtype=BF16))
            results.append([y.detach(), x.grad, *(parameter.grad for parameter in made.parameters())])
    same(*results)


@OF
def test_cached_weights(of, in_cpp, monkeypatch):
    """Of later microbatches; the first one is Python's."""
    monkeypatch.undo()
    results = []
    for patched in (False, True):
        with monkeypatch.context() as patch:
            made, x = layer(), random(16, 32, dtype=BF16, grad=True)
            train(made, of, x, is_first_microbatch=True)
            with torch.no_grad():
                made.weight.mul_(2)  # nobody sees it
            if patched:
                in_python(patch)
            else:
                patch.setattr(_linear.Linear, "apply", refuse)
            results.append(steps_of(made, of, x, is_first_microbatch=False))
    same(*results)


def test_what_python_makes():
    """Recipes and modes that C++ does not know."""
    made, x = layer(), random(16, 32, dtype=BF16, grad=True)
    for name in ("blocks", "delayed-wide-wgrad"):
        with te.fp8_autocast(fp8_recipe=RECIPES[name]):
            assert "ApexFp8Linear" not in made(x).grad_fn.name()
    for name in ("current", "delayed"):
        with te.fp8_autocast(fp8_recipe=RECIPES[name]):
            assert "ApexFp8Linear" in made(x).grad_fn.name()
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        assert "ApexFp8Linear" not in te.checkpoint(made, x).grad_fn.name()
    _scaling.fix([made.fp8_meta["scaling_fwd"], made.fp8_meta["scaling_bwd"]])
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        assert "ApexFp8Linear" not in made(x).grad_fn.name()


def test_recipes_may_change(in_cpp):
    """What a recipe was asked last is known only as long as it says the same."""
    of, made, x = recipe.Float8CurrentScaling(), layer(), random(16, 32, dtype=BF16, grad=True)
    grad = random(16, 48, dtype=BF16)
    train(made, of, x, grad)
    before = x.grad
    of.fp8_format = recipe.Format.E4M3
    train(made, of, x, grad)
    assert not torch.equal(before, x.grad)


@pytest.mark.parametrize("of, most", [("current", 15), ("delayed", 31)])
def test_few_frames(of, most, in_cpp):
    """A step of forward and backward asks Python for so many of apex's functions: each costs as much as a small op."""
    made, x = layer(), random(16, 32, dtype=BF16, grad=True)
    grad, leaves = random(16, 48, dtype=BF16), [x, *made.parameters()]
    seen = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            seen.append(frame.f_code.co_name)

    def step():
        with te.fp8_autocast(fp8_recipe=RECIPES[of]):
            y = made(x)
        forward = len(seen)
        torch.autograd.grad(y, leaves, grad)
        assert len(seen) == forward

    for _ in range(3):
        step()
    seen.clear()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert 0 < len(seen) <= most, seen


def test_layers_that_come_and_go(monkeypatch):
    """The update of the layers of the step before is taken again only where all is as it was; it keeps none alive."""
    of = recipe.DelayedScaling(amax_history_len=3)
    results = []
    for patched in (False, True):
        with monkeypatch.context() as patch:
            if patched:
                patch.setattr(_state._Steady, "flush", lambda self: False)
            layers = [layer(32, outputs) for outputs in (48, 16, 32)]
            x = random(16, 32, dtype=BF16, grad=True)
            of.margin, of.fp8_format, of.amax_history_len = 0, recipe.Format.HYBRID, 3
            for step in range(10):
                used = layers[:2] if step in (3, 4) else layers[::-1] if step == 6 else layers
                if step == 5:
                    of.margin = 1
                if step == 7:
                    of.fp8_format = recipe.Format.E4M3
                if step == 8:
                    of.amax_history_len = 2
                with te.fp8_autocast(fp8_recipe=of):
                    outputs = [made(x * (step + 1)) for made in used]
                sum(y.float().square().sum() for y in outputs).backward()
            results.append([])
            for made in layers:
                state = made.fp8_meta
                for scaling in (state["scaling_fwd"], state["scaling_bwd"]):
                    results[-1] += [scaling.scale, scaling.scale_inv, scaling.amax_history.clone()]
            with te.fp8_autocast(fp8_recipe=of):
                pass
            kept = weakref.ref(layers[0]._state)
            del layers, used, made, state, scaling, outputs
            gc.collect()
            assert kept() is None
    same(*results)


def test_scales_that_somebody_writes(in_cpp):
    """Their inverses are made anew, of a scale in place and of another tensor."""
    made, x = layer(bias=False), random(16, 32, dtype=BF16)
    scaling = made.fp8_meta["scaling_fwd"]

    def run():
        with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]), torch.no_grad():
            return made(x)

    expected = run()
    near = expected.abs().max() / 10  # a scale that its inverse does not undo is off by all of it
    scaling.scale.mul_(2.0)
    assert (run() - expected).abs().max() < near
    scaling.scale = scaling.scale * 2.0
    assert (run() - expected).abs().max() < near


def test_magnitudes_of_gradients_come_when_they_are_made(in_cpp):
    """Of a backward behind other steps, too: to the history of the step that runs."""
    made, x = layer(), random(16, 32, dtype=BF16, grad=True)
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        y = made(x)
    train(made, RECIPES["delayed"], x)
    history = made.fp8_meta["scaling_bwd"].amax_history
    assert history[0, 0] > 0
    y.backward(torch.full_like(y, 64.0))
    assert history[0, 0] == 64


@OF
def test_saved_codes_go_through_hooks(of, in_cpp):
    """What waits for the backward can be moved away, as by save_on_cpu."""
    made, x, grad = layer(), random(16, 32, dtype=BF16, grad=True), random(16, 48, dtype=BF16)
    train(made, of, x, grad)
    seen = []

    def pack(tensor):
        seen.append(tensor.dtype)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train(made, of, x, grad)
    assert seen.count(torch.float8_e4m3fn) == 2


def test_a_weight_that_was_written_is_named(in_cpp):
    made, x = layer(), random(16, 32, dtype=BF16, grad=True)
    with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
        y = made(x).sum()
    with torch.no_grad():
        made.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@OF
def test_compiled_autograd(of, in_cpp):
    """A backward that becomes one graph has the gradients, and the magnitudes, of one that does not."""
    results = []
    for compiled in (False, True):
        made, x = layer(), random(4, 4, 32, dtype=BF16, grad=True)
        grad = random(4, 4, 48, dtype=BF16)
        train(made, of, x)
        with te.fp8_autocast(fp8_recipe=of):
            y = made(x)
        made.zero_grad(set_to_none=True)
        x.grad = None
        if compiled:
            with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
                y.backward(grad)
        else:
            y.backward(grad)
        history = made.fp8_meta["scaling_bwd"].amax_history
        results.append([x.grad, made.weight.grad, made.bias.grad, history.clone()])
    same(*results)


def test_new_scales_as_in_python(variant, monkeypatch):
    """Of layers of several sizes, whose histories move on and keep their versions."""
    results = []
    for patched in (False, True):
        scalings = [_scaling.Scaling(count, 3, torch.device(variant.device)) for count in (3, 2, 6, 4)]
        with monkeypatch.context() as patch:
            if patched:
                patch.setattr(_casts, "_new_scales", None)
            for step in range(3):
                versions = [scaling.amax_history._version for scaling in scalings]
                for i, scaling in enumerate(scalings):
                    counted = torch.arange(1, len(scaling.scale) + 1, dtype=F32, device="cpu")
                    scaling.amax_history[0].copy_(counted * (i + step + 0.75))
                _scaling.update(scalings, [448.0, 57344.0] * 2, RECIPES["delayed"])
                assert [scaling.amax_history._version for scaling in scalings] == [n + 1 for n in versions]
        results.append(
            [s for scaling in scalings for s in (scaling.scale, scaling.scale_inv, scaling.amax_history)]
        )
        for scaling in scalings:
            scale, inverse, history = scaling.whole()
            assert torch.equal(_scaling._each(inverse)[0], scaling.scale_inv[0]) and history is scaling._rows
            assert all(
                number.data_ptr() % 16 == 0 or not number.is_cuda for number in _scaling._each(inverse)
            )
            assert scale is scaling.scale
    same(*results)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_bias_between_other_numbers(dtype, device, in_cpp):
    """What the card adds lies dense."""
    of, x = RECIPES["current"], random(16, 32, dtype=BF16, device=device)
    wide = random(96, seed=5, dtype=dtype, device=device)
    found = []
    for bias in (wide[::2], wide[::2].clone(), wide[:1].expand(48), wide[:1].repeat(48)):
        made = layer(device=device)
        made.bias = torch.nn.Parameter(bias, requires_grad=False)
        with te.fp8_autocast(fp8_recipe=of):
            found.append(made(x).detach())
    same(found[::2], found[1::2])


def test_inverses_that_somebody_writes(in_cpp):
    """What waits for a backward keeps its own."""
    found = []
    for written in (False, True):
        made, x = layer(), random(16, 32, dtype=BF16, grad=True)
        grad, state = random(16, 48, dtype=BF16), made.fp8_meta
        for _ in range(2):
            train(made, RECIPES["delayed"], x, grad)
        x.grad = None
        with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
            y = made(x)
        if written:
            state["scaling_fwd"].scale_inv.zero_()
            state["scaling_bwd"].scale_inv.zero_()
        y.backward(grad)
        found.append(x.grad)
    assert torch.equal(*found) and found[0].abs().max() > 0


def test_gradients_with_tangents_are_refused(monkeypatch):
    """Forward mode over backward would go on with silent zeros."""
    made, x = layer(), random(16, 32, dtype=BF16, grad=True)
    for patched in (False, True):
        if patched:
            in_python(monkeypatch)
        with te.fp8_autocast(fp8_recipe=RECIPES["current"]):
            y = made(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
            with pytest.raises(NotImplementedError, match="forward-mode automatic differentiation"):
                torch.autograd.grad(y, x, dual)


@pytest.mark.parametrize("of", ["delayed", "current"])
@pytest.mark.parametrize("before", [0, 1])
def test_transforms_of_other_tensors(of, before):
    """Refused as by any autograd.Function; nothing that the transform wrapped stays, and steps go on in C++."""
    found = []
    for transformed in (False, True):
        made, x = layer(), random(16, 32, dtype=BF16, grad=True)

        def scaled(number, made=made, x=x):
            with te.fp8_autocast(fp8_recipe=RECIPES[of]):
                return number * made(x).float().sum()

        for step in range(3):
            if step == before and not transformed:
                with te.fp8_autocast(fp8_recipe=RECIPES[of]):
                    pass  # new scales of the step before, which the first transform makes otherwise
                _state.forget()
            if step == before and transformed:
                for transform, number in (
                    (torch.func.grad, torch.ones((), dtype=F32, device="cpu")),
                    (torch.vmap, torch.ones(3, dtype=F32, device="cpu")),
                ):
                    with pytest.raises(RuntimeError, match="setup_context"):
                        transform(scaled)(number)
                    _state.forget()  # what a step that failed left
            y = train(made, RECIPES[of], x)
            assert "ApexFp8Linear" in y.grad_fn.name()
        found.append([y.detach(), x.grad, made.weight.grad, made.fp8_meta["scaling_fwd"].scale])
    same(*found)


@OF
def test_backward_within_a_transform(of, in_cpp):
    """Of a graph that the transform knows nothing of."""
    found = []
    for transformed in (False, True):
        made, x, grad = layer(), random(4, 4, 32, dtype=BF16, grad=True), random(4, 4, 48, dtype=BF16)
        train(made, of, x, grad)
        with te.fp8_autocast(fp8_recipe=of):
            y = made(x)
        inside = []

        def squared(number, y=y, made=made, x=x, grad=grad, inside=inside):
            inside += torch.autograd.grad(y, [x, made.weight, made.bias], grad)
            return number * number

        if transformed:
            torch.func.grad(squared)(torch.ones((), dtype=F32, device="cpu"))
        else:
            squared(torch.ones((), dtype=F32, device="cpu"))
        found.append([*inside, made.fp8_meta["scaling_bwd"].amax_history.clone()])
    same(*found)


@pytest.mark.parametrize("mode", ["inference", "transform"])
def test_histories_that_grow_in_a_mode(mode):
    """Memory for more steps is nobody's but the layer's: training goes on with it, in C++ and in Python."""
    of = recipe.DelayedScaling(amax_history_len=2000)
    made, x = layer(), random(16, 32, dtype=BF16, grad=True)

    def scaled(number):
        with te.fp8_autocast(fp8_recipe=of):
            return number * made(x).float().sum()

    if mode == "inference":
        with torch.inference_mode():
            scaled(torch.ones((), dtype=F32, device="cpu"))
    else:
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(scaled)(torch.ones((), dtype=F32, device="cpu"))
    for scaling in (made.fp8_meta["scaling_fwd"], made.fp8_meta["scaling_bwd"]):
        history = scaling.amax_history
        assert history.shape[0] == 2000 and not history.is_inference()
        assert not torch._C._functorch.is_functorch_wrapped_tensor(history)
    assert "ApexFp8Linear" in train(made, of, x).grad_fn.name()
    assert history[0, 0] > 0
