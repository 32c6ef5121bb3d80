"""multi_tensor_l2norm against float64, by every entrance and on everything that can serve it."""

from __future__ import annotations

import math

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag

from apex._loader import bindings

DTYPES = [F32, F16, BF16, F64]
INF, NAN = float("inf"), float("nan")
# Sums of squares in float32, a few thousand terms a thread at most.
RELATIVE = 1e-6


def dispatcher(tensors, total, **options):
    torch.ops.apex.multi_tensor_l2norm(tensors, total, **options)


def direct(tensors, total, **options):
    module = bindings.load().module
    if module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    module.multi_tensor_l2norm([tensors], total, **options)


@pytest.fixture(params=[dispatcher, direct], ids=lambda f: f.__name__)
def multi_tensor_l2norm(request):
    bindings.load()
    return request.param


def expected_norms(tensors, maximum=False, factor=1.0):
    """(norm of all, list of norms) in float64."""
    values = [value * factor for value in lists.exact(tensors)]
    if maximum:
        each = [float(value.abs().max()) if value.numel() else 0.0 for value in values]
        return max(each, default=0.0), each
    return lists.norm(values), [lists.norm([value]) for value in values]


def check(op, tensors, device, relative=RELATIVE, **options):
    """Runs the op with and without the single norms."""
    total, each = expected_norms(tensors, options.get("maximum", False), options.get("scale", 1.0))
    for wanted in (True, False):
        result = lists.scalar(7.0, device)
        per_tensor = torch.full((len(tensors),), 7.0, device=device, dtype=F32) if wanted else None
        op(tensors, result, per_tensor=per_tensor, **options)
        assert math.isclose(result.item(), total, rel_tol=relative, abs_tol=1e-30)
        if wanted:
            torch.testing.assert_close(
                per_tensor.cpu().to(F64),
                torch.tensor(each, dtype=F64, device="cpu"),
                rtol=relative,
                atol=1e-30,
            )


@pytest.mark.parametrize("maximum", [False, True], ids=["l2", "maximum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(variant, multi_tensor_l2norm, dtype, maximum):
    tensors = lists.random(dtype, variant.device)
    check(multi_tensor_l2norm, tensors, variant.device, maximum=maximum)
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "l2norm" in name) == 2


@pytest.mark.parametrize("maximum", [False, True], ids=["l2", "maximum"])
def test_mixed_dtypes_in_one_call(variant, multi_tensor_l2norm, maximum):
    """Report 35: bfloat16 is measured, not passed over. Single norms come in the order of the list."""
    tensors = []
    for turn in range(3):
        for power, dtype in enumerate(DTYPES):
            shapes = ((5,), (0,), (130 + turn,))
            tensors += lists.random(dtype, variant.device, shapes, scale=2.0**power, seed=turn)
    check(multi_tensor_l2norm, tensors, variant.device, maximum=maximum)


def test_hundreds_of_tensors(variant, multi_tensor_l2norm):
    tensors = lists.random(BF16, variant.device, [(n % 23,) for n in range(lists.MANY)])
    check(multi_tensor_l2norm, tensors, variant.device)
    if variant.simt:
        assert variant.kernels["multi_tensor_l2norm_bf16"] == 2


def test_long_sums(variant, multi_tensor_l2norm):
    """Equal terms, one after the other in float32, are rounded alike: 100 000 of them lose three digits."""
    row = torch.full((100_000,), 0.1, device=variant.device, dtype=F32)
    count = 500 if variant.simt else 100_000  # the executor's time goes by tensors
    total = lists.scalar(7.0, variant.device)
    multi_tensor_l2norm(list(row[:count].unbind()), total)
    assert math.isclose(total.item(), math.sqrt(count) * row[0].item(), rel_tol=RELATIVE)


def test_memory_orders_and_views(variant, multi_tensor_l2norm):
    check(multi_tensor_l2norm, lists.channels_last(F16, variant.device), variant.device)
    views = lists.misaligned(lists.random(F16, variant.device, lists.FEW))
    check(multi_tensor_l2norm, views, variant.device)


@pytest.mark.parametrize("shapes", [(), ((0,),), ((0,), (3, 0)), ((1,),)], ids=str)
def test_few_tensors(variant, multi_tensor_l2norm, shapes):
    """Report 35: the norm of nothing is 0."""
    tensors = [torch.full(shape, -3.0, device=variant.device, dtype=F32) for shape in shapes]
    check(multi_tensor_l2norm, tensors, variant.device)


def test_squares_that_float16_cannot_hold(variant, multi_tensor_l2norm):
    """Report 35: a sum of squares past 65504."""
    tensors = [torch.full((300,), 60000.0, dtype=F16, device=variant.device)]
    check(multi_tensor_l2norm, tensors, variant.device)


def test_scales(variant, multi_tensor_l2norm):
    """Gradients of a scaled loss: unscaled before they are squared."""
    tensors = lists.random(F16, variant.device, lists.FEW, scale=1000.0)
    check(multi_tensor_l2norm, tensors, variant.device, scale=2.0**-7)
    total = lists.scalar(7.0, variant.device)
    inv_scale = lists.scalar(2.0**-10, variant.device)
    multi_tensor_l2norm(tensors, total, scale=0.5, inv_scale=inv_scale)
    assert math.isclose(total.item(), expected_norms(tensors)[0] * 2.0**-11, rel_tol=RELATIVE)


@pytest.mark.parametrize("maximum", [False, True], ids=["l2", "maximum"])
@pytest.mark.parametrize("mixed", [False, True], ids=["one dtype", "two dtypes"])
def test_blends_with_what_is_there(variant, multi_tensor_l2norm, maximum, mixed):
    """NovoGrad's second moment: squares are blended for L2, magnitudes for the largest."""
    tensors = lists.random(F32, variant.device, lists.FEW)
    if mixed:
        tensors[1::2] = [t.to(F16) for t in tensors[1::2]]
    _, each = expected_norms(tensors, maximum)
    per_tensor = torch.arange(1.0, len(tensors) + 1, device=variant.device, dtype=F32)
    old = per_tensor.tolist()
    multi_tensor_l2norm(
        tensors,
        lists.scalar(0.0, variant.device),
        per_tensor=per_tensor,
        maximum=maximum,
        blend_new=0.25,
        blend_old=0.75,
    )
    for found, new, before in zip(per_tensor.tolist(), each, old, strict=True):
        wanted = 0.25 * new + 0.75 * before if maximum else math.sqrt(0.25 * new**2 + 0.75 * before**2)
        assert math.isclose(found, wanted, rel_tol=RELATIVE)


def test_clip_coefficient(variant, multi_tensor_l2norm):
    tensors = lists.random(F32, variant.device, lists.FEW)
    norm, _ = expected_norms(tensors)
    for max_norm, wanted in ((norm / 4, 0.25), (norm * 2, 1.0)):
        coefficient = lists.scalar(7.0, variant.device)
        total = lists.scalar(7.0, variant.device)
        multi_tensor_l2norm(tensors, total, max_norm=max_norm, clip_coefficient=coefficient)
        assert math.isclose(coefficient.item(), wanted, rel_tol=2e-6)
    halves = [*tensors, torch.ones(9, dtype=F16, device=variant.device)]
    multi_tensor_l2norm(halves, total, max_norm=1.0, clip_coefficient=coefficient)
    assert math.isclose(coefficient.item(), 1 / math.hypot(norm, 3.0), rel_tol=2e-6)


# ---- flags -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maximum", [False, True], ids=["l2", "maximum"])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite(variant, multi_tensor_l2norm, bad, maximum):
    """It shows in the norm, in its own tensor's norm alone, and in the flag."""
    tensors = lists.random(F32, variant.device, lists.FEW)
    tensors[-1].view(-1)[-1] = bad
    total, noop_flag = lists.scalar(7.0, variant.device), flag(variant.device)
    per_tensor = torch.zeros(len(tensors), device=variant.device, dtype=F32)
    multi_tensor_l2norm(
        tensors, total, per_tensor=per_tensor, noop_flag=noop_flag, check_noop=True, maximum=maximum
    )
    assert noop_flag.item() == 1
    assert math.isnan(total.item()) if math.isnan(bad) else total.item() == INF
    assert per_tensor[:-1].isfinite().all() and not per_tensor[-1].isfinite()


def test_a_nan_beside_an_inf(variant, multi_tensor_l2norm):
    for values in ([INF, NAN, 1.0], [NAN, INF, 1.0], [1.0, NAN, INF]):
        for maximum in (False, True):
            total = lists.scalar(7.0, variant.device)
            multi_tensor_l2norm(
                [torch.tensor(values, dtype=F32, device=variant.device)], total, maximum=maximum
            )
            assert math.isnan(total.item())


def test_the_flag_is_not_read_unless_asked(variant, multi_tensor_l2norm):
    """As public apex's l2norm: it raises the flag, and measures whatever the flag says."""
    noop_flag = flag(variant.device)
    total = lists.scalar(7.0, variant.device)
    multi_tensor_l2norm([torch.full((3,), INF, device=variant.device, dtype=F32)], total, noop_flag=noop_flag)
    assert noop_flag.item() == 1 and total.item() == INF
    multi_tensor_l2norm([torch.ones(4, device=variant.device, dtype=F32)], total, noop_flag=noop_flag)
    assert noop_flag.item() == 1 and total.item() == 2


@pytest.mark.parametrize("dtypes", [(F32,), (F32, F16)], ids=["one dtype", "two dtypes"])
def test_a_raised_flag_changes_nothing(variant, multi_tensor_l2norm, dtypes):
    tensors = [torch.ones(3, dtype=dtype, device=variant.device) for dtype in dtypes]
    total, coefficient = lists.scalar(7.0, variant.device), lists.scalar(7.0, variant.device)
    per_tensor = torch.full((len(tensors),), 7.0, device=variant.device, dtype=F32)
    noop_flag = flag(variant.device, 1)
    multi_tensor_l2norm(
        tensors,
        total,
        per_tensor=per_tensor,
        noop_flag=noop_flag,
        check_noop=True,
        max_norm=1.0,
        clip_coefficient=coefficient,
    )
    assert noop_flag.item() == 1 and total.item() == 7 and coefficient.item() == 7
    assert per_tensor.eq(7).all()


# ---- determinism -------------------------------------------------------------------------------------------


def test_twice_gives_the_same_bits(variant, multi_tensor_l2norm):
    """Also after other lists went through the same scratch memory, and on another number of threads."""
    tensors = lists.random(F32, variant.device)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (threads, threads, 1):
            torch.set_num_threads(count)
            total = lists.scalar(7.0, variant.device)
            per_tensor = torch.zeros(len(tensors), device=variant.device, dtype=F32)
            multi_tensor_l2norm(tensors, total, per_tensor=per_tensor)
            results.append([total, per_tensor])
            multi_tensor_l2norm([t * 3 for t in tensors], total.clone())
    finally:
        torch.set_num_threads(threads)
    lists.assert_same_bits(results[0], results[1])
    if variant.name != "reference":  # torch's own sums depend on the number of threads
        lists.assert_same_bits(results[0], results[2])


# ---- what is refused ---------------------------------------------------------------------------------------


def _bad_inputs(device):
    """(what, exception, words of its message, tensors, changes)"""

    def t(*shape, dtype=F32):
        return torch.ones(shape, dtype=dtype, device=device)

    yield "dtype", TypeError, r"tensors\[1\] is Int", [t(3), t(3, dtype=torch.int32)], {}
    yield "gaps", ValueError, r"tensors\[0\] overlaps itself or has gaps", [t(10)[::2]], {}
    yield "overlap", ValueError, "overlaps", [t(5, 1).expand(5, 3)], {}
    yield "sparse", TypeError, r"tensors\[0\] is sparse", [t(3).to_sparse()], {}
    yield "device", ValueError, "meta", [t(3), t(3).to("meta")], {}
    yield "total dtype", TypeError, "total must be a Float", [t(3)], {"total": t(1, dtype=F64)}
    yield "total size", ValueError, "total must hold one element", [t(3)], {"total": t(2)}
    yield "per_tensor dtype", TypeError, "per_tensor must be", [t(3)], {"per_tensor": t(1, dtype=F16)}
    yield "per_tensor size", ValueError, "per_tensor holds 1", [t(3), t(3)], {"per_tensor": t(1)}
    yield "too many norms", ValueError, "per_tensor holds 4", [t(3), t(3)], {"per_tensor": t(4)}
    mixed = [t(3), t(3, dtype=F16), t(3)]
    yield "per_tensor size of two", ValueError, "per_tensor holds 2", mixed, {"per_tensor": t(2)}
    yield "too many norms of two", ValueError, "per_tensor holds 4", mixed, {"per_tensor": t(4)}
    yield "flag dtype", TypeError, "noop_flag must be a Int", [t(3)], {"noop_flag": t(1)}
    yield "inv_scale dtype", TypeError, "inv_scale", [t(3)], {"inv_scale": t(1, dtype=F64)}


BAD = [case[0] for case in _bad_inputs("cpu")]


@pytest.mark.parametrize("what", BAD)
def test_bad_input_raises_before_anything_runs(variant, multi_tensor_l2norm, what):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    case = next(case for case in _bad_inputs(variant.device) if case[0] == what)
    _, error, words, tensors, changes = case
    arguments = {"total": lists.scalar(7.0, variant.device)} | changes
    before = lists.clones([v for v in arguments.values()])
    with pytest.raises(error, match=words):
        multi_tensor_l2norm(tensors, **arguments)
    lists.assert_same_bits(list(arguments.values()), before)
    assert not [name for name in variant.kernels if "l2norm" in name] and not variant.references


# ---- the dispatcher ----------------------------------------------------------------------------------------


def test_opcheck():
    bindings.load()
    tensors = lists.random(F32, "cpu", ((3,), (2, 5)))
    total = lists.scalar(0.0, "cpu")
    op = torch.ops.apex.multi_tensor_l2norm.default
    torch.library.opcheck(op, (tensors, total))
    options = dict(
        per_tensor=torch.zeros(2, dtype=F32, device="cpu"),
        noop_flag=flag("cpu"),
        inv_scale=torch.ones(1, dtype=F32, device="cpu"),
        check_noop=True,
    )
    torch.library.opcheck(op, (tensors, total), options)


def _measure(tensors, total):
    doubled = [x * 2 for x in tensors]
    torch.ops.apex.multi_tensor_l2norm(doubled, total)
    return total + 1


def test_compiled_once_for_every_variant(variant, compiled):
    bindings.load()
    function, compilations = compiled(_measure)
    tensors = lists.random(F32, variant.device, ((3,), (2, 5), (0,)))
    total = lists.scalar(0.0, variant.device)
    result = function(tensors, total)
    norm = 2 * expected_norms(tensors)[0]
    assert math.isclose(total.item(), norm, rel_tol=RELATIVE)
    assert math.isclose(result.item(), norm + 1, rel_tol=RELATIVE)
    assert compilations() == 1
