"""The FP8 casts in plain PyTorch against the formats' definition (fp8_formats.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fp8_formats import DEFINITIONS, DTYPES, nearest_codes, values

from apex.reference import fp8

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[12:])
ONE = torch.ones((), dtype=torch.float32, device="cpu")


def tensor(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device="cpu")


def codes(q):
    return q.contiguous().view(torch.uint8).numpy()


def random(*shape, dtype=torch.float32, seed=0, spread=6.0):
    """Numbers of many magnitudes."""
    numbers = np.random.default_rng(seed)
    values = numbers.standard_normal(shape) * np.exp(numbers.standard_normal(shape) * spread)
    return torch.from_numpy(values.astype(np.float32)).to(dtype)


def all_of(dtype):
    """Every value of a dtype of two bytes."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)


@each_dtype
def test_the_definition_itself(dtype):
    """The definition's two forms agree, and its extremes are those of the formats' papers."""
    form = DEFINITIONS[dtype]
    points = np.array(
        [0.0, 2.0**-20, 3.3, 17.0, 1e9, np.inf, np.nan, 1.5 * 2.0**-17, 248.0, 240.0, 464.0, 61440.0]
    )
    points = np.concatenate((points, -points))
    assert [form.nearest(float(x)) for x in points] == nearest_codes(points, dtype).tolist()
    smallest, largest = {
        torch.float8_e4m3fn: (2.0**-9, 448.0),
        torch.float8_e5m2: (2.0**-16, 57344.0),
        torch.float8_e4m3fnuz: (2.0**-10, 240.0),
        torch.float8_e5m2fnuz: (2.0**-17, 57344.0),
    }[dtype]
    assert (float(form.finite[1]), float(form.finite[-1])) == (smallest, largest)
    assert fp8.FORMATS[dtype].maximum == largest


@each_dtype
def test_every_code(dtype):
    """All 256 codes dequantise to the format's values, and quantise back to themselves."""
    every = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8)
    found = fp8.dequantize(every.view(dtype), ONE, torch.float32)
    expected = values(every.numpy(), dtype)
    np.testing.assert_array_equal(found.numpy(), expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found.numpy())[number], np.signbit(expected)[number])
    np.testing.assert_array_equal(codes(fp8.quantize(found, ONE, dtype)), nearest_codes(expected, dtype))
    finite = np.isfinite(expected)
    assert (codes(fp8.quantize(found, ONE, dtype))[finite] == every.numpy()[finite]).all()


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-12, 1e5])
@each_dtype
def test_every_half(dtype, of, scale):
    """All 65,536 inputs of both half dtypes, under several scales."""
    x = all_of(of)
    found = codes(fp8.quantize(x, tensor(scale), dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        product = x.float().numpy() * np.float32(scale)
    np.testing.assert_array_equal(found, nearest_codes(product, dtype))


@each_dtype
def test_around_every_middle(dtype):
    """float32 numbers on, just below and just above every point where rounding turns."""
    finite = np.array([float(v) for v in DEFINITIONS[dtype].finite])
    points = np.concatenate((finite, (finite[1:] + finite[:-1]) / 2, [finite[-1] * 1.0625, 3e38])).astype(
        np.float32
    )
    near = np.concatenate(
        (points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf)))
    )
    near = np.concatenate((near, -near, np.float32([1e-45, -1e-45, 1e-39])))
    found = codes(fp8.quantize(torch.from_numpy(near), ONE, dtype))
    np.testing.assert_array_equal(found, nearest_codes(near, dtype))


@each_dtype
def test_random_numbers(dtype):
    x = random(3, 5, 1000)
    found = fp8.quantize(x.transpose(0, 1), tensor([0.5]), dtype)
    assert found.shape == (5, 3, 1000) and found.is_contiguous() and found.dtype == dtype
    np.testing.assert_array_equal(codes(found), nearest_codes(x.transpose(0, 1).numpy() * 0.5, dtype))


def test_amax_is_the_larger_of_old_and_new():
    x = tensor([1.0, -7.5, float("nan")])
    for old, new in ((0.0, 7.5), (7.5, 7.5), (9.0, 9.0)):
        amax = tensor([old])
        fp8.quantize(x, tensor(100.0), torch.float8_e4m3fn, amax)
        assert amax.tolist() == [new]
    history = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
    fp8.quantize(x, ONE, torch.float8_e4m3fn, history[0, 1])
    assert history.tolist() == [[0, 7.5, 0], [0, 0, 0]]
    fp8.quantize(tensor([float("-inf")]), ONE, torch.float8_e5m2, history[0, 1])
    assert history[0, 1] == float("inf")
    fp8.quantize(x[:0], ONE, torch.float8_e4m3fn, history[1, 0])
    assert history[1, 0] == 0


@each_dtype
def test_quantize_transpose(dtype):
    x = random(2, 3, 7, spread=1.0)
    amax = tensor(0.0)
    q, columns, of_bias = fp8.quantize_transpose(x, tensor(3.0), dtype, amax, bias_gradient=True)
    assert columns.shape == (7, 6) and columns.is_contiguous()
    np.testing.assert_array_equal(codes(q), codes(fp8.quantize(x, tensor(3.0), dtype)))
    np.testing.assert_array_equal(codes(columns), codes(q).reshape(6, 7).T)
    torch.testing.assert_close(of_bias, x.double().sum((0, 1)).float())
    assert amax == x.abs().max()


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_the_activations_gradient(gated):
    before = random(6, 8, dtype=torch.bfloat16, spread=0.1)
    wide = before.double().requires_grad_()
    first, second = wide.chunk(2, -1) if gated else (wide, 1.0)
    y = torch.nn.functional.gelu(first, approximate="tanh") * second
    g = random(*y.shape, dtype=torch.bfloat16, seed=1, spread=0.1)
    expected = torch.autograd.grad(y, wide, g.double())[0]
    dtype = torch.float8_e5m2
    q, columns, of_bias = fp8.quantize_transpose(
        g, ONE, dtype, bias_gradient=True, before=before, activation="gelu", gated=gated
    )
    torch.testing.assert_close(
        fp8.dequantize(q, ONE, torch.float32).double(), expected, rtol=0.125, atol=1e-5
    )
    torch.testing.assert_close(of_bias.double(), expected.sum(0), rtol=0.01, atol=0.01)
    assert of_bias.dtype == torch.bfloat16 and columns.shape == (8, 6)
    forward, _ = fp8.quantize_transpose(before, ONE, dtype, activation="gelu", gated=gated)
    torch.testing.assert_close(
        fp8.dequantize(forward, ONE, torch.float32).double(), y.detach(), rtol=0.125, atol=1e-5
    )


def test_dequantize_multiplies_in_float32():
    q = fp8.quantize(tensor([1.0, -3.5, 448.0]), ONE, torch.float8_e4m3fn)
    for dtype in fp8.FLOATS:
        found = fp8.dequantize(q, tensor([1.0 / 3]), dtype)
        expected = (np.float32([1.0, -3.5, 448.0]) * np.float32(1.0 / 3)).astype(np.float64)
        assert found.dtype == dtype and torch.equal(found, tensor(expected, torch.float64).to(dtype))


def of_scale(amax, fp8_max=448.0, margin=0):
    return np.float32(np.float32(fp8_max) / np.float32(amax)) * np.float32(2.0**-margin)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("reduces", [False, True], ids=["alone", "reduced"])
def test_update_scales(algorithm, reduces):
    """Two entries with maxima of their own; amax 0, inf and NaN keep the old scale."""
    nan, inf = float("nan"), float("inf")
    first = tensor([[2.0, 0.0, inf, nan, 1e-42], [8.0, 0.0, 1.0, 1.0, 0.0], [3.0, 0.0, 1.0, 1.0, 0.0]])
    second = tensor([[5.0]])
    scales, inverses = [tensor([7.0] * 5), tensor([1.0])], [tensor([9.0] * 5), tensor([9.0])]
    reduced = torch.cat((first[0], second[0])) if reduces else None
    if reduces:
        first[0], second[0] = 1e30, 1e30
    fp8.update_scales([first, second], scales, inverses, [448.0, 57344.0], 1, algorithm, reduced)
    largest = np.float32(3.4028235e38)
    found = [of_scale(8.0 if algorithm == "max" else 2.0, margin=1), 7.0, 7.0, 7.0, largest]
    np.testing.assert_array_equal(scales[0].numpy(), np.float32(found))
    np.testing.assert_array_equal(scales[1].numpy(), [of_scale(5.0, 57344.0, 1)])
    for s, inverse in zip(scales, inverses, strict=True):
        np.testing.assert_array_equal(inverse.numpy(), np.float32(1) / s.numpy())
    assert first[0].tolist() == [0.0] * 5 and second.tolist() == [[0.0]]
    assert first[1].tolist() == [3.0, 0.0, 1.0, 1.0, 0.0]
    np.testing.assert_array_equal(first[2].numpy(), np.float32([2.0, 0.0, inf, nan, 1e-42]))


def test_current_scale():
    inf, nan = float("inf"), float("nan")
    amax = tensor([3.0, 0.0, inf, nan, 1e-42, 0.01])
    found = fp8.current_scale(amax, 448.0)
    expected = np.float32([of_scale(3.0), 1, 1, 1, 3.4028235e38, of_scale(0.01)])
    np.testing.assert_array_equal(found.numpy(), expected)
    found = fp8.current_scale(amax, 448.0, power_of_two=True, epsilon=0.02)
    np.testing.assert_array_equal(found.numpy(), np.float32([128, 16384, 1, 1, 16384, 16384]))


@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=["1x128", "128x128"])
@pytest.mark.parametrize("shape", [(2, 130), (3, 150, 300), (1, 128), (0, 5), (4, 0)], ids=str)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_blocks(block, shape, power_of_two):
    dtype = torch.float8_e4m3fn
    x = random(*shape, spread=2.0, dtype=torch.bfloat16)
    q, scale_inv = fp8.quantize_blocks(x, dtype, block, power_of_two)
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    assert q.shape == x.shape and scale_inv.shape == (-(-rows // block[0]), -(-columns // 128))
    wide, back = x.float().numpy().reshape(rows, columns), codes(q).reshape(rows, columns)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            cell = np.s_[i * block[0] : (i + 1) * block[0], j * 128 : (j + 1) * 128]
            scale = of_scale(np.abs(wide[cell]).max())
            scale = np.float32(2.0) ** np.floor(np.log2(scale)) if power_of_two else scale
            np.testing.assert_array_equal(back[cell], nearest_codes(wide[cell] * np.float32(scale), dtype))
            assert scale_inv[i, j] == np.float32(1) / np.float32(scale)
    restored = fp8.dequantize_blocks(q, scale_inv, torch.float32, block)
    torch.testing.assert_close(
        restored, x.float(), rtol=0.07, atol=float(x.abs().max()) / 2**9 if x.numel() else 0
    )


X = tensor([[1.0, 2.0]])


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: fp8.quantize(X, ONE, torch.float16), TypeError, "FP8 dtype must be"),
        (lambda: fp8.quantize(X.double(), ONE, torch.float8_e5m2), TypeError, "not torch.float64"),
        (lambda: fp8.quantize(X, ONE.double(), torch.float8_e5m2), TypeError, "scale must be float32"),
        (lambda: fp8.quantize(X, X, torch.float8_e5m2), ValueError, "scale must have one element"),
        (lambda: fp8.quantize(X, ONE, torch.float8_e5m2, X), ValueError, "amax must have one element"),
        (lambda: fp8.quantize(X, ONE.to("meta"), torch.float8_e5m2), ValueError, "scale is on meta"),
        (lambda: fp8.quantize(X[0, 0], ONE, torch.float8_e5m2), ValueError, "at least one dimension"),
        (lambda: fp8.dequantize(X, ONE, torch.float32), TypeError, "FP8 dtype must be"),
        (lambda: fp8.dequantize(fp8.quantize(X, ONE, DTYPES[0]), ONE, DTYPES[0]), TypeError, "dequantize gives"),
        (lambda: fp8.quantize_blocks(X, DTYPES[0], (128, 1)), ValueError, "block must be"),
        (lambda: fp8.update_scales([X], [X[0]], [X[0]], 1.0, 0, "least"), ValueError, "algorithm"),
        (lambda: fp8.update_scales([X], [X[0]], [], 1.0), ValueError, "differ in number"),
        (lambda: fp8.update_scales([X], [X[0]], [X], 1.0), ValueError, "of entry 0"),
        (lambda: fp8.update_scales([X], [X[0]], [X[0].double()], 1.0), TypeError, "scale_inv 0 must be"),
        (lambda: fp8.update_scales([X], [X[0]], [X[0]], 1.0, reduced=ONE), ValueError, "1 elements for 2"),
    ],
)  # fmt: skip
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_gradients_are_refused():
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no derivative"):
        fp8.quantize(x, ONE, torch.float8_e4m3fn)
    with torch.no_grad():
        fp8.quantize(x, ONE, torch.float8_e4m3fn)


def test_compiled_in_one_graph():
    x = random(4, 32)
    for dtype in DTYPES:
        compiled = torch.compile(
            lambda x, dtype=dtype: fp8.quantize(x, ONE, dtype), fullgraph=True, backend="eager"
        )
        np.testing.assert_array_equal(codes(compiled(x)), codes(fp8.quantize(x, ONE, dtype)))
