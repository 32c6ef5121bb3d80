"""The extension fused_adam_cuda of public apex: names, argument orders, and what each function does, in float64."""

from __future__ import annotations

import inspect
import math

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag

from apex._bits import from_e5m2, to_e5m2
from apex._legacy import fused_adam_cuda
from apex._loader import registry

U8 = torch.uint8
_ADAM = "lr beta1 beta2 eps grad_scale step mode bias_correction decay"
# Facts of apex/contrib/csrc/optimizers/fused_adam_cuda.cpp in both public trees.
SIGNATURES = {
    "strided_check_finite": "overflow_flag p_copy stride clear_overflow_first",
    "adam": f"p p_copy m v g {_ADAM}",
    "reversible_adam": f"p p_copy m v g {_ADAM}",
    "adam_mt": f"chunk_size overflow_flag tensor_lists {_ADAM}",
    "maybe_adam_undo": f"overflow_flag p m v g {_ADAM}",
    "maybe_cast": "overflow_flag p_in p_out",
    "maybe_cast_mt": "chunk_size overflow_flag tensor_lists",
}
LR, BETA1, BETA2, EPS, SCALE, STEP, DECAY = 0.25, 0.875, 0.75, 0.125, 4.0, 3, 0.5


def test_argument_orders_and_names():
    assert set(fused_adam_cuda.__all__) == set(SIGNATURES)
    for name, wanted in SIGNATURES.items():
        assert list(inspect.signature(getattr(fused_adam_cuda, name)).parameters) == wanted.split(), name
    assert registry.extensions()["fused_adam_cuda"].state == "complete"


def state(device, gradient=F32, own=F32, shape=(33, 5)):
    """[parameter, exp_avg, exp_avg_sq, gradient]"""
    p, m, v, g = (lists.random(own, device, (shape,), seed=k)[0] for k in range(4))
    return [p, m, v.square(), (8 * g).to(gradient)]


def expected(tensors, mode=1, correct=True):
    p, m, v, g = lists.exact(tensors)
    g = g / SCALE
    m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
    size = LR * math.sqrt(1 - BETA2**STEP) / (1 - BETA1**STEP) if correct else LR
    divisor = v.sqrt() + EPS if mode else (v + EPS).sqrt()
    return [p - size * (m / divisor + DECAY * p), m, v]


def options(mode=1, correct=True):
    return LR, BETA1, BETA2, EPS, SCALE, STEP, mode, int(correct), DECAY


def nothing(device):
    return torch.empty(0, dtype=F32, device=device)


def check(tensors, wanted, copy=None):
    for found, value in zip(tensors, wanted, strict=False):
        lists.assert_near([found], [value], arithmetic=8, smallest=16 * lists.ROUNDING[found.dtype])
    if copy is not None:
        p = tensors[0]
        lists.assert_same_bits([copy], [to_e5m2(p) if copy.dtype == U8 else p.to(copy.dtype)])


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("types", [(F32, F32), (F16, F32), (BF16, F32), (F64, F64)], ids=str)
def test_adam(variant, types, mode, correct):
    tensors = state(variant.device, *types)
    wanted = expected(tensors, mode, correct)
    p, m, v, g = tensors
    fused_adam_cuda.adam(p, nothing(variant.device), m, v, g, *options(mode, correct))
    check(tensors, wanted)


@pytest.mark.parametrize("function", ["adam", "reversible_adam"])
@pytest.mark.parametrize(
    "types", [(F32, F32), (F16, F16), (BF16, BF16), (F16, U8), (F32, BF16), (BF16, F32)], ids=str
)
def test_copies(variant, function, types):
    gradient, copy = types
    tensors = state(variant.device, gradient)
    wanted, copy = expected(tensors), torch.zeros((33, 5), dtype=copy, device=variant.device)
    p, m, v, g = tensors
    getattr(fused_adam_cuda, function)(p, copy, m, v, g, *options())
    check(tensors, wanted, copy)


@pytest.mark.parametrize("copy", [None, F16, U8], ids=str)
def test_reversible_adam_and_undo(variant, copy):
    """An overflow shows in the first element of the copy; the others took their step, which is then undone."""
    tensors = state(variant.device, F16)
    p, m, v, g = tensors
    g[3, 2] = math.inf
    before = lists.clones(tensors)
    wanted = [torch.where(torch.isfinite(lists.exact([g])[0]), new, old)
              for new, old in zip(expected(tensors), lists.exact(before), strict=False)]  # fmt: skip
    out = nothing(variant.device) if copy is None else torch.zeros((33, 5), dtype=copy, device=variant.device)
    fused_adam_cuda.reversible_adam(p, out, m, v, g, *options())
    check(tensors, wanted)
    raised = flag(variant.device, 1)
    if copy is not None:
        first = from_e5m2(out, F32) if copy == U8 else out
        assert first[0, 0] == math.inf and torch.isfinite(first.view(-1)[1:]).all()
        raised.fill_(9)
        fused_adam_cuda.strided_check_finite(raised, out, 33 * 5, 1)  # which looks at the first alone
        assert raised.item() == 1
    fused_adam_cuda.maybe_adam_undo(flag(variant.device), p, m, v, g, *options())
    check(tensors, wanted)
    fused_adam_cuda.maybe_adam_undo(raised, p, m, v, g, *options())
    for found, old in zip(tensors[:3], before, strict=False):
        lists.assert_near([found], lists.exact([old]), arithmetic=64, smallest=1e-5)


def test_undo_without_a_flag(variant):
    tensors = state(variant.device)
    p, m, v, g = tensors
    before = lists.clones(tensors)
    fused_adam_cuda.adam(p, nothing(variant.device), m, v, g, *options(mode=0))
    empty = torch.empty(0, dtype=torch.int32, device=variant.device)
    fused_adam_cuda.maybe_adam_undo(empty, p, m, v, g, *options(mode=0))
    for found, old in zip(tensors[:3], before, strict=False):
        lists.assert_near([found], lists.exact([old]), arithmetic=64, smallest=1e-5)


@pytest.mark.parametrize("copy", [None, F16], ids=str)
def test_adam_mt(variant, copy):
    rows = [state(variant.device, F16, shape=shape) for shape in ((7,), (0,), (33, 5))]
    wanted = [expected(row) for row in rows]
    columns = [list(column) for column in zip(*rows, strict=True)]
    copies = [] if copy is None else [torch.zeros_like(row[0], dtype=copy) for row in rows]
    fused_adam_cuda.adam_mt(
        2048, flag(variant.device, 1), [*columns, *([copies] if copies else [])], *options()
    )
    for i, row in enumerate(rows):
        check(row, wanted[i], copies[i] if copies else None)


# ---- casts -------------------------------------------------------------------------------------------------


def nearest_e5m2(value):
    """The nearest number of two bits of mantissa, halves to the even one."""
    sign, size = math.copysign(1, value), abs(value)
    if math.isinf(size):
        return sign * size
    exponent = math.floor(math.log2(size)) if size else -14
    unit = 2.0 ** (max(exponent, -14) - 2)
    rounded = round(size / unit) * unit
    return sign * (math.inf if rounded > 57344 else rounded)


def test_e5m2_rounds_to_the_nearest():
    values = [
        0.0,
        1.0,
        1.125,
        1.374,
        1.375,
        1.5,
        -1.625,
        -1.875,
        3.0,
        0.3,
        57344.0,
        61439.0,
        2.0**-14,
        -(2.0**-13),
    ]
    values += [math.inf, -math.inf, 65536.0, 1e30, -7e4, 1.3e-5, 1.6 * 2.0**-16, 2.0**-17, -1.1 * 2.0**-17]
    values += [x for x in torch.linspace(-9, 9, 333, dtype=F64, device="cpu").tolist() if x]
    for dtype in (F32, F16):
        given = torch.tensor(values, dtype=F32, device="cpu").to(dtype)
        wanted = torch.tensor([nearest_e5m2(x) for x in given.tolist()], dtype=F64, device="cpu")
        assert torch.equal(from_e5m2(to_e5m2(given), F64), wanted)
    assert from_e5m2(to_e5m2(torch.tensor([math.nan], dtype=F32, device="cpu")), F32).isnan().all()


def test_every_byte_comes_back():
    every = torch.arange(256, dtype=torch.int16, device="cpu").to(U8)
    normal = from_e5m2(every, F32)
    kept = ~torch.isnan(normal)
    assert kept.sum() == 250 and torch.equal(to_e5m2(normal[kept]), every[kept])
    half = (every.to(torch.int16) << 8).view(F16)  # its upper half
    assert torch.equal(normal[kept], half.float()[kept])


@pytest.mark.parametrize("to", [F32, F16, BF16, U8], ids=str)
@pytest.mark.parametrize("of", [F32, F16, BF16, U8], ids=str)
def test_maybe_cast(variant, of, to):
    values = lists.random(F32, variant.device, ((33, 5),))[0]
    source = to_e5m2(values) if of == U8 else values.to(of)
    wide = from_e5m2(source, F32) if of == U8 else source.float()
    wanted = to_e5m2(wide) if to == U8 else wide.to(to)
    target = torch.full((33, 5), 7, dtype=to, device=variant.device)
    fused_adam_cuda.maybe_cast(flag(variant.device, 1), source, target)
    assert (target == 7).all()
    fused_adam_cuda.maybe_cast(flag(variant.device), source, target)
    lists.assert_same_bits([target], [wanted])
    target.fill_(7)
    fused_adam_cuda.maybe_cast(
        torch.empty(0, dtype=torch.int32, device=variant.device), source, target.view(-1)
    )
    lists.assert_same_bits([target], [wanted])


def test_maybe_cast_mt(variant):
    sources = lists.random(F32, variant.device, lists.FEW)
    targets = lists.empties(sources, F16)
    fused_adam_cuda.maybe_cast_mt(2048, flag(variant.device), [sources, targets])
    lists.assert_same_bits(targets, [s.half() for s in sources])


@pytest.mark.parametrize("dtype", [F32, F16, BF16, U8], ids=str)
def test_strided_check_finite(variant, dtype):
    values = lists.random(F32, variant.device, ((40,),))[0]
    values[9] = math.inf
    values = to_e5m2(values) if dtype == U8 else values.to(dtype)
    raised = flag(variant.device)
    fused_adam_cuda.strided_check_finite(raised, values, 2, 0)
    assert raised.item() == 0
    fused_adam_cuda.strided_check_finite(raised, values, 3, 0)
    assert raised.item() == 1
    fused_adam_cuda.strided_check_finite(raised, values, 2, 0)
    assert raised.item() == 1  # stays
    fused_adam_cuda.strided_check_finite(raised, values, 2, 1)
    assert raised.item() == 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda t, f: fused_adam_cuda.adam(*t, *options(mode=2)), ValueError, "mode is"),
        (lambda t, f: fused_adam_cuda.adam(*t[:1], t[1][:3], *t[2:], *options()), ValueError, "a copy has"),
        (
            lambda t, f: fused_adam_cuda.adam(t[0], f, *t[2:], *options()),
            TypeError,
            "floating-point or uint8",
        ),
        (lambda t, f: fused_adam_cuda.maybe_cast(t[0][:1], t[0], t[1]), TypeError, "must be int32"),
        (lambda t, f: fused_adam_cuda.maybe_cast(f, t[0], t[1][:3]), ValueError, "a copy has"),
        (lambda t, f: fused_adam_cuda.maybe_cast(f, t[0].view(3, 2).t(), t[1]), ValueError, "contiguous"),
        (lambda t, f: fused_adam_cuda.strided_check_finite(f, t[0], 0, 0), ValueError, "stride"),
        (lambda t, f: fused_adam_cuda.strided_check_finite(f[:0], t[0], 1, 0), ValueError, "must have"),
        (lambda t, f: fused_adam_cuda.adam_mt(1, f, [[t[0]]] * 3, *options()), ValueError, "4 or 5"),
    ],
)
def test_refuses(call, error, words):
    tensors = [torch.ones(6, dtype=F32, device="cpu") for _ in range(5)]
    raised = flag("cpu")
    with pytest.raises(error, match=words):
        call(tensors, raised)
    assert all((t == 1).all() for t in tensors) and raised.item() == 0


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Step, overflow, undo and cast: nothing waits for the host."""
    tensors = state("cuda", F16)
    p, m, v, g = tensors
    copy, raised, out = torch.zeros_like(p, dtype=U8), flag("cuda"), torch.zeros_like(p)

    def step():
        fused_adam_cuda.reversible_adam(p, copy, m, v, g, *options())
        fused_adam_cuda.strided_check_finite(raised, copy, 33 * 5, 1)
        fused_adam_cuda.maybe_adam_undo(raised, p, m, v, g, *options())
        fused_adam_cuda.maybe_cast(raised, copy, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    wanted = expected(tensors)
    graph.replay()
    check(tensors, wanted)
    lists.assert_same_bits([out], [from_e5m2(to_e5m2(p), F32)])
    before = lists.clones(tensors)
    g[0, 0] = math.inf
    graph.replay()
    assert raised.item() == 1
    for found, old in zip(tensors[:3], before, strict=False):
        lists.assert_near([found], lists.exact([old]), arithmetic=64, smallest=1e-5)
