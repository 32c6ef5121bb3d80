"""Products of matrices whose blocks have scales: by torch._scaled_mm where it is offered, found out by one product."""

from __future__ import annotations

import pytest
import torch
from te_common import (
    RECIPES,
    clean,  # noqa: F401  a fixture
    near,
    random,
    train,
)

import apex.transformer_engine.pytorch as te
from apex import _fp8
from apex.transformer_engine.pytorch import _block_products, _formats, _products

pytestmark = pytest.mark.usefixtures("clean")
F32, BF16 = torch.float32, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROW, SQUARE = (1, 128), (128, 128)


@pytest.fixture
def card(monkeypatch):
    """The CPU says that it multiplies FP8; nothing is known yet of what it offers."""
    monkeypatch.setattr(_formats, "multiplies", lambda device: True)
    monkeypatch.setattr(_block_products, "_known", {})
    return monkeypatch


class ScaledMM:
    """A stand-in for torch._scaled_mm that reads scales as cublasLt does, and refuses what that refuses."""

    def __init__(self, padding=1, formats=((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)), dtypes=(BF16, F32)):
        self.padding, self.formats, self.dtypes, self.calls = padding, formats, dtypes, 0

    def __call__(self, a, b, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
        assert bias is None and not use_fast_accum and a.is_contiguous() and b.t().is_contiguous()
        assert all(size % 16 == 0 for size in (*a.shape, b.shape[1]))
        if (a.dtype, b.dtype) not in self.formats or out_dtype not in self.dtypes:
            raise ValueError("not of these formats")
        wide = [self.values(*pair) for pair in ((a, scale_a), (b.t(), scale_b.t()))]
        if all(square for _, square in wide):
            raise RuntimeError("not of two square ones")
        self.calls += 1
        return (wide[0][0] @ wide[1][0].t()).to(out_dtype)

    def values(self, codes, scale):
        """(the numbers, whether blocks are square)"""
        rows, columns = codes.shape
        blocks = -(-columns // 128)
        assert scale.dtype == F32
        if scale.shape == (rows, blocks) and scale.stride() == (1, rows):
            spread = scale
        elif scale.shape == (-(-rows // 128), blocks):
            if scale.stride(1) != 1 or scale.stride(0) != -(-blocks // self.padding) * self.padding:
                raise ValueError("rows of scales are not where they should be")
            spread = scale.repeat_interleave(128, 0)[:rows]
        else:
            raise ValueError(f"scales of shape {list(scale.shape)} and strides {scale.stride()}")
        return codes.float() * spread.repeat_interleave(128, 1)[:, :columns], spread is not scale


def cast(rows, columns, block, dtype=E4M3, seed=0):
    q, inverse, _, _ = _fp8.quantize_blocks(random(rows, columns, seed=seed), dtype, block)
    return q, inverse


KINDS = pytest.mark.parametrize(
    "blocks", [(ROW, SQUARE), (SQUARE, ROW), (ROW, ROW)], ids=["row-square", "square-row", "row-row"]
)


@KINDS
@pytest.mark.parametrize("shape", [(256, 384, 256), (5, 7, 3), (130, 270, 140), (1, 129, 1)], ids=str)
@pytest.mark.parametrize("padding", [1, 4])
def test_values(card, padding, shape, blocks):
    """As the emulation, with and without a bias, for any size, wherever rows of scales begin."""
    m, k, n = shape
    a, b = cast(m, k, blocks[0]), cast(n, k, blocks[1], seed=1)
    expected = _products._dequantized(*a) @ _products._dequantized(*b).t()
    stand_in = ScaledMM(padding)
    card.setattr(torch, "_scaled_mm", stand_in)
    for dtype in (F32, BF16):
        for bias in (None, random(n, seed=2)):
            found = _products.product(*a, *b, dtype, bias)
            near(found, expected.double() + (0 if bias is None else bias.double()), dtype, units=16)
            assert found.shape == (m, n) and found.dtype == dtype and found.is_contiguous()
    assert stand_in.calls == 6  # one of each dtype was compared


@pytest.mark.parametrize("why", ["refused", "wrong", "squares", "float16", "absent"])
def test_what_is_not_offered_is_emulated(card, why):
    blocks = (SQUARE, SQUARE) if why == "squares" else (ROW, SQUARE)
    a, b = cast(40, 256, blocks[0]), cast(24, 256, blocks[1], seed=1)
    dtype = torch.float16 if why == "float16" else F32
    expected = (_products._dequantized(*a) @ _products._dequantized(*b).t()).to(dtype)
    stand_in = ScaledMM()

    def scaled_mm(a, b, **options):
        if why == "refused":
            raise RuntimeError("no")
        found = stand_in(a, b, **options)
        return 2 * found if why == "wrong" else found

    if why == "absent":
        card.delattr(torch, "_scaled_mm")
        with pytest.raises(AttributeError):
            _ = torch._scaled_mm
        card.setattr(_formats, "multiplies", lambda device: False)
    else:
        card.setattr(torch, "_scaled_mm", scaled_mm)
    for _ in range(2):
        assert torch.equal(_products.product(*a, *b, dtype), expected)
    assert stand_in.calls <= (2 if why == "wrong" else 0)  # it is asked once


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_layers(card, dtype):
    """Output and gradients are those of the emulation, to the rounding of sums."""
    made, x = (
        te.LayerNormMLP(160, 272, params_dtype=dtype, device="cpu"),
        random(40, 160, dtype=dtype, grad=True),
    )
    results = []
    for served in (False, True):
        card.setattr(_formats, "multiplies", lambda device, served=served: served)
        stand_in = ScaledMM()
        card.setattr(torch, "_scaled_mm", stand_in)
        y = train(made, RECIPES["blocks"], x)
        results.append((y, x.grad, *(p.grad for p in made.parameters())))
        assert (stand_in.calls >= 6) == served
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("shape", [(256, 384, 256), (130, 270, 140)], ids=str)
def test_values_on_a_card(shape, formats, blocks):
    """Whatever serves there; the reason is told where it is the emulation."""
    m, k, n = shape
    device = torch.device("cuda", torch.cuda.current_device())
    a = [t.to(device) for t in cast(m, k, blocks[0], formats[0])]
    b = [t.to(device) for t in cast(n, k, blocks[1], formats[1], seed=1)]
    expected = _products._dequantized(*a).double() @ _products._dequantized(*b).double().t()
    near(_products.product(*a, *b, BF16), expected, BF16, units=16)
    squares = [_block_products.is_square(*pair) for pair in (a, b)]
    print(formats, blocks, "padding", _block_products.offered(device, *formats, *squares, BF16))
