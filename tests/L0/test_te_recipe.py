"""Recipes, autocasts, and what delayed scaling makes of the magnitudes of the steps before."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys

import pytest
import torch
from te_common import RECIPES, clean, random, train  # noqa: F401  a fixture

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.common import recipe
from apex.transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
)
from apex.transformer_engine.pytorch._state import LayerState, current

pytestmark = pytest.mark.usefixtures("clean")


def test_formats():
    assert Format.E4M3.value == (448, 448) and Format.E5M2.value == (57344, 57344)
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)


def test_recipes_need_no_torch():
    code = "import sys, apex.transformer_engine.common.recipe as r; r.DelayedScaling(); print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.strip() == "False"


def test_tensorflow_is_refused_by_name():
    with pytest.raises(ImportError, match="dropped it"):
        import apex.transformer_engine.tensorflow  # noqa: F401
    with pytest.raises(ImportError, match="dropped it"):
        from apex.transformer_engine import tensorflow  # noqa: F401
    assert importlib.util.find_spec("apex.transformer_engine.tensorflow") is None


def test_defaults_are_those_of_the_public_engine():
    delayed = DelayedScaling()
    assert (delayed.margin, delayed.fp8_format, delayed.amax_history_len) == (0, Format.HYBRID, 1024)
    assert delayed.amax_compute_algo == "max" and delayed.reduce_amax
    assert delayed.override_linear_precision == (False, False, False)
    assert DelayedScaling(1, 1, Format.E4M3).fp8_format is Format.E4M3
    assert delayed.delayed() and not delayed.float8_current_scaling() and not delayed.mxfp8()
    assert Float8CurrentScaling().float8_current_scaling() and Float8BlockScaling().float8_block_scaling()
    assert not Float8CurrentScaling().fp8_gemm_fprop.use_split_accumulator


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: DelayedScaling(fp8_format=Format.E5M2), ValueError),
        (lambda: Float8CurrentScaling(fp8_format=Format.E5M2), ValueError),
        (lambda: Float8BlockScaling(fp8_format=Format.E5M2), ValueError),
        (lambda: DelayedScaling(fp8_format="E4M3"), TypeError),
        (lambda: DelayedScaling(override_linear_precision=(True, False, False)), ValueError),
        (lambda: DelayedScaling(override_linear_precision=(False, True, True)), ValueError),
        (lambda: DelayedScaling(amax_history_len=0), ValueError),
        (lambda: DelayedScaling(amax_history_len=1.5), TypeError),
        (lambda: DelayedScaling(amax_compute_algo="mean"), ValueError),
        (lambda: DelayedScaling(scaling_factor_compute_algo=3), TypeError),
        (lambda: DelayedScaling(fp8_dpa=True), ValueError),
        (lambda: Float8CurrentScaling(fp8_mha=True), ValueError),
        (lambda: Float8BlockScaling(x_block_scaling_dim=3), ValueError),
        (lambda: te.fp8_autocast(fp8_recipe=Format.HYBRID), TypeError),
    ],
)
def test_what_is_no_recipe(make, error):
    with pytest.raises(error):
        make()


def test_block_scales_may_be_any_number(monkeypatch):
    assert Float8BlockScaling().fp8_quant_fwd_inp.power_2_scale
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    assert not Float8BlockScaling().fp8_quant_bwd_grad.power_2_scale


# ---- autocast ----------------------------------------------------------------------------------------------------


def said():
    return current.enabled, current.calibrating, current.depth


def test_autocasts_nest_and_leave_all_as_it_was():
    inner, outer = RECIPES["current"], RECIPES["delayed"]
    again = te.fp8_autocast(fp8_recipe=outer)
    with again:
        assert said() == (True, False, 1) and current.recipe is outer
        with te.autocast(enabled=False, calibrating=True, recipe=inner):
            assert said() == (False, True, 2)
            with again:
                assert said() == (True, False, 3) and current.recipe is outer
            assert said() == (False, True, 2) and current.recipe is inner
        assert said() == (True, False, 1) and current.recipe is outer
    with pytest.raises(KeyError), again, te.autocast(recipe=inner):
        raise KeyError
    assert said() == (False, False, 0)
    assert te.fp8_autocast(fp8_recipe=inner)(said)() == (True, False, 1)


def test_a_disabled_autocast_multiplies_as_it_is():
    layer, x = te.Linear(16, 16, device="cpu"), random(4, 16)
    with te.fp8_autocast():
        narrow = layer(x)
        with te.fp8_autocast(enabled=False):
            wide = layer(x)
    assert torch.equal(wide, layer(x)) and not torch.equal(wide, narrow)


def test_quantized_weights_are_made_where_asked_for():
    kind = lambda: type(te.Linear(4, 4, device="cpu").weight)  # noqa: E731
    with te.fp8_model_init():
        assert kind() is te.Float8Tensor
        with te.quantized_model_init(enabled=False):
            assert kind() is torch.nn.Parameter
        with pytest.raises(KeyError), te.fp8_model_init(enabled=False):
            raise KeyError
        assert kind() is te.Float8Tensor
    assert kind() is torch.nn.Parameter


# ---- the update rule -----------------------------------------------------------------------------------------------


def amaxes(state):
    return state.forward.amax_history[:, 0].tolist()


@pytest.mark.parametrize(
    "options, scales",
    [
        (dict(amax_history_len=3), [1, 448 / 2, 448 / 8, 448 / 8, 448 / 8, 448 / 4]),
        (dict(amax_history_len=1), [1, 448 / 2, 448 / 8, 448 / 4, 448 / 4, 448 / 4]),
        (
            dict(amax_history_len=3, amax_compute_algo="most_recent", margin=2),
            [1, 112 / 2, 112 / 8, 112 / 4, 112 / 4, 112 / 4],
        ),
        (dict(amax_history_len=2, amax_compute_algo=lambda h: h.sum(0)), [1, 224, 44.8, 448 / 12, 112, 112]),
        (
            dict(amax_history_len=1, scaling_factor_compute_algo=lambda amax, old, top, of: old + top / amax),
            [1, 225, 225 + 56, 225 + 56 + 112, math.inf, math.inf],
        ),
    ],
)
def test_scales_come_from_the_steps_before(options, scales):
    """Inputs 2, 8, 4, 0, 4: each step multiplies with what is known before it. A step of zeros changes no scale."""
    layer, of = te.Linear(16, 16, device="cpu"), DelayedScaling(**options)
    found = []
    for value in (2.0, 8.0, 4.0, 0.0, 0.0, 4.0):
        with te.fp8_autocast(fp8_recipe=of):
            found.append(layer.fp8_meta["scaling_fwd"].scale[0].item())
            layer(torch.full((2, 16), -value, dtype=torch.float32, device="cpu")).sum().backward()
    assert found == pytest.approx(scales)


def test_the_history_moves_on():
    layer, of = te.Linear(16, 16, device="cpu"), DelayedScaling(amax_history_len=3)
    rows = []
    for value in (2.0, 8.0, 4.0):
        with te.fp8_autocast(fp8_recipe=of):
            layer(torch.full((2, 16), value, dtype=torch.float32, device="cpu"))
        rows.append(amaxes(layer._state))
    assert rows == [[2, 0, 0], [8, 0, 2], [4, 2, 8]]


@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0])
def test_a_bad_step_keeps_the_scale(bad):
    """NaN is left out of a magnitude."""
    layer, of = te.Linear(16, 16, device="cpu"), DelayedScaling(amax_history_len=1)
    for value in (2.0, bad):
        with te.fp8_autocast(fp8_recipe=of):
            layer(torch.full((2, 16), value, dtype=torch.float32, device="cpu"))
    with te.fp8_autocast(fp8_recipe=of):
        assert layer.fp8_meta["scaling_fwd"].scale[0] == 224
        assert layer.fp8_meta["scaling_fwd"].scale_inv[0] == 1 / 224


def test_gradients_have_scales_of_their_own():
    layer, of = te.Linear(16, 16, device="cpu"), DelayedScaling(amax_history_len=2)
    for _ in range(2):
        with te.fp8_autocast(fp8_recipe=of):
            y = layer(random(4, 16))
        y.backward(torch.full_like(y, 0.25))
    assert layer.fp8_meta["scaling_bwd"].scale[0] == 57344 / 0.25
    assert layer.fp8_meta["scaling_bwd"].amax_history[0, 0] == 0.25


def test_evaluation_changes_nothing():
    layer, of = te.Linear(16, 16, device="cpu").eval(), RECIPES["delayed"]
    for _ in range(2):
        with te.fp8_autocast(fp8_recipe=of), torch.no_grad():
            layer(random(4, 16))
    layer.train()
    with te.fp8_autocast(fp8_recipe=of), torch.no_grad():
        layer(random(4, 16))
    assert not any(layer._state.forward.amax_history.flatten().tolist())


def test_calibration_records_and_changes_no_value():
    layer, of, x = te.Linear(16, 16, device="cpu").eval(), RECIPES["delayed"], random(4, 16)
    with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=of):
        found = layer(x)
    assert torch.equal(found, layer(x))
    with te.fp8_autocast(fp8_recipe=of):
        scale = layer.fp8_meta["scaling_fwd"].scale
        narrow = layer(x)
    assert scale[:2].tolist() == pytest.approx(
        [448 / x.abs().max().item(), 448 / layer.weight.abs().max().item()]
    )
    assert 0 < (narrow - found).norm() < 0.1 * found.norm()


def test_a_layer_keeps_the_newest_steps_of_another_history():
    state = LayerState(1, torch.device("cpu"))
    state.prepare(DelayedScaling(amax_history_len=3), torch.device("cpu"))
    state.forward.amax_history.copy_(torch.arange(9.0, dtype=torch.float32, device="cpu").view(3, 3))
    state.prepare(DelayedScaling(amax_history_len=2), torch.device("cpu"))
    assert amaxes(state) == [0, 3]
    state.prepare(DelayedScaling(amax_history_len=4), torch.device("cpu"))
    assert amaxes(state) == [0, 3, 0, 0]


def test_layers_share_a_recipe_and_no_scale():
    of = recipe.DelayedScaling(amax_history_len=2)
    first, second = te.Linear(16, 16, device="cpu"), te.Linear(16, 16, device="cpu")
    x = random(4, 16)
    for _ in range(2):
        with te.fp8_autocast(fp8_recipe=of):
            first(x), second(10 * x)
    a, b = (layer.fp8_meta["scaling_fwd"].scale[0].item() for layer in (first, second))
    assert a == pytest.approx(10 * b)


def test_a_layer_that_is_called_twice_takes_the_larger_magnitude():
    layer, x = te.Linear(16, 16, device="cpu"), random(4, 16)
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        layer(x), layer(3 * x), layer(2 * x)
    assert amaxes(layer._state)[0] == pytest.approx(3 * x.abs().max().item())


def test_a_backward_pass_after_the_next_forward_pass():
    """As pipelines run: forward, forward, backward, backward."""
    layer, x = te.Linear(16, 16, device="cpu"), random(4, 16, grad=True)
    train(layer, RECIPES["delayed"], x)
    outputs = []
    for _ in range(2):
        with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
            outputs.append(layer(x))
    for k, y in enumerate(outputs):
        y.backward(torch.full_like(y, 2.0 + k))
    assert layer.fp8_meta["scaling_bwd"].amax_history[0, 0] == 3
