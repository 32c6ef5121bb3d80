"""Graphs of apex.transformer_engine's layers: CUDA graphs, and ONNX."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from te_common import (
    ALL_RECIPES,
    RECIPES,
    clean,  # noqa: F401  a fixture
    random,
    train,
)

import apex.transformer_engine.pytorch as te

pytestmark = pytest.mark.usefixtures("clean")


def test_without_a_gpu_graphs_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="make_graphed_callables"):
        te.make_graphed_callables(te.Linear(8, 8, device="cpu"), (random(2, 8),))


@pytest.mark.parametrize(
    "asked", [{"fp8_weight_caching": True}, {"sample_kwargs": {"mask": None}}, {"_order": [1, -1]}]
)
def test_options_of_graphs_that_are_not_here_are_refused_by_name(asked):
    name = next(iter(asked))
    with pytest.raises(NotImplementedError, match=f"{name} is not here; "):
        te.make_graphed_callables(te.Linear(8, 8, device="cpu"), (random(2, 8),), **asked)


@pytest.mark.gpu
@ALL_RECIPES
def test_replays_train_as_calls_do(of):
    """The same outputs, gradients and scales, step by step."""
    torch.manual_seed(1)
    made = te.LayerNormMLP(32, 64, device="cuda")
    other = copy.deepcopy(made)
    sample = random(16, 32, device="cuda", grad=True)
    graphed = te.make_graphed_callables(made, (sample,), fp8_enabled=True, fp8_recipe=of)
    x, x2 = (random(16, 32, seed=1, device="cuda", grad=True) for _ in range(2))
    for step in range(4):
        grad = random(16, 32, seed=step, device="cuda")
        found, expected = train(graphed, of, x, grad), train(other, of, x2, grad)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.grad, x2.grad, rtol=1e-5, atol=1e-5)
    with te.fp8_autocast():  # of which each has new scales
        pass
    for name in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(made.fp8_meta[name].amax_history, other.fp8_meta[name].amax_history)
        assert torch.equal(made.fp8_meta[name].scale, other.fp8_meta[name].scale)


@pytest.mark.parametrize("collecting", [True, False])
def test_no_garbage_is_collected_in_a_capture(monkeypatch, collecting):
    """A graph among it, of an earlier call, would end the capture."""
    seen = []

    def capture(module, arguments, **options):
        seen.append(gc.isenabled())
        return module

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    before = gc.isenabled()
    try:
        gc.enable() if collecting else gc.disable()
        te.make_graphed_callables(te.Linear(16, 16, device="cpu"), (random(4, 16),))
        assert seen == [False] and gc.isenabled() == collecting
    finally:
        gc.enable() if before else gc.disable()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("of", [None, RECIPES["delayed"]], ids=["wide", "fp8"])
def test_onnx_shows_layers_without_fp8(of):
    """ONNX's own operators, and the numbers of the layers outside of fp8_autocast."""
    onnx = pytest.importorskip("onnx", reason="torch.onnx.export needs onnx: pip install onnx onnxscript")
    pytest.importorskip(
        "onnxscript", reason="torch.onnx.export needs onnxscript: pip install onnx onnxscript"
    )
    from onnx.reference import ReferenceEvaluator

    torch.manual_seed(1)
    model = torch.nn.Sequential(
        te.LayerNormLinear(8, 16, normalization="RMSNorm", device="cpu"),
        te.LayerNormMLP(16, 24, activation="swiglu", device="cpu"),
        te.Linear(16, 4, device="cpu"),
    ).eval()
    x = random(3, 8)
    expected = model(x).detach()
    with te.fp8_autocast(enabled=of is not None, fp8_recipe=of), te.onnx_export(True):
        assert te.is_in_onnx_export_mode()
        program = torch.onnx.export(model, (x,), dynamo=True).model_proto
    assert not te.is_in_onnx_export_mode()
    assert isinstance(program, onnx.ModelProto) and {n.domain for n in program.graph.node} <= {"", "ai.onnx"}
    (found,) = ReferenceEvaluator(program).run(None, {program.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)
