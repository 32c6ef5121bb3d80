"""Casts to FP8 against the formats' definition, on everything that can serve them."""

from __future__ import annotations

import activations
import lists
import numpy as np
import pytest
import torch
from fp8_formats import DTYPES, nearest_codes, values
from lists import BF16, F16, F32, F64
from torch.autograd import forward_ad
from torch.library import opcheck

from apex import _fp8
from apex._loader import bindings

bindings.load()
op = torch.ops.apex.fp8_quantize
E4M3, E5M2 = DTYPES[:2]
# No rows; no columns; one element; odd; vectors; several tiles with a rest; a tile and a half.
SHAPES = [(0, 32), (3, 0), (1, 1), (5, 7), (2, 3, 48), (300, 264), (129, 136), (17,)]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[14:])


def number(value, device):
    return torch.tensor([value], dtype=F32, device=device)


def codes(q):
    return q.contiguous().view(torch.uint8).cpu().numpy()


def inputs(shape, dtype, device, seed=1):
    return lists.random(dtype, device, (shape,), scale=3.0, seed=seed)[0]


def check(x, dtype, scale=1.7):
    """All three results and amax, exactly but for the order of the sum; returns them."""
    device = x.device
    amax = number(0.01, device)
    rows, columns, sums, none = op(x, number(scale, device), amax, dtype, True, True, True)
    wide = x.float().cpu().numpy()
    expected = nearest_codes(wide * np.float32(scale), dtype)
    np.testing.assert_array_equal(codes(rows), expected)
    assert (
        none.numel() == 0
        and rows.dtype == columns.dtype == dtype
        and rows.is_contiguous()
        and sums.dtype == x.dtype
    )
    flat = wide.reshape(-1, wide.shape[-1]) if wide.size else wide.reshape(columns.shape[::-1])
    np.testing.assert_array_equal(codes(columns), expected.reshape(flat.shape).T)
    activations.near(sums, torch.from_numpy(flat.astype(np.float64).sum(0)), max(1, flat.shape[0]))
    assert amax.item() == max(np.float32(0.01), np.abs(wide).max(initial=0))
    return rows, columns, sums, amax


@each_dtype
@pytest.mark.parametrize("of", [F32, F16, BF16], ids=str)
def test_values(variant, dtype, of):
    for shape in SHAPES:
        lists.assert_same_bits(*(check(inputs(shape, of, variant.device), dtype)[2:] for _ in range(2)))


@each_dtype
@pytest.mark.parametrize("of", [BF16, F16], ids=str)
def test_every_half(variant, dtype, of):
    """All 65,536 inputs: NaN, infinities, subnormals and both zeros among them; whole vectors, and one too few."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cpu").to(torch.int16)
    x = bits.view(of).to(variant.device)
    for part in (x.view(256, 256), x[:-1]):
        for scale in (1.0, 0.3):
            rows, columns, *_ = op(part, number(scale, variant.device), None, dtype, True, True)
            with np.errstate(over="ignore", invalid="ignore"):
                wide = part.float().cpu().numpy() * np.float32(scale)
            np.testing.assert_array_equal(codes(rows), nearest_codes(wide, dtype))
            np.testing.assert_array_equal(codes(columns), codes(rows).reshape(-1, part.shape[-1]).T)


@each_dtype
def test_around_every_middle(variant, dtype):
    """float32 on, just below and just above every point where rounding turns."""
    finite = values(np.arange(256, dtype=np.uint8), dtype)
    finite = np.unique(np.abs(finite[np.isfinite(finite)]))
    points = np.concatenate((finite, (finite[1:] + finite[:-1]) / 2, [finite[-1] * 1.0625, 3e38])).astype(
        np.float32
    )
    near = np.concatenate(
        (points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf)))
    )
    near = np.concatenate((near, -near, np.float32([1e-45, -1e-45, 1e-39, np.inf, -np.inf, np.nan])))
    rows = op(torch.from_numpy(near).to(variant.device), number(1.0, variant.device), None, dtype)[0]
    np.testing.assert_array_equal(codes(rows), nearest_codes(near, dtype))


def test_only_what_is_asked_for(variant):
    x, scale = inputs((40, 48), BF16, variant.device), number(1.0, variant.device)
    for rowwise, columnwise, sums in [(True, False, False), (False, True, False), (False, False, True)]:
        found = op(x, scale, None, E5M2, rowwise, columnwise, sums)
        assert [t.numel() > 0 for t in found] == [rowwise, columnwise, sums, False]
    rows = op(x, scale, None, E5M2)[0]
    np.testing.assert_array_equal(codes(rows), codes(op(x, scale, None, E5M2, True, True)[0]))


def test_amax(variant):
    """NaN is left out, an infinity is not; what is there already stays if it is larger; a view of a history."""
    x = inputs((300, 40), F32, variant.device)
    x[5, 3], x[200, 39] = float("nan"), -100.0
    history = torch.zeros(3, 4, dtype=F32, device=variant.device)
    for start, wanted in ((0.0, 100.0), (100.0, 100.0), (1000.0, 1000.0)):
        history[0, 2] = start
        version = history._version
        op(x, number(1.0, variant.device), history[0, 2], E4M3)
        assert history._version > version and history[0, 2] == wanted
        assert history.sum() == wanted
    x[0, 0] = float("inf")
    op(x, number(1.0, variant.device), history[1, 1], E4M3)
    assert history[1, 1] == float("inf")


def own_scale(amax, dtype, power_of_two, epsilon):
    """The rule of current scaling in numpy, float32."""
    amax = max(np.float32(amax), np.float32(epsilon))
    if not 0 < amax < np.inf:
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = min(np.float32(torch.finfo(dtype).max) / amax, np.finfo(np.float32).max)
    return np.float32(2.0 ** np.floor(np.log2(np.float64(scale)))) if power_of_two else scale


@each_dtype
@pytest.mark.parametrize("power_of_two", [False, True], ids=["any", "power"])
def test_own_scale(variant, dtype, power_of_two):
    """Without a scale it is that of max |x|, exactly; several tiles, odd sizes, nothing at all, and what has none."""
    for of, shape, change in [
        (BF16, (300, 264), None),
        (F32, (5, 7), None),
        (F16, (129, 136), None),
        (F32, (3, 8), 0.0),
        (F32, (3, 8), float("inf")),
        (F32, (3, 8), float("nan")),
        (F32, (1, 8), 1e-42),
        (BF16, (0, 32), None),
        (F32, (3, 0), None),
    ]:
        x = inputs(shape, of, variant.device)
        if change is not None:
            x = x * 0 + change
        epsilon = 0.5 if shape == (5, 7) else 0.0
        wide = x.float().cpu().numpy()
        scale = own_scale(
            np.nanmax(np.abs(wide), initial=0) if wide.size else 0, dtype, power_of_two, epsilon
        )
        amax = number(0.01, variant.device)
        found = op(x, None, amax, dtype, True, True, True, None, "none", False, power_of_two, epsilon)
        assert found[3].shape == () and found[3].item() == np.float32(1) / scale
        expected = op(
            x, number(float(scale), variant.device), number(0.01, variant.device), dtype, True, True, True
        )
        for made, wanted in zip(found[:3], expected[:3], strict=True):
            assert torch.equal(made.view(torch.uint8), wanted.view(torch.uint8))
        assert amax.item() == max(np.float32(0.01), np.nanmax(np.abs(wide), initial=0))
        alone = op(x, None, None, dtype, False, True, False, None, "none", False, power_of_two, epsilon)
        assert torch.equal(alone[1].view(torch.uint8), found[1].view(torch.uint8)) and alone[3] == found[3]


def test_own_scale_of_activations(variant):
    """Of what is cast, not of the input; the same twice, as the counters of the first time were left at 0."""
    u, g = (inputs(shape, BF16, variant.device, seed) for shape, seed in (((140, 32), 1), ((140, 16), 2)))
    for x, before in ((u, None), (g, u)):
        amax = number(0.0, variant.device)
        op(x, number(1.0, variant.device), amax, E5M2, False, False, False, before, "silu", True)
        scale = number(float(own_scale(amax.item(), E5M2, False, 0.0)), variant.device)
        rest = E5M2, True, True, before is not None, before, "silu", True
        wanted = op(x, scale, None, *rest)
        for _ in range(2):
            found = op(x, None, None, *rest)
            lists.assert_same_bits(
                [t.view(torch.uint8) for t in found[:3]], [t.view(torch.uint8) for t in wanted[:3]]
            )
            assert found[3] == 1 / scale


def test_layouts(variant):
    """Transposed, cut and odd inputs."""
    for change in (
        lambda t: t.t().contiguous().t(),
        lambda t: torch.stack((t, t), -1)[..., 0],
        lambda t: lists.misaligned([t])[0],
    ):
        check(change(inputs((32, 48), BF16, variant.device)), E4M3)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", activations.ACTIVATIONS)
def test_activations(variant, activation, gated):
    """f(x), and the gradient through f, cast in one pass: between the codes of float64 a little to both sides."""
    for of, shape in ((BF16, (140, 32)), (F32, (33, 24)), (F16, (5, 14))):
        if variant.simt and activation in ("gelu", "quick_gelu") and of is not BF16:
            continue  # the same kernels with other constants
        u = inputs(shape, of, variant.device)
        wide = u.double().cpu().requires_grad_()
        y = activations.exact(wide, None, activation, gated)
        g = inputs(tuple(y.shape), of, variant.device, 2)
        (du,) = torch.autograd.grad(y, wide, g.double().cpu())
        for found, expected in (
            (_run(u, E4M3, None, activation, gated, False), y.detach()),
            (_run(g, E5M2, u, activation, gated, True), du),
        ):
            rows, columns, sums, amax = found
            near_codes(codes(rows), expected.numpy(), rows.dtype, of)
            np.testing.assert_array_equal(codes(columns), codes(rows).T)
            torch.testing.assert_close(amax.item(), expected.abs().max().item(), rtol=1e-3, atol=1e-6)
            if sums.numel():
                activations.near(sums, expected.sum(0), shape[0] * (1 if of is F32 else 2**12))


def _run(x, dtype, before, activation, gated, sums):
    amax = number(0.0, x.device)
    return *op(x, number(1.3, x.device), amax, dtype, True, True, sums, before, activation, gated)[:3], amax


def near_codes(found, expected, dtype, of):
    margin = np.abs(expected) * (2e-3 if of is not F32 else 4e-6) + 1e-5
    low, high = (
        values(nearest_codes((expected + m) * np.float32(1.3), dtype), dtype) for m in (-margin, margin)
    )
    assert ((low <= values(found, dtype)) & (values(found, dtype) <= high)).all()


def test_face(variant):
    x, scale, amax = (
        inputs((16, 32), BF16, variant.device),
        number(2.0, variant.device),
        number(0, variant.device),
    )
    q = _fp8.quantize(x, scale, E4M3, amax)
    both = _fp8.quantize_transpose(x, scale, E4M3)
    three = _fp8.quantize_transpose(x, scale, E4M3, amax, True)
    assert (
        len(both) == 2
        and len(three) == 3
        and _fp8.quantize_transpose(x, scale, E4M3, rowwise=False)[0].numel() == 0
    )
    for found in (q, both[0], three[0]):
        np.testing.assert_array_equal(codes(found), codes(op(x, scale, None, E4M3)[0]))
    assert _fp8.quantize(x, scale, E4M3, activation="silu", gated=True).shape == (16, 16)
    assert _fp8.formats("cpu") == (E4M3, E5M2)


@pytest.mark.parametrize(
    "name, wanted",
    [("gfx942:sramecc+:xnack-", DTYPES[2:]), ("gfx950:sramecc+", DTYPES[:2]), ("gfx1201", DTYPES[:2])],
)
def test_formats_of_amd_devices(monkeypatch, name, wanted):
    properties = type("Properties", (), {"gcnArchName": name})
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert _fp8.formats("cuda:0") == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, None], ids=["given", "own"])
def test_in_a_cuda_graph(scale):
    x, amax = inputs((256, 512), BF16, "cuda"), number(0.0, "cuda")
    scale = None if scale is None else number(scale, "cuda")
    op(x, scale, amax, E4M3, True, True, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = op(x, scale, amax, E4M3, True, True, True)
    x.copy_(inputs((256, 512), BF16, "cuda", 5) * 3)
    graph.replay()
    for made, wanted in zip(found, op(x, scale, None, E4M3, True, True, True), strict=True):
        assert torch.equal(made.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


def test_opcheck():
    x, scale, amax = inputs((6, 16), F32, "cpu"), number(1.0, "cpu"), number(0.0, "cpu")
    opcheck(op, (x, scale, amax, E4M3, True, True, True))
    opcheck(op, (x, scale, None, E5M2, True, True, True, x, "gelu", False))
    opcheck(op, (x, scale, amax, E5M2, False, True, True, torch.cat((x, x), -1), "silu", True))
    opcheck(op, (x, scale, amax, E5M2, True, False, False, None, "silu", True))
    opcheck(op, (x, None, amax, E5M2, True, True, False, None, "none", False, True, 0.5))


def test_compiled_in_one_graph():
    def run(x, scale, amax):
        return _fp8.quantize_transpose(x * 2, scale, E4M3, amax)

    x, scale, amax = inputs((16, 32), F32, "cpu"), number(1.5, "cpu"), number(0.0, "cpu")
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(x, scale, amax)
    for found, wanted in zip(compiled, run(x, scale, None), strict=True):
        np.testing.assert_array_equal(codes(found), codes(wanted))
    assert amax.item() == (x * 2).abs().max().item()


def test_gradients_are_refused(variant):
    x, scale = inputs((4, 16), F32, variant.device).requires_grad_(), number(1.0, variant.device)
    with pytest.raises(RuntimeError, match="fp8_quantize has no derivative: call it under torch.no_grad"):
        op(x, scale, None, E4M3)
    with torch.no_grad():
        op(x, scale, None, E4M3)


def test_tangents_are_refused():
    """Codes have none: those of an input would be lost without a word."""
    x, scale, amax = inputs((4, 16), F32, "cpu"), number(1.0, "cpu"), number(0.0, "cpu")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for arguments in [(scale, amax, E4M3), (None, None, E4M3)]:
            with pytest.raises(NotImplementedError, match="fp8_quantize: forward-mode"):
                op(dual, *arguments)
    assert amax.item() == 0


def test_refused():
    """Every wrong shape, dtype, device and name, before anything runs."""
    x, scale = inputs((4, 6), F32, "cpu"), number(1.0, "cpu")
    wide = torch.cat((x, x), -1)
    act = (None, E4M3, True, False, False)
    for error, text, arguments in [
        (TypeError, "FP8 dtype must be", (x, scale, None, F16)),
        (TypeError, "FP8 dtype must be", (x, scale, None, None)),
        (TypeError, "takes float32, float16 and bfloat16", (x.double(), scale, None, E4M3)),
        (TypeError, "takes float32, float16 and bfloat16", (op(x, scale, None, E4M3)[0], scale, None, E4M3)),
        (TypeError, "scale must be float32", (x, scale.double(), None, E4M3)),
        (ValueError, r"scale must have one element, not the shape \[4, 6\]", (x, x, None, E4M3)),
        (TypeError, "amax must be float32", (x, scale, scale.to(F64), E4M3)),
        (ValueError, "amax must have one element", (x, scale, x, E4M3)),
        (ValueError, "at least one dimension", (x[0, 0], scale, None, E4M3)),
        (ValueError, "without an activation", (x, scale, *act, None, "none", True)),
        (ValueError, "without an activation", (x, scale, *act, x, "none", False)),
        (ValueError, "not 'tanh'", (x, scale, *act, None, "tanh", False)),
        (ValueError, "which is 5", (x[:, :5], scale, *act, None, "silu", True)),
        (ValueError, "is of a gradient", (x, scale, None, E4M3, True, False, True, None, "silu", False)),
        (TypeError, "`before` is", (x, scale, *act, x.half(), "silu", False)),
        (ValueError, r"`before` has shape \[4, 12\], not \[4, 6\]", (x, scale, *act, wide, "silu", False)),
        (ValueError, "meta", (x, scale.to("meta"), None, E4M3)),
    ]:
        with pytest.raises(error, match=text):
            op(*arguments)
