"""What a card's FP8 products ask of what they are given, asked here by a stand-in for torch._scaled_mm."""

from __future__ import annotations

import warnings

import pytest
import torch
from te_common import RECIPES, random, train

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.pytorch import _eager, _formats, _products

OF_SCALES = pytest.mark.parametrize("of", [k for k in RECIPES if k != "blocks"])
E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)


@pytest.fixture
def calls(monkeypatch):
    """The products that were asked of it; what cublasLt refuses on an H200 is refused."""
    seen = []

    def scaled_mm(a, b, scale_a, scale_b, bias=None, result=None, out_dtype=None, use_fast_accum=False):
        for scale in (scale_a, scale_b):
            assert scale.dtype == torch.float32 and scale.numel() == 1
            assert scale.data_ptr() % 16 == 0, "a scale that does not lie on 16 bytes"
        assert a.is_contiguous() and b.t().is_contiguous(), "layouts are a's rows, b's columns"
        assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0, f"sizes {a.shape} {b.shape}"
        assert not (a.dtype in E5M2 and b.dtype in E5M2), "both E5M2"
        assert bias is None or (bias.dtype == out_dtype and out_dtype != torch.float32)
        seen.append((a.dtype, b.dtype))
        found = (a.float() @ b.float()) * (scale_a * scale_b)
        return (found if bias is None else found + bias).to(out_dtype)

    monkeypatch.setattr(_formats, "multiplies", lambda device: True)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has one for CPUs
        library.impl("_scaled_mm", scaled_mm, "CPU")
        library.impl("_scaled_mm.out", lambda *of, out: out.copy_(scaled_mm(*of)), "CPU")
    yield seen
    library._destroy()


@pytest.fixture(params=["C++", "Python"])
def made_in(request, monkeypatch):
    """What makes products of layers."""
    if request.param == "Python":
        monkeypatch.setattr(_eager, "_layer", None)
    elif _eager._layer is None:
        pytest.skip("no compiled bindings: Python's function serves")


@pytest.mark.parametrize("shape", [(32, 64, 48), (7, 130, 20)], ids=str)
@OF_SCALES
def test_linear(calls, made_in, of, shape):
    rows, inputs, outputs = shape
    made = te.Linear(inputs, outputs, params_dtype=torch.bfloat16, device="cpu")
    x = random(rows, inputs, dtype=torch.bfloat16, grad=True)
    train(made, RECIPES[of], x, steps=3)
    assert len(calls) == (6 if of == "delayed-wide-wgrad" else 9)


@pytest.mark.parametrize("layer", ["LayerNormLinear", "LayerNormMLP"])
@OF_SCALES
def test_layers(calls, made_in, of, layer):
    made = getattr(te, layer)(64, 96, params_dtype=torch.bfloat16, device="cpu")
    train(made, RECIPES[of], random(32, 64, dtype=torch.bfloat16, grad=True), steps=3)
    assert calls


def test_weights_in_fp8_alone(calls):
    with te.fp8_model_init():
        made = te.Linear(64, 48, params_dtype=torch.bfloat16, device="cpu")
    train(made, RECIPES["delayed"], random(32, 64, dtype=torch.bfloat16, grad=True), steps=2)
    assert calls


def test_any_number_of_a_tensor_is_a_scale(calls):
    """As te_gemm is called: scales are numbers of FP8TensorMeta's."""
    scales = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float32, device="cpu")
    a, b = (random(32, 64).to(torch.float8_e4m3fn) for _ in range(2))
    wanted = a.float() @ b.float().t()
    found = _products.product(a, scales[1], b, scales[2], torch.float32)
    torch.testing.assert_close(found, wanted)
    assert len(calls) == 1
