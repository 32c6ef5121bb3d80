"""The FP8 state in checkpoints: ours, the public engine's layouts, and what is not read."""

from __future__ import annotations

import io
import pickle
import sys
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from te_common import (
    RECIPES,
    clean,  # noqa: F401  a fixture
    random,
    train,
)

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.pytorch import _extra_state

pytestmark = pytest.mark.usefixtures("clean")
F32 = torch.float32


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        te.LayerNormLinear(32, 32, device="cpu"),
        te.LayerNormMLP(32, 48, device="cpu"),
        te.Linear(32, 8, device="cpu"),
    )


def trained():
    made = model()
    train(made, RECIPES["delayed"], random(5, 32), steps=3)
    return made


def go_on(made):
    return train(made, RECIPES["delayed"], random(5, 32), random(5, 8, seed=2), steps=2)


def test_names_of_parameters_are_the_public_engines():
    names = list(model().state_dict())
    assert names == [
        *("0.layer_norm_weight", "0.layer_norm_bias", "0.weight", "0.bias", "0._extra_state"),
        *(
            "1.layer_norm_weight",
            "1.layer_norm_bias",
            "1.fc1_weight",
            "1.fc1_bias",
            "1.fc2_weight",
            "1.fc2_bias",
        ),
        *("1._extra_state", "2.weight", "2.bias", "2._extra_state"),
    ]
    layer = te.TransformerLayer(32, 64, 4, layer_type="decoder", device="cpu").state_dict()
    for name in (
        "self_attention.layernorm_qkv.query_weight",
        "self_attention.layernorm_qkv.layer_norm_weight",
        "self_attention.proj.bias",
        "inter_attention.layernorm_query.weight",
        "inter_attention.key_value.key_weight",
        "layernorm_mlp.fc2_weight",
    ):
        assert name in layer


def test_without_fp8_there_is_no_state():
    made = model()
    train(made, None, random(5, 32))
    train(made, RECIPES["current"], random(5, 32))
    assert made.state_dict()["2._extra_state"] == _extra_state.NONE
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    other = model()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert all(map(torch.equal, made.parameters(), other.parameters()))
    other.load_state_dict({name: value for name, value in made.state_dict().items() if "extra" not in name})


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_run_goes_on_from_a_file(weights_only, tmp_path):
    made = trained()
    torch.save(made.state_dict(), tmp_path / "model.pt")
    other = model()
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=weights_only))
    assert torch.equal(go_on(other), go_on(made))
    for p, q in zip(made.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_run_goes_on_from_a_distributed_checkpoint(tmp_path):
    made = trained()
    dcp.save({"model": made.state_dict()}, checkpoint_id=tmp_path / "there")
    other = model()
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "there")
    other.load_state_dict(state["model"])
    assert torch.equal(go_on(other), go_on(made))


# ---- layouts of the public engine ----------------------------------------------------------------------------------


def numbers():
    """scale, scale_inv, amax_history of both directions, of one product."""
    scale, history = torch.tensor([2.0, 4.0, 8.0], dtype=F32, device="cpu"), random(5, 3)
    back, past = torch.tensor([16.0, 32.0], dtype=F32, device="cpu"), random(5, 2, seed=1)
    return dict(
        scale_fwd=scale,
        scale_inv_fwd=1 / scale,
        amax_history_fwd=history,
        scale_bwd=back,
        scale_inv_bwd=1 / back,
        amax_history_bwd=past,
    )


def check(layer, state):
    for short, name in (("fwd", "scaling_fwd"), ("bwd", "scaling_bwd")):
        for what in ("scale", "scale_inv", "amax_history"):
            assert torch.equal(getattr(layer.fp8_meta[name], what), state[f"{what}_{short}"])


def recipes_of_the_engine(monkeypatch):
    """A module transformer_engine.common.recipe as a checkpoint names it, which is gone when it is read."""
    package = types.ModuleType("transformer_engine.common.recipe")

    class DelayedScaling:
        def __init__(self):
            self.margin = 0

    DelayedScaling.__module__, DelayedScaling.__qualname__ = package.__name__, "DelayedScaling"
    package.DelayedScaling = DelayedScaling
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    return DelayedScaling()


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("layout", ["file", "bytes", "pickle", "dict"])
def test_layouts_of_the_public_engine(layout, protocol, monkeypatch):
    """1.x: a file of torch.save; 2.x: a pickle as uint8, with a recipe in it; 0.x: a dict."""
    state = {**numbers(), "extra_fp8_variables": {"num_gemms": 1, "fp8_max_fwd": 448.0}}
    if layout == "file":
        value = io.BytesIO()
        torch.save(state, value)
    elif layout == "pickle":
        content = pickle.dumps({**state, "recipe": recipes_of_the_engine(monkeypatch)}, protocol=protocol)
        monkeypatch.undo()
        value = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    elif layout == "bytes":
        file = io.BytesIO()
        torch.save(state, file)
        value = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    else:
        value = state
    layer = te.Linear(32, 8, device="cpu")
    values = layer.state_dict()
    layer.load_state_dict({**values, "_extra_state": value})
    check(layer, state)
    with te.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        layer(random(4, 32))
    assert layer.fp8_meta["scaling_fwd"].scale[0] == 2.0


@pytest.mark.parametrize(
    "empty",
    [None, b"", _extra_state.NONE, torch.empty(0, dtype=torch.uint8, device="cpu"), "pickled", "saved"],
)
def test_states_that_say_nothing(empty):
    layer = te.Linear(32, 8, device="cpu")
    if empty == "pickled":
        empty = torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8)
    if empty == "saved":
        empty = io.BytesIO()
        torch.save(None, empty)
    layer.set_extra_state(empty)
    assert layer.get_extra_state() == _extra_state.NONE


def test_the_old_list():
    """Two tensors a product forward, one backward."""
    state, layer = numbers(), te.Linear(32, 8, device="cpu")
    old = [
        state["scale_fwd"][:2],
        state["amax_history_fwd"][:, :2],
        state["scale_bwd"][:1],
        state["amax_history_bwd"][:, :1],
    ]
    with pytest.warns(UserWarning, match="old list"):
        layer.set_extra_state(old)
    assert layer.fp8_meta["scaling_fwd"].scale.tolist() == [2, 4, 1]
    assert torch.equal(layer.fp8_meta["scaling_fwd"].amax_history[:, :2], old[1])
    assert layer.fp8_meta["scaling_bwd"].scale.tolist() == [16, 1]
    assert layer.fp8_meta["scaling_bwd"].scale_inv.tolist() == [1 / 16, 1]


class Bomb:
    def __reduce__(self):
        return exec, ("import sys; sys.te_bomb = True",)


@pytest.mark.parametrize("layout", ["pickle", "saved"])
def test_no_code_of_a_checkpoint_runs(layout):
    if layout == "pickle":
        value = torch.frombuffer(bytearray(pickle.dumps({**numbers(), "x": Bomb()})), dtype=torch.uint8)
    else:
        value = io.BytesIO()
        torch.save({**numbers(), "x": Bomb()}, value)
    layer = te.Linear(32, 8, device="cpu")
    with pytest.raises(pickle.UnpicklingError):
        layer.set_extra_state(value)
    assert not hasattr(sys, "te_bomb")


def test_states_that_do_not_fit():
    layer = te.LayerNormMLP(32, 8, device="cpu")
    with pytest.raises(ValueError, match="scale_fwd"):
        layer.set_extra_state(numbers())
    with pytest.raises(TypeError):
        layer.set_extra_state(3)
