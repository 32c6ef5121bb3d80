"""multi_tensor_sgd against float64, by every entrance and on everything that can serve it.

Tolerance: one rounding to each output's dtype, four of the arithmetic's, and a little of the terms' size
(they are near 1), because sums may cancel.
"""

from __future__ import annotations

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag, scalar

from apex._loader import bindings, library

# gradient, parameter[, momentum buffer[, model copy]]
PLAIN = [(F32, F32), (F16, F32), (BF16, F32), (F16, F16), (F32, F16), (BF16, BF16), (F32, BF16), (F64, F64)]
ROUNDED = [(F16, F16, F16), (F32, F16, F16), (BF16, BF16, BF16), (F32, BF16, BF16)]  # buffers
MOMENTUM = [(*pair, F64 if pair[1] == F64 else F32) for pair in PLAIN] + ROUNDED
MODEL = [
    (F16, F32, F32, F16),
    (F32, F32, F32, F16),
    (BF16, F32, F32, BF16),
    (F32, F32, F32, BF16),
    (BF16, F32, F32, F16),
]
SCALARS = dict(
    weight_decay=0.1, momentum=0.9, dampening=0.25, lr=0.1, nesterov=False, first_run=False,
    wd_after_momentum=False, scale=0.5,
)  # fmt: skip


def dispatcher(tensors, **options):
    torch.ops.apex.multi_tensor_sgd(*tensors, *[[]] * (4 - len(tensors)), **options)


def direct(tensors, **options):
    module = bindings.load().module
    if module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    tensors = [*tensors, []] if len(tensors) == 2 else tensors
    module.multi_tensor_sgd(tensors, **options)


@pytest.fixture(params=[dispatcher, direct], ids=lambda f: f.__name__)
def multi_tensor_sgd(request):
    bindings.load()
    return request.param


def state(device, dtypes=(F32, F32, F32), shapes=lists.FEW):
    """[gradients, parameters[, buffers[, model copies]]] in the middle of a training run."""
    found = [lists.random(dtype, device, shapes, seed=k) for k, dtype in enumerate(dtypes[:3])]
    if len(dtypes) > 3:
        found.append([p.to(dtypes[3]) for p in found[1]])
    return found


def expected(tensors, inv_scale=1.0, first=False, stored=None, **changes):
    """[parameters, buffers] after torch.optim.SGD's step, in float64.

    first: or a mask for each tensor. stored: buffers after the step, rounded, of which parameters come.
    """
    s = SCALARS | changes
    parameters, buffers = [], []
    for i, (g, p) in enumerate(zip(*map(lists.exact, tensors[:2]), strict=True)):
        step = g * s["scale"] * inv_scale
        if not s["wd_after_momentum"]:
            step = step + s["weight_decay"] * p
        if len(tensors) > 2 and s["momentum"]:
            (old,) = lists.exact([tensors[2][i]])
            mask = (
                torch.tensor(first or s["first_run"], dtype=torch.bool, device="cpu")
                if isinstance(first, bool)
                else first[i].cpu()
            )
            gathered = torch.where(mask, step, s["momentum"] * old + (1 - s["dampening"]) * step)
            buffers.append(gathered)
            moved = gathered if stored is None else stored[i]
            step = step + s["momentum"] * moved if s["nesterov"] else moved
        if s["wd_after_momentum"]:
            step = step + s["weight_decay"] * p
        parameters.append(p - s["lr"] * step)
    return parameters, buffers


def run(op, tensors, inv_scale=1.0, wanted=None, **options):
    """One step, compared. wanted: what the oracle is told beside the options."""
    before = [lists.clones(column) for column in tensors]
    op(tensors, **(SCALARS | options))
    stored = lists.exact(tensors[2]) if len(tensors) > 2 else None
    parameters, buffers = expected(before, inv_scale, stored=stored, **(options | (wanted or {})))
    lists.assert_same_bits(tensors[0], before[0])
    for found, value in ((tensors[1], parameters), (tensors[2] if buffers else [], buffers)):
        working = lists.ROUNDING[F64 if found and found[0].dtype == F64 else F32]
        lists.assert_near(found, value, arithmetic=4, smallest=16 * working)
    if len(tensors) > 3:
        lists.assert_near(tensors[3], lists.exact(tensors[1]), arithmetic=0)


@pytest.mark.parametrize(
    "dtypes", PLAIN + MOMENTUM + MODEL, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes)
)
def test_values(variant, multi_tensor_sgd, dtypes):
    options = dict(momentum=0.0) if len(dtypes) == 2 else {}
    run(multi_tensor_sgd, state(variant.device, dtypes), **options)
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "sgd" in name) == 1


@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, F32, F32), (BF16, F32, F32, BF16)], ids=len)
def test_large_tensors(variant, dtypes):
    run(
        dispatcher,
        state(variant.device, dtypes, lists.SHAPES),
        **(dict(momentum=0.0) if len(dtypes) == 2 else {}),
    )


@pytest.mark.parametrize("first_run", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("wd_after_momentum", [False, True])
def test_modes(variant, first_run, nesterov, wd_after_momentum):
    how = dict(first_run=first_run, nesterov=nesterov, wd_after_momentum=wd_after_momentum)
    run(dispatcher, state(variant.device), **how)


@pytest.mark.parametrize(
    "options", [dict(weight_decay=0.0), dict(dampening=0.0), dict(lr=0.0), dict(scale=1.0)], ids=str
)
def test_options(variant, options):
    run(dispatcher, state(variant.device), **options)


def test_misaligned_views(variant, multi_tensor_sgd):
    for k in range(3):
        tensors = state(variant.device)
        tensors[k] = lists.misaligned(tensors[k])
        run(multi_tensor_sgd, tensors)


def test_memory_orders(variant, multi_tensor_sgd):
    """Gradients may have other strides than their parameters."""
    tensors = [lists.channels_last(F32, variant.device, seed=10 * k) for k in range(3)]
    run(multi_tensor_sgd, tensors)
    run(multi_tensor_sgd, [[g.contiguous() for g in tensors[0]], *tensors[1:]])


def test_mixed_dtypes_in_one_call(variant, multi_tensor_sgd):
    columns = [[], [], []]
    for dtypes in MOMENTUM:
        for column, new in zip(columns, state(variant.device, dtypes, ((5,), (0,), (130,))), strict=True):
            column += new
    run(multi_tensor_sgd, columns)
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "sgd" in name) == len(MOMENTUM)


def test_marked_elements_take_their_first_step(variant, multi_tensor_sgd):
    tensors = state(variant.device)
    masks = [
        torch.arange(b.numel(), device=b.device, dtype=torch.int64).view(b.shape) % 3 == 0 for b in tensors[2]
    ]
    tensors[2] = [b.masked_fill(mask, -0.0) for b, mask in zip(tensors[2], masks, strict=True)]
    run(multi_tensor_sgd, tensors, marked_first_run=True, wanted=dict(first=masks))


def test_no_element_is_left_marked(variant, multi_tensor_sgd):
    tensors = [[torch.full((9,), value, device=variant.device, dtype=F32)] for value in (-0.0, 1.0, -0.0)]
    multi_tensor_sgd(tensors, **(SCALARS | dict(weight_decay=0.0, marked_first_run=True)))
    assert tensors[2][0].eq(0).all() and not tensors[2][0].signbit().any()


@pytest.mark.parametrize("dtypes", ROUNDED, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
def test_no_element_is_marked_by_rounding(variant, multi_tensor_sgd, dtypes):
    """What rounds to -0 has taken its step; the smallest value that does not stays."""
    smallest = float(torch.finfo(dtypes[2]).smallest_normal * torch.finfo(dtypes[2]).eps)
    options = dict(weight_decay=0.0, dampening=0.0, momentum=0.5, scale=0.0, marked_first_run=True)
    buffers = torch.tensor([-smallest, -2 * smallest, smallest], dtype=dtypes[2], device=variant.device)
    tensors = [[torch.ones(3, dtype=d, device=variant.device)] for d in dtypes[:2]] + [[buffers]]
    multi_tensor_sgd(tensors, **(SCALARS | options))
    assert buffers.tolist() == [0.0, -smallest, 0.0] and buffers.signbit().tolist() == [False, True, False]


def test_buffers_are_not_read_without_momentum(variant, multi_tensor_sgd):
    """As public apex passes them. What they hold, and even their dtype, makes no difference."""
    tensors = state(variant.device, (F16, F16, F64))
    before = lists.clones(tensors[2])
    run(multi_tensor_sgd, tensors, momentum=0.0)
    lists.assert_same_bits(tensors[2], before)
    model = state(variant.device, (F16, F32, F32, F16))
    before = lists.clones(model[2])
    run(multi_tensor_sgd, model, momentum=0.0)
    lists.assert_same_bits(model[2], before)


def test_scalars_on_the_device(variant, multi_tensor_sgd):
    options = dict(lr=99.0, lr_tensor=scalar(0.25, variant.device), inv_scale=scalar(0.125, variant.device))
    tensors = state(variant.device, (F16, F32, F32))
    parameters, _ = expected(tensors, 0.125, lr=0.25)
    multi_tensor_sgd(tensors, **(SCALARS | options))
    lists.assert_near(tensors[1], parameters, smallest=1e-6)


@pytest.mark.parametrize("what", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(variant, multi_tensor_sgd, what):
    raised = scalar(1.0, variant.device) if what == "found_inf" else flag(variant.device, 1)
    down = scalar(0.0, variant.device) if what == "found_inf" else flag(variant.device)
    for dtypes in ((F32, F32), (F32, F32, F32), (BF16, F32, F32, BF16)):
        options = dict(momentum=0.0) if len(dtypes) == 2 else {}
        tensors = state(variant.device, dtypes)
        tensors[0][-1].view(-1)[-1] = float("inf")
        before = [lists.clones(column) for column in tensors]
        multi_tensor_sgd(tensors, **(SCALARS | options | {what: raised}))
        for column, old in zip(tensors, before, strict=True):
            lists.assert_same_bits(column, old)
        run(multi_tensor_sgd, tensors, **options, **{what: down})


def test_bad_input_raises_before_anything_runs(variant, multi_tensor_sgd):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    tensors = state(variant.device)
    before = [lists.clones(column) for column in tensors]
    doubles = [t.double() for t in tensors[0]]
    cases = [
        (ValueError, "momentum buffers are required", [*tensors[:2], []], {}),
        (TypeError, "no variant takes", [doubles, *tensors[1:]], {}),
        (ValueError, "momentums holds 1", [*tensors[:2], tensors[2][:1]], {}),
        (TypeError, "lr_tensor must be a Float", tensors, {"lr_tensor": scalar(1.0, variant.device, F64)}),
        (
            ValueError,
            "found_inf must hold one element",
            tensors,
            {"found_inf": torch.zeros(2, device=variant.device, dtype=F32)},
        ),
    ]
    for error, words, columns, changes in cases:
        with pytest.raises(error, match=words):
            multi_tensor_sgd(columns, **(SCALARS | changes))
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)


def test_opcheck():
    bindings.load()
    for dtypes in ((F32, F32), (F32, F32, F32), (BF16, F32, F32, BF16)):
        tensors = state("cpu", dtypes, ((3,), (2, 5)))
        columns = [*tensors, *[[]] * (4 - len(tensors))]
        options = SCALARS | (dict(momentum=0.0) if len(dtypes) == 2 else dict(noop_flag=flag("cpu")))
        torch.library.opcheck(torch.ops.apex.multi_tensor_sgd.default, tuple(columns), options)


@pytest.mark.parametrize(
    "options", [{}, dict(nesterov=True), dict(momentum=0.0), dict(first_run=True)], ids=str
)
def test_halves_are_the_same_on_each_level_of_the_processor(options):
    """Every number of bfloat16 in each list: subnormal and infinite ones, nan, -0. What a level does in registers and
    what it does in tiles gives the same bits, but for those of a nan."""
    if not bindings.load().native:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    codes = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.int16).view(BF16)
    drawn = torch.Generator("cpu").manual_seed(0)
    orders = [torch.randperm(2**16, generator=drawn, dtype=torch.int64, device="cpu") for _ in range(3)]
    levels, found = library.load().c.apex_set_cpu_level, []
    highest = levels(0)
    try:
        for level in sorted({1, highest - 1, highest} - {0}):
            levels(level)
            tensors = [[codes[order], codes[order][:1021]] for order in orders]
            dispatcher(tensors, **(SCALARS | dict(marked_first_run=True) | options))
            made = torch.cat([t for listed in tensors[1:] for t in listed])
            found.append(torch.where(made.isnan(), torch.zeros_like(made), made).view(torch.int16))
    finally:
        levels(0)
    assert all(torch.equal(found[0], other) for other in found[1:])
