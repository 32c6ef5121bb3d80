"""multi_tensor_scale against float64, by every entrance and on everything that can serve it."""

from __future__ import annotations

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag

from apex._loader import bindings

PAIRS = [(a, b) for a in (F32, F16, BF16) for b in (F32, F16, BF16)] + [(F64, F64)]
SCALE = 0.37
INF, NAN = float("inf"), float("nan")


def dispatcher(inputs, outputs, noop_flag, scale, scale_tensor=None, skip_one=False):
    torch.ops.apex.multi_tensor_scale(inputs, outputs, noop_flag, scale, scale_tensor, skip_one)


def direct(inputs, outputs, noop_flag, scale, scale_tensor=None, skip_one=False):
    module = bindings.load().module
    if module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    module.multi_tensor_scale([inputs, outputs], noop_flag, scale, scale_tensor, skip_one)


@pytest.fixture(params=[dispatcher, direct], ids=lambda f: f.__name__)
def multi_tensor_scale(request):
    bindings.load()
    return request.param


def check(op, inputs, outputs, scale=SCALE):
    """Runs the op and compares with float64; inputs stay as they are, the flag stays down."""
    noop_flag = flag(outputs[0].device)
    before = lists.clones(inputs)
    op(inputs, outputs, noop_flag, scale)
    assert noop_flag.item() == 0
    lists.assert_same_bits(inputs, before)
    for source, target in zip(inputs, outputs, strict=True):
        expected = [x * scale for x in lists.exact([source])]
        lists.assert_near([target], expected, dtypes=(source.dtype,))


@pytest.mark.parametrize("source, target", PAIRS, ids=str)
def test_values(variant, multi_tensor_scale, source, target):
    inputs = lists.random(source, variant.device)
    check(multi_tensor_scale, inputs, lists.empties(inputs, target))
    if variant.simt:
        assert variant.kernels.total() > 0


@pytest.mark.parametrize("source, target", [(F32, F16), (BF16, BF16), (F64, F64)], ids=str)
def test_misaligned_views(variant, multi_tensor_scale, source, target):
    """Report: vector accesses on a view that begins between two vectors. Either list, or both."""
    inputs = lists.random(source, variant.device, lists.FEW)
    outputs = lists.empties(inputs, target)
    check(multi_tensor_scale, lists.misaligned(inputs), outputs)
    check(multi_tensor_scale, inputs, lists.misaligned(outputs))
    check(multi_tensor_scale, lists.misaligned(inputs), lists.misaligned(outputs))


def test_nothing_is_written_past_a_view(variant, multi_tensor_scale):
    memory = torch.full((64,), 7.0, device=variant.device, dtype=F32)
    for begin, length in ((1, 4), (3, 0), (8, 16), (30, 33)):
        multi_tensor_scale(
            [torch.ones(length, device=variant.device, dtype=F32)],
            [memory[begin : begin + length]],
            flag(variant.device),
            1.0,
        )
        assert memory[begin : begin + length].eq(1).all()
        assert memory[:begin].eq(7).all() and memory[begin + length :].eq(7).all()
        memory.fill_(7.0)


def test_in_place(variant, multi_tensor_scale):
    tensors = lists.random(F32, variant.device)
    expected = [x * 2.0 for x in lists.exact(tensors)]
    multi_tensor_scale(tensors, tensors, flag(variant.device), 2.0)
    lists.assert_near(tensors, expected, units=0, arithmetic=0)


def test_mixed_dtypes_in_one_call(variant, multi_tensor_scale):
    """One launch a pair of dtypes; the tensors of a pair need not stand together."""
    inputs, outputs = [], []
    for turn in range(2):
        for source, target in PAIRS:
            new = lists.random(source, variant.device, ((5,), (0,), (130,)), seed=turn)
            inputs += new
            outputs += lists.empties(new, target)
    check(multi_tensor_scale, inputs, outputs)
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "scale" in name) == len(PAIRS)


def test_hundreds_of_tensors(variant, multi_tensor_scale):
    """Public kernels are launched once for 110 tensors; here it is one launch."""
    inputs = lists.random(F32, variant.device, [(n % 23,) for n in range(lists.MANY)])
    check(multi_tensor_scale, inputs, lists.empties(inputs, F16))
    if variant.simt:
        assert variant.kernels["multi_tensor_scale_f32_f16"] == 1


def test_memory_orders(variant, multi_tensor_scale):
    """Dense tensors of any strides; inputs whose strides differ from the outputs', gaps and overlaps too."""
    inputs = lists.channels_last(F32, variant.device)
    check(multi_tensor_scale, inputs, lists.empties(inputs, BF16))
    check(multi_tensor_scale, [x.contiguous() for x in inputs], lists.empties(inputs))
    check(multi_tensor_scale, inputs, [torch.empty(x.shape, device=x.device, dtype=F32) for x in inputs])
    gaps = torch.randn(6, 10, device=variant.device, dtype=F32)[:, ::3]
    repeated = torch.randn(4, 1, device=variant.device, dtype=F32).expand(4, 9)
    check(
        multi_tensor_scale,
        [gaps, repeated],
        [
            torch.empty(6, 4, dtype=F32, device="cpu").to(gaps),
            torch.empty(4, 9, dtype=F32, device="cpu").to(gaps),
        ],
    )


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_flags_what_is_not_finite(variant, multi_tensor_scale, dtype):
    """In any element of any tensor; also where the scale is 0."""
    cases = ((INF, 1.0, -1, -1), (-INF, 0.0, 1, 0), (NAN, 1.0, 2, 3), (NAN, 0.0, -2, 9))
    for bad, scale, tensor, element in cases:
        inputs = lists.random(dtype, variant.device, lists.FEW)
        inputs[tensor].view(-1)[element] = bad
        outputs = lists.empties(inputs)
        noop_flag = flag(variant.device)
        multi_tensor_scale(inputs, outputs, noop_flag, scale)
        assert noop_flag.item() == 1, (bad, scale)
        expected = [x * scale for x in lists.exact(inputs)]
        lists.assert_near(outputs, expected)


def test_flags_a_result_that_overflows(variant, multi_tensor_scale):
    noop_flag = flag(variant.device)
    outputs = [torch.zeros(3, device=variant.device, dtype=F32)]
    multi_tensor_scale([torch.full((3,), 2e38, device=variant.device, dtype=F32)], outputs, noop_flag, 2.0)
    assert noop_flag.item() == 1 and outputs[0].isinf().all()


def test_a_raised_flag_stays_and_stops_nothing(variant, multi_tensor_scale):
    """As public apex: scale itself runs on; those after it read the flag."""
    noop_flag = flag(variant.device, 1)
    outputs = [torch.zeros(3, device=variant.device, dtype=F32)]
    multi_tensor_scale([torch.ones(3, device=variant.device, dtype=F32)], outputs, noop_flag, 2.0)
    assert noop_flag.item() == 1 and outputs[0].eq(2).all()


def test_scale_on_the_device(variant, multi_tensor_scale):
    inputs = lists.random(F16, variant.device)
    outputs = lists.empties(inputs, F32)
    scale = lists.scalar(0.25, variant.device)
    multi_tensor_scale(inputs, outputs, flag(variant.device), 99.0, scale)
    lists.assert_near(outputs, [x * 0.25 for x in lists.exact(inputs)], units=0, arithmetic=0)


def test_a_factor_of_one_in_place(variant, multi_tensor_scale):
    """Clipping mostly multiplies by 1: skip_one leaves the tensors unread. Any other factor works as ever."""
    for factor in (1.0, 0.5):
        tensors = lists.random(F32, variant.device)
        expected = [x * factor for x in lists.exact(tensors)]
        scale = lists.scalar(factor, variant.device)
        multi_tensor_scale(tensors, tensors, flag(variant.device), 99.0, scale, True)
        lists.assert_near(tensors, expected, units=0, arithmetic=0)


@pytest.mark.parametrize("tensors", [[], [(0,)], [(0,), (3, 0)]], ids=str)
def test_nothing_to_do(variant, multi_tensor_scale, tensors):
    inputs = [torch.ones(shape, device=variant.device, dtype=F32) for shape in tensors]
    noop_flag = flag(variant.device)
    multi_tensor_scale(inputs, lists.empties(inputs), noop_flag, 2.0)
    assert noop_flag.item() == 0
    assert not [name for name in variant.kernels if "scale" in name]


def test_twice_gives_the_same_bits(variant, multi_tensor_scale):
    inputs = lists.random(F32, variant.device)
    first, second = lists.empties(inputs, BF16), lists.empties(inputs, BF16)
    for outputs in (first, second):
        multi_tensor_scale(inputs, outputs, flag(variant.device), SCALE)
    lists.assert_same_bits(first, second)


def test_writes_are_counted(variant, multi_tensor_scale):
    """A tensor that backward() saved and this op overwrote is an error there, not a wrong gradient."""
    source = torch.ones(5, device=variant.device, dtype=F32)
    weight = torch.ones(5, device=variant.device, requires_grad=True, dtype=F32)
    saved = torch.ones(5, device=variant.device, dtype=F32)
    product = weight * saved
    versions = source._version
    multi_tensor_scale([source], [saved], flag(variant.device), 2.0)
    assert source._version == versions
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_leaf_that_needs_grad_may_be_written(variant, multi_tensor_scale):
    parameter = torch.zeros(5, device=variant.device, requires_grad=True, dtype=F32)
    source = torch.ones(5, device=variant.device, requires_grad=True, dtype=F32)
    multi_tensor_scale([source], [parameter], flag(variant.device), 2.0)
    assert parameter.is_leaf and parameter.eq(2).all()


# ---- what is refused ---------------------------------------------------------------------------------------


def _bad_inputs(device):
    """(what, exception, words of its message, inputs, outputs, changes)"""

    def t(*shape, dtype=F32):
        return torch.ones(shape, dtype=dtype, device=device)

    strided = torch.ones(10, device=device, dtype=F32)[::2]
    yield "count", ValueError, "outputs holds 1", [t(3), t(3)], [t(3)], {}
    yield "size", ValueError, r"inputs\[1\] has 4 elements", [t(3), t(4)], [t(3), t(3)], {}
    yield "dtype", TypeError, r"inputs\[0\] is Long", [t(3, dtype=torch.int64)], [t(3)], {}
    yield "pair", TypeError, "no variant takes", [t(3), t(3, dtype=F64)], [t(3), t(3)], {}
    yield "output dtype", TypeError, r"outputs\[0\] is Int", [t(3)], [t(3, dtype=torch.int32)], {}
    yield "gaps", ValueError, r"outputs\[0\] overlaps itself or has gaps", [t(5)], [strided], {}
    yield "overlap", ValueError, "overlaps", [t(5, 3)], [t(5, 1).expand(5, 3)], {}
    yield "sparse", TypeError, r"inputs\[0\] is sparse", [t(3).to_sparse()], [t(3)], {}
    yield "device", ValueError, "meta", [t(3), t(3).to("meta")], [t(3), t(3)], {}
    yield "flag dtype", TypeError, "noop_flag must be a Int", [t(3)], [t(3)], {"noop_flag": t(1)}
    yield "flag size", ValueError, "one element", [t(3)], [t(3)], {"noop_flag": t(2, dtype=torch.int32)}
    yield "scale dtype", TypeError, "scale_tensor", [t(3)], [t(3)], {"scale_tensor": t(1, dtype=F64)}


BAD = [case[0] for case in _bad_inputs("cpu")]


@pytest.mark.parametrize("what", BAD)
def test_bad_input_raises_before_anything_runs(variant, multi_tensor_scale, what):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    case = next(case for case in _bad_inputs(variant.device) if case[0] == what)
    _, error, words, inputs, outputs, changes = case
    before = [t.clone() for t in outputs if t.layout == torch.strided and t.device == variant.device]
    arguments = {"noop_flag": flag(variant.device), "scale_tensor": None} | changes
    with pytest.raises(error, match=words):
        multi_tensor_scale(inputs, outputs, arguments["noop_flag"], 2.0, arguments["scale_tensor"])
    lists.assert_same_bits([t for t in outputs if t.device == variant.device], before)
    assert not [name for name in variant.kernels if "scale" in name] and not variant.references


# ---- the dispatcher ----------------------------------------------------------------------------------------


def test_opcheck():
    bindings.load()
    inputs = lists.random(F32, "cpu", ((3,), (2, 5)))
    for scale_tensor in (None, torch.ones(1, dtype=F32, device="cpu")):
        arguments = (inputs, lists.empties(inputs, F16), flag("cpu"), 0.5, scale_tensor)
        torch.library.opcheck(torch.ops.apex.multi_tensor_scale.default, arguments)


def _train(inputs, outputs, noop_flag):
    doubled = [x * 2 for x in inputs]
    torch.ops.apex.multi_tensor_scale(doubled, outputs, noop_flag, 0.25)
    return [x + 1 for x in outputs]


def test_compiled_once_for_every_variant(variant, compiled):
    """fullgraph, and what serves is chosen when it runs: the graph of one variant serves the others."""
    bindings.load()
    function, compilations = compiled(_train)
    inputs = lists.random(F32, variant.device, ((3,), (2, 5), (0,)))
    outputs = lists.empties(inputs)
    results = function(inputs, outputs, flag(variant.device))
    lists.assert_near(outputs, [x / 2 for x in lists.exact(inputs)], units=0, arithmetic=0)
    lists.assert_near(results, [x / 2 + 1 for x in lists.exact(inputs)])
    assert compilations() == 1
    if variant.simt:
        assert variant.kernels["multi_tensor_scale_f32_f32"] == 1
