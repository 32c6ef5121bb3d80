"""multi_tensor_adam against float64, by every entrance and on everything that can serve it."""

from __future__ import annotations

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64, flag, scalar

from apex._loader import bindings

L2, DECOUPLED = 0, 1
# gradient, parameter[, model copy of the parameter, then a master]; moments are float32, or float64 as it is.
DTYPES = [(F32, F32), (F16, F32), (BF16, F32), (F16, F16), (F32, F16), (BF16, BF16), (F32, BF16), (F64, F64)]
MASTERS = [(F32, F32, F32), (F16, F32, F16), (F32, F32, F16), (BF16, F32, BF16), (F32, F32, BF16)]
SCALARS = dict(
    lr=1e-2,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    step=3,
    decay_mode=DECOUPLED,
    bias_correction=True,
    weight_decay=0.1,
)


def dispatcher(tensors, **options):
    tensors = [*tensors, *[[]] * (5 - len(tensors))]
    torch.ops.apex.multi_tensor_adam(*tensors, **options)


def direct(tensors, **options):
    module = bindings.load().module
    if module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    module.multi_tensor_adam(tensors, **options)


@pytest.fixture(params=[dispatcher, direct], ids=lambda f: f.__name__)
def multi_tensor_adam(request):
    bindings.load()
    return request.param


def state(device, dtypes=(F32, F32), shapes=lists.FEW):
    """[gradients, parameters, exp_avgs, exp_avg_sqs[, model copies]] in the middle of a training run."""
    moment = F64 if dtypes[1] == F64 else F32
    found = [
        lists.random(dtypes[0], device, shapes, seed=1),
        lists.random(dtypes[1], device, shapes, seed=2),
        lists.random(moment, device, shapes, scale=0.1, seed=3),
        [x.square() for x in lists.random(moment, device, shapes, scale=0.1, seed=4)],
    ]
    if len(dtypes) > 2:
        found.append([p.to(dtypes[2]) for p in found[1]])
    return found


def expected(tensors, inv_scale=1.0, **changes):
    """[parameters, exp_avgs, exp_avg_sqs] after the step of the papers, in float64."""
    s = SCALARS | changes
    results = [[], [], []]
    for g, p, m, v in zip(*map(lists.exact, tensors[:4]), strict=True):
        g = g * inv_scale + (s["weight_decay"] * p if s["decay_mode"] == L2 else 0)
        m = s["beta1"] * m + (1 - s["beta1"]) * g
        v = s["beta2"] * v + (1 - s["beta2"]) * g * g
        first = 1 - s["beta1"] ** s["step"] if s["bias_correction"] else 1
        second = 1 - s["beta2"] ** s["step"] if s["bias_correction"] else 1
        keep = 1 - s["lr"] * s["weight_decay"] if s["decay_mode"] == DECOUPLED else 1
        p = p * keep - s["lr"] * (m / first) / ((v / second).sqrt() + s["eps"])
        for result, value in zip(results, (p, m, v), strict=True):
            result.append(value)
    return results


def check(tensors, values):
    """Compares what is there with `expected`; sums may cancel, so a little of the terms' size is allowed."""
    for found, value in zip(tensors[1:4], values, strict=True):
        working = lists.ROUNDING[F64 if found and found[0].dtype == F64 else F32]
        lists.assert_near(found, value, arithmetic=4, smallest=16 * working)
    if len(tensors) > 4:
        lists.assert_near(tensors[4], lists.exact(tensors[1]), arithmetic=0)


def run(op, tensors, inv_scale=1.0, wanted=None, **options):
    """One step, compared. wanted: what the oracle is told beside the options."""
    values = expected(tensors, inv_scale, **(options | (wanted or {})))
    gradients = lists.clones(tensors[0])
    op(tensors, **(SCALARS | options))
    check(tensors, values)
    lists.assert_same_bits(tensors[0], gradients)


@pytest.mark.parametrize("dtypes", DTYPES + MASTERS, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
def test_values(variant, multi_tensor_adam, dtypes):
    run(multi_tensor_adam, state(variant.device, dtypes, lists.SHAPES))
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "adam" in name) == 1


def test_float64_parameters_with_float32_moments(variant, multi_tensor_adam):
    """What public apex's direct callers hold for double parameters."""
    tensors = state(variant.device, (F64, F64), lists.SHAPES)
    tensors[2:4] = ([moment.float() for moment in column] for column in tensors[2:4])
    run(multi_tensor_adam, tensors)
    assert {moment.dtype for moment in tensors[2]} == {F32}


@pytest.mark.parametrize(
    "options",
    [
        dict(decay_mode=L2),
        dict(decay_mode=L2, weight_decay=0.0),
        dict(bias_correction=False),
        dict(step=1),
        dict(step=100_000),
        dict(step=2**31 - 1),
        dict(step=0, bias_correction=False),
        dict(beta1=0.0, beta2=0.0),
        dict(eps=0.5),
        dict(lr=0.0),
    ],
    ids=str,
)
def test_options(variant, options):
    run(dispatcher, state(variant.device), **options)


def test_betas_are_not_rounded_to_float32(variant):
    """1 - float32(0.999) is off by 1.3e-5, relative, and exp_avg_sq with it."""
    tensors = state(variant.device, shapes=((1031,),))
    tensors[3][0].zero_()
    values = expected(tensors)
    dispatcher(tensors, **SCALARS)
    lists.assert_near(tensors[3], values[2], arithmetic=4)


@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, F16), (BF16, F32, BF16)], ids=str)
def test_misaligned_views(variant, multi_tensor_adam, dtypes):
    """One list, and all of them, begin between two vectors."""
    for which in range(4 + (len(dtypes) > 2)):
        tensors = state(variant.device, dtypes)
        tensors[which] = lists.misaligned(tensors[which])
        run(multi_tensor_adam, tensors)
    run(multi_tensor_adam, [lists.misaligned(column) for column in state(variant.device, dtypes)])


def test_hundreds_of_tensors(variant, multi_tensor_adam):
    tensors = state(variant.device, (BF16, BF16), [(n % 23,) for n in range(lists.MANY)])
    run(multi_tensor_adam, tensors)
    if variant.simt:
        assert variant.kernels["multi_tensor_adam_bf16_bf16"] == 1


def test_memory_orders(variant, multi_tensor_adam):
    tensors = [lists.channels_last(F32, variant.device, seed=s) for s in (1, 2, 3, 4)]
    tensors[3] = [x.square() for x in tensors[3]]
    run(multi_tensor_adam, tensors)
    tensors[0] = [g.contiguous() for g in tensors[0]]  # a gradient's strides are its own
    run(multi_tensor_adam, tensors)


def test_scalars_without_dimensions(variant, multi_tensor_adam):
    run(multi_tensor_adam, state(variant.device, shapes=((), (1,), (1, 1, 1))))


def test_twice_gives_the_same_bits(variant, multi_tensor_adam):
    first, second = (state(variant.device, (F16, F16), lists.SHAPES) for _ in range(2))
    for tensors in (first, second):
        multi_tensor_adam(tensors, **SCALARS)
    for a, b in zip(first, second, strict=True):
        lists.assert_same_bits(a, b)


# ---- scalars on the device ---------------------------------------------------------------------------------


def test_scalars_on_the_device(variant, multi_tensor_adam):
    """Learning rate, step and scale: a captured step sees what these hold at replay."""
    device = variant.device
    step, lr = scalar(6, device, torch.int32), scalar(0.25, device)
    tensors = state(device, (F16, F32))
    values = expected(tensors, 0.5, step=7, lr=0.25)
    multi_tensor_adam(
        tensors,
        **(SCALARS | dict(lr=99.0, step=-1)),
        lr_tensor=lr,
        step_tensor=step,
        advance_step=True,
        inv_scale=scalar(0.5, device),
    )
    check(tensors, values)
    assert step.item() == 7 and lr.item() == 0.25


def test_a_step_tensor_that_is_only_read(variant, multi_tensor_adam):
    step = scalar(7, variant.device, torch.int32)
    run(multi_tensor_adam, state(variant.device), wanted=dict(step=7), step=-1, step_tensor=step)
    assert step.item() == 7


def test_mixed_dtypes_advance_the_step_once(variant, multi_tensor_adam):
    """Report 29: one launch a combination of dtypes, and all of them use the same step."""
    parts = [state(variant.device, dtypes) for dtypes in DTYPES]
    values = [expected(part, step=4) for part in parts]
    order = range(len(lists.FEW) * len(parts))
    together = [[parts[i % len(parts)][k][i // len(parts)] for i in order] for k in range(4)]
    step = scalar(3, variant.device, torch.int32)
    multi_tensor_adam(together, **(SCALARS | dict(step=-1)), step_tensor=step, advance_step=True)
    assert step.item() == 4
    for part, value in zip(parts, values, strict=True):
        check(part, value)
    if variant.simt:
        assert sum(n for name, n in variant.kernels.items() if "adam" in name) == len(DTYPES)


@pytest.mark.parametrize(
    "dtypes", [((F32, F32),), ((F32, F32), (BF16, BF16))], ids=["one dtype", "two dtypes"]
)
@pytest.mark.parametrize("name", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(variant, multi_tensor_adam, name, dtypes):
    """An overflow: neither the tensors nor the step count."""
    parts = [state(variant.device, kinds) for kinds in dtypes]
    tensors = [sum((part[k] for part in parts), []) for k in range(4)]
    before = [lists.clones(column) for column in tensors]
    step = scalar(3, variant.device, torch.int32)
    raised = scalar(1, variant.device, F32 if name == "found_inf" else torch.int32)
    multi_tensor_adam(tensors, **SCALARS, step_tensor=step, advance_step=True, **{name: raised})
    for column, old in zip(tensors, before, strict=True):
        lists.assert_same_bits(column, old)
    assert step.item() == 3 and raised.item() == 1
    raised.zero_()
    values = expected(tensors, step=4)
    multi_tensor_adam(tensors, **SCALARS, step_tensor=step, advance_step=True, **{name: raised})
    check(tensors, values)
    assert step.item() == 4


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_where_it_is(variant, bad):
    """Without a flag: one bad gradient spoils its own element alone."""
    tensors = state(variant.device, shapes=((1031,),))
    tensors[0][0][1000] = bad
    dispatcher(tensors, **SCALARS)
    spoilt = ~tensors[1][0].isfinite()
    assert spoilt[1000] and spoilt.sum() == 1


# ---- what is refused ---------------------------------------------------------------------------------------


def _bad_inputs(device):
    """(what, exception, words of its message, tensor lists, changed options)"""

    def t(*shape, dtype=F32):
        return torch.ones(shape, dtype=dtype, device=device)

    def four(*shape, **changes):
        rows = dict(grads=t(*shape), params=t(*shape), exp_avgs=t(*shape), exp_avg_sqs=t(*shape)) | changes
        return [[rows[name]] for name in ("grads", "params", "exp_avgs", "exp_avg_sqs")]

    good = four(3)
    yield "count", ValueError, "exp_avg_sqs holds 0", [*good[:3], []], {}
    yield "size", ValueError, r"exp_avgs\[0\] has 4 elements", four(3, exp_avgs=t(4)), {}
    yield "gradient size", ValueError, r"grads\[0\] has 4 elements", four(3, grads=t(4)), {}
    yield "dtype", TypeError, r"params\[0\] is Long", four(3, params=t(3, dtype=torch.int64)), {}
    yield "moments", TypeError, "no variant takes", four(3, exp_avgs=t(3, dtype=F16)), {}
    second = four(3, exp_avgs=t(3, dtype=F64))
    yield (
        "moments of the second",
        TypeError,
        "no variant takes",
        [a + b for a, b in zip(good, second, strict=True)],
        {},
    )
    yield "gaps", ValueError, r"params\[0\] overlaps itself or has gaps", four(5, params=t(10)[::2]), {}
    yield "strides", ValueError, r"exp_avgs\[0\] has strides", four(4, 3, exp_avgs=t(3, 4).t()), {}
    yield "sparse", TypeError, r"grads\[0\] is sparse", four(3, grads=t(3).to_sparse()), {}
    yield "device", ValueError, "meta", four(3, exp_avgs=t(3).to("meta")), {}
    yield "beta", ValueError, "betas must lie in", good, dict(beta1=1.0)
    yield "decay_mode", ValueError, "decay_mode is 0", good, dict(decay_mode=2)
    yield "step", ValueError, "step counts from 1", good, dict(step=0)
    yield "lr", TypeError, "lr_tensor must be a Float", good, dict(lr_tensor=t(1, dtype=F64))
    yield "lr size", ValueError, "lr_tensor must hold one", good, dict(lr_tensor=t(2))
    yield "step dtype", TypeError, "step_tensor must be a Int", good, dict(step_tensor=t(1))
    yield "found_inf", TypeError, "found_inf must be a Float", good, dict(found_inf=t(1, dtype=F16))
    yield "inv_scale", TypeError, "inv_scale must be a Float", good, dict(inv_scale=t(1, dtype=F64))
    yield "flag", TypeError, "noop_flag must be a Int", good, dict(noop_flag=t(1))


BAD = [case[0] for case in _bad_inputs("cpu")]


@pytest.mark.parametrize("what", BAD)
def test_bad_input_raises_before_anything_runs(variant, multi_tensor_adam, what):
    if not bindings.load().native:
        pytest.skip(f"the reference alone does not check its input: {bindings.load().reason}")
    case = next(case for case in _bad_inputs(variant.device) if case[0] == what)
    _, error, words, tensors, changes = case
    written = [t for column in tensors[1:] for t in column if t.device == variant.device]
    before = lists.clones(written)
    with pytest.raises(error, match=words):
        multi_tensor_adam(tensors, **(SCALARS | changes))
    lists.assert_same_bits(written, before)
    assert not [name for name in variant.kernels if "adam" in name] and not variant.references


def test_lists_are_counted(variant):
    module = bindings.load().module
    if module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    with pytest.raises(ValueError, match="4 or 5 tensor lists"):
        direct(state(variant.device)[:3], **SCALARS)


# ---- the dispatcher ----------------------------------------------------------------------------------------


def test_opcheck():
    bindings.load()
    op = torch.ops.apex.multi_tensor_adam.default
    for dtypes in (DTYPES[0], MASTERS[1]):
        tensors = state("cpu", dtypes, ((3,), (2, 5)))
        tensors += [[]] * (5 - len(tensors))
        torch.library.opcheck(op, (*tensors,), SCALARS)
        on_device = dict(
            lr_tensor=scalar(0.1, "cpu"),
            step_tensor=scalar(3, "cpu", torch.int32),
            advance_step=True,
            inv_scale=scalar(0.5, "cpu"),
            found_inf=scalar(0.0, "cpu"),
            noop_flag=flag("cpu"),
        )
        torch.library.opcheck(op, (*tensors,), SCALARS | on_device)
        torch.library.opcheck(op, (*tensors,), SCALARS | on_device | dict(unscale_grads=True))


def _step(grads, params, exp_avgs, exp_avg_sqs, lr, step):
    torch.ops.apex.multi_tensor_adam(
        [g * 2 for g in grads], params, exp_avgs, exp_avg_sqs, [],
        99.0, 0.9, 0.999, 1e-8, 0, DECOUPLED, True, 0.1, lr_tensor=lr, step_tensor=step, advance_step=True,
    )  # fmt: skip
    return [p + 1 for p in params], step + 1


def test_compiled_once_for_every_variant(variant, compiled):
    bindings.load()
    function, compilations = compiled(_step)
    tensors = state(variant.device, shapes=((3,), (2, 5), (0,)))
    values = expected(tensors, 2.0, step=3, lr=0.5)
    step = scalar(2, variant.device, torch.int32)
    results, after = function(*tensors, scalar(0.5, variant.device), step)
    check(tensors, values)
    lists.assert_near(results, [p + 1 for p in values[0]], smallest=1e-6)
    assert step.item() == 3 and after.item() == 4
    assert compilations() == 1
