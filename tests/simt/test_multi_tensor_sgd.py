"""multi_tensor_sgd kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.element_types import decode, encode
from simt.tensor_lists import SIZES, TensorLists, check_unscaled

PLAIN = ["f32_f32", "f16_f32", "bf16_f32", "f16_f16", "f32_f16", "bf16_bf16", "f32_bf16", "f64_f64"]
MOMENTUM = [
    "f32_f32_f32", "f16_f32_f32", "bf16_f32_f32", "f16_f16_f32", "f16_f16_f16", "f32_f16_f32",
    "f32_f16_f16", "bf16_bf16_f32", "bf16_bf16_bf16", "f32_bf16_f32", "f32_bf16_bf16", "f64_f64_f64",
]  # fmt: skip
MODEL = ["f16_f32_f32_f16", "f32_f32_f32_f16", "bf16_f32_f32_bf16", "f32_f32_f32_bf16", "bf16_f32_f32_f16"]
SCALARS = dict(lr=0.1, weight_decay=0.3, momentum=0.9, dampening=0.25, scale=0.5)
GRADIENT, PARAMETER, BUFFER, COPY = range(4)


def _launch(lists, **changes):
    kernel = "_".join(lists.types)
    lists.launch(kernel, "SgdArguments", "multi_tensor_sgd", **(SCALARS | changes))


def _expected(lists, first=False, nesterov=0, wd_after_momentum=0, stored=None, **changes):
    """torch.optim.SGD's step in float64: parameters, buffers.

    first: for all, or an array for each tensor. stored: buffers after the step, rounded, of which parameters come.
    """
    s = SCALARS | changes
    results = []
    for i, (gradient, parameter) in enumerate(zip(*lists.values[:2], strict=True)):
        step = s["scale"] * gradient + (0 if wd_after_momentum else s["weight_decay"] * parameter)
        buffer = None
        if len(lists.types) > 2:
            buffer = s["momentum"] * lists.values[BUFFER][i] + (1 - s["dampening"]) * step
            buffer = np.where(first if isinstance(first, bool) else first[i], step, buffer)
            moved = buffer if stored is None else stored[i]
            step = step + s["momentum"] * moved if nesterov else moved
        if wd_after_momentum:
            step = step + s["weight_decay"] * parameter
        results.append((parameter - s["lr"] * step, buffer))
    return [list(column) for column in zip(*results, strict=True)]


def _check(lists, **how):
    rounded = lists.types[BUFFER:] in (["f16"], ["bf16"])
    parameters, buffers = _expected(lists, stored=lists.now()[BUFFER] if rounded else None, **how)
    math = "f64" if lists.types[PARAMETER] == "f64" else "f32"
    lists.check(PARAMETER, parameters, math)
    if len(lists.types) > 2:
        lists.check(BUFFER, buffers, math)
    if len(lists.types) > 3:
        lists.check_rounded_copy(COPY, PARAMETER)
    lists.check_untouched([GRADIENT])


@pytest.mark.parametrize("types", PLAIN)
def test_without_momentum(device, types):
    lists = TensorLists(device, types.split("_"))
    _launch(lists)
    _check(lists)


@pytest.mark.parametrize("types", MOMENTUM + MODEL)
def test_with_momentum(device, types):
    lists = TensorLists(device, types.split("_"))
    _launch(lists)
    _check(lists)


@pytest.mark.parametrize("wd_after_momentum", [0, 1])
@pytest.mark.parametrize("nesterov", [0, 1])
@pytest.mark.parametrize("first_run", [0, 1])
def test_modes(device, first_run, nesterov, wd_after_momentum):
    lists = TensorLists(device, ["f32"] * 3)
    how = dict(nesterov=nesterov, wd_after_momentum=wd_after_momentum)
    _launch(lists, first_run=first_run, **how)
    _check(lists, first=bool(first_run), **how)


def test_marked_elements_take_their_first_step(device):
    lists = TensorLists(device, ["bf16", "f32", "f32"])
    rng = np.random.default_rng(1)
    marks = [rng.random(n) < 0.5 for n in SIZES]
    lists.replace(
        BUFFER,
        [np.where(m, -0.0, v).astype(np.float32) for m, v in zip(marks, lists.values[BUFFER], strict=True)],
    )
    _launch(lists, marked_first_run=1)
    _check(lists, first=marks)


def test_no_element_is_left_marked(device):
    """A buffer that becomes -0 has taken a step all the same."""
    lists = TensorLists(device, ["f32"] * 3)
    lists.replace(GRADIENT, [np.full(n, -0.0, np.float32) for n in SIZES])
    lists.replace(BUFFER, [np.full(n, -0.0, np.float32) for n in SIZES])
    _launch(lists, marked_first_run=1, weight_decay=0.0)
    assert not any(np.signbit(b).any() for b in lists.now()[BUFFER])


@pytest.mark.parametrize("types, smallest", [("f16_f16_f16", 2.0**-24), ("bf16_bf16_bf16", 2.0**-133)])
def test_no_element_is_marked_by_rounding(device, types, smallest):
    """Half of the smallest element rounds to -0: it has taken its step; the smallest itself stays."""
    lists = TensorLists(device, types.split("_"))
    for factor, kept in ((1, 0.0), (2, -smallest)):
        values = (np.full(n, -factor * smallest) for n in SIZES)
        lists.replace(BUFFER, [encode(v, lists.types[BUFFER]) for v in values])
        _launch(lists, marked_first_run=1, weight_decay=0.0, scale=0.0, momentum=0.5)
        for buffer in lists.now()[BUFFER]:
            assert (buffer == kept).all() and (np.signbit(buffer) == (kept != 0)).all()


def test_buffers_are_left_alone_without_momentum(device):
    lists = TensorLists(device, ["f16", "f16", "f16"])
    _launch(lists, momentum=0.0)
    lists.check_untouched([BUFFER])
    plain = TensorLists(device, ["f16", "f16"])
    _launch(plain)
    for a, b in zip(lists.now()[PARAMETER], plain.now()[PARAMETER], strict=True):
        np.testing.assert_array_equal(a, b)


def test_values_that_lie_on_the_device(device):
    lists = TensorLists(device, ["f16", "f32", "f32"])
    _launch(lists, lr=99.0, lr_on_device=device.full(1, 0.25), inv_scale=device.full(1, 0.125))
    _check(lists, lr=0.25, scale=0.0625)


@pytest.mark.parametrize("flag", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(device, flag):
    raised = device.full(1, 1, np.float32 if flag == "found_inf" else np.int32)
    for types in ("f32_f32", "f32_f32_f32", "f32_f32_f32_f16"):
        lists = TensorLists(device, types.split("_"))
        _launch(lists, **{flag: raised})
        lists.check_untouched()


def test_a_tensor_without_gradient_is_left_out(device):
    lists = TensorLists(device, ["f32", "f32", "f32", "f16"])
    out = SIZES.index(1000)
    hidden, lists.buffers[GRADIENT][out] = lists.buffers[GRADIENT][out], None
    _launch(lists)
    lists.buffers[GRADIENT][out] = hidden
    now, (parameters, _) = lists.now(), _expected(lists)
    for k in (PARAMETER, BUFFER, COPY):
        np.testing.assert_array_equal(now[k][out], lists.values[k][out])
    np.testing.assert_allclose(now[PARAMETER][out + 1], parameters[out + 1], rtol=1e-6, atol=2e-7)
    np.testing.assert_array_equal(now[COPY][out + 1], decode(encode(now[PARAMETER][out + 1], "f16"), "f16"))


# ---- the launch that leaves gradients unscaled ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "f64"])
def test_gradients_are_left_unscaled(device, name):
    check_unscaled(device, "multi_tensor_sgd", "SgdArguments", name, 0.0625, scale=0.5)
