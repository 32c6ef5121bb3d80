"""The gradient of every op's gradient: right, or refused in words; never silently without a part.

The slope of the first gradient along a direction, by differences in float64, is what the second derivative must come
to: of a loss whose own gradient has a history, and of a linear one, whose gradient has none. What an op keeps for its
backward without history shows in the second alone.
"""

from __future__ import annotations

import re

import pytest
import torch
from op_calls import call_of

from apex import _functional, _loader
from apex._loader import registry
from apex.contrib.fmha.fmha import FMHAFun
from apex.contrib.groupbn.batch_norm import bn_addrelu_NHWC_impl, bn_NHWC_impl
from apex.contrib.multihead_attn import _core, fast_mask_softmax_dropout_func
from apex.parallel import optimized_sync_batchnorm_kernel, sync_batchnorm_kernel
from apex.parallel._group_batch_norm import GroupBatchNormFunction, layer

F64 = torch.float64
RECORDED = [name for name, op in registry.schemas().items() if op.backward]
OTHERS = {  # what a call may have instead, besides what call_of gives
    "norm": [dict(memory_efficient=True), dict(weight=None, bias=None)],
    "scaled_masked_softmax_forward": [dict(mask=None, causal=True)],
    "masked_softmax_dropout_forward": [
        dict(dropout=0.0, seed=None),
        dict(keep_mask=False),
        dict(dropout=1.0),
    ],
    "bias_activation_forward": [dict(activation="gelu", gated=False), dict(bias=None)],
    "dense_forward": [dict(activation=a) for a in ("none", "relu", "sigmoid")] + [dict(bias=None)],
    "dense_gelu_dense_forward": [dict(bias1=None, bias2=None)],
    "conv_bias_relu_forward": [dict(scale=None, mask=None), dict(relu=False, mask=None, residual=None)],
    "group_norm_forward": [dict(silu=False)],
    "xentropy_forward": [dict(padding_idx=1)],
    "transducer_joint_forward": [dict(dropout=0.0, seed=None), dict(relu=False)],
}
CASES = [
    pytest.param(op, other, id=f"{op.removesuffix('_forward')}-{'-'.join(map(str, other.items())) or 'whole'}")
    for op in RECORDED
    for other in [{}, *OTHERS.get(op, OTHERS["norm"] if op.endswith("_norm_forward") and "group" not in op else [])]
]  # fmt: skip
REFUSALS = r"double backward|gradient of its gradient|once_differentiable"


def wide(values):
    """Floating-point tensors as float64: what is read of numbers, not of bits."""
    as_wide = lambda t: t.to(F64) if isinstance(t, torch.Tensor) and t.is_floating_point() else t  # noqa: E731
    return {name: as_wide(value) for name, value in values.items()}


def normal(like, seed):
    return torch.randn(
        like.shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=F64, device="cpu"
    ).to(like)


def linear(results):
    return sum((y * normal(y, 10 + i)).sum() for i, y in enumerate(results))


def squares(results):
    return sum((y.square() * normal(y, 10 + i)).sum() for i, y in enumerate(results))


def first_gradient(function, inputs, loss, **options):
    """The gradients of the loss, multiplied by fixed numbers and added up."""
    found = torch.autograd.grad(loss(function(*inputs)), inputs, allow_unused=True, **options)
    return sum((g * normal(g, 20 + i)).sum() for i, g in enumerate(found) if g is not None)


def check(function, inputs, loss, step=1e-5):
    """Raises AssertionError unless the second derivative is that of the first gradient, or is refused.

    function: float64 tensors -> list of results that have a history.
    """
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    directions = [normal(t, 30 + i) for i, t in enumerate(inputs)]
    ends = []
    for sign in (1, -1):
        moved = [
            (t.detach() + sign * step * d).requires_grad_() for t, d in zip(inputs, directions, strict=True)
        ]
        ends.append(float(first_gradient(function, moved, loss)))
    wanted = (ends[0] - ends[1]) / (2 * step)
    slope = first_gradient(function, inputs, loss, create_graph=True)
    if not slope.requires_grad:
        second = [None] * len(inputs)
    else:
        try:
            second = torch.autograd.grad(slope, inputs, allow_unused=True)
        except (NotImplementedError, RuntimeError) as error:
            assert re.search(REFUSALS, str(error)), error
            return
    found = sum(float((s * d).sum()) for s, d in zip(second, directions, strict=True) if s is not None)
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5 * (1 + abs(ends[0])))


def of_tensors(call, arguments, names):
    """(call as a function of the arguments of these names, those arguments)"""
    names = [name for name in names if arguments.get(name) is not None]

    def function(*tensors):
        found = call(**arguments | dict(zip(names, tensors, strict=True)))
        found = [found] if isinstance(found, torch.Tensor) else found
        return [y for y in found if isinstance(y, torch.Tensor) and y.requires_grad and y.numel()]

    return function, [arguments[name] for name in names]


@pytest.mark.parametrize("loss", (linear, squares))
@pytest.mark.parametrize(("op", "other"), CASES)
def test_ops(variant, op, other, loss):
    _loader.load()
    schema = registry.schemas()[op]
    other = {name: value for name, value in other.items() if schema.argument(name) is not None}
    arguments = wide(call_of(op, variant.device) | other)
    variant.mixed = "dense" in op  # torch's products: on a CPU the reference is all there is
    function, inputs = of_tensors(getattr(torch.ops.apex, op), arguments, schema.differentiable)
    check(function, inputs, loss)
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    for i in range(len(function(*leaves))):  # each result alone: the others have no gradient
        check(lambda *t, i=i: function(*t)[i : i + 1], inputs, loss)
    entry = _functional.entry(op.removesuffix("_forward"))
    if entry is not None and schema.entry != ():
        check(of_tensors(entry, arguments, schema.differentiable)[0], inputs, loss)


# ---- layers whose nodes are written in Python ------------------------------------------------------------------------


def _statistics(channels=8):
    zeros = torch.zeros(channels, dtype=F64, device="cpu")
    return zeros, torch.ones_like(zeros)


def _sync(x, w, b, module=optimized_sync_batchnorm_kernel):
    if module is optimized_sync_batchnorm_kernel:
        return module.SyncBatchnormFunction.apply(
            x, None, w, b, *_statistics(), 1e-5, True, 0.1, None, False, True
        )
    return module.SyncBatchnormFunction.apply(x, w, b, *_statistics(), 1e-5, None, 1)


_RANKS = (1, None, None, None, None, None, 2, 1, 2, 1, False)  # bn_group, memory of other ranks, launches


def _bnp(x, w, b):
    batch = (*_statistics(), *_statistics(), None, 0.1, 1e-3, True, True, True)
    return bn_NHWC_impl.apply(x, w, b, *batch, *_RANKS)


def _bnp_add(x, w, b, z):
    batch = (*_statistics(), *_statistics(), 1, None, 0.1, 1e-3, True, True)
    return bn_addrelu_NHWC_impl.apply(x, z, w, b, *batch, *_RANKS)


def _group(x, w, b):
    return GroupBatchNormFunction.apply(x, None, w, b, *_statistics(), 0.1, 1e-5, True, True, False)[0]


def _fmha(x):
    starts = torch.tensor([0, 2, 6], dtype=torch.int32, device="cpu")
    return FMHAFun.apply(x.reshape(6, 3, 2, 12), starts, 0.0, 4, True, True)


def _attention(x, dropout=0.5):
    q = x.flatten(1).reshape(3, 3, 48)
    return _core.attention(q, None, 2, None, dropout)


def _alone(x, additive=False):
    return fast_mask_softmax_dropout_func(True, 3, x.reshape(6, 8, 9), None, False, 0.5)


PER_CHANNEL = [(8,), (8,)]
NODES = {
    "sync": (_sync, PER_CHANNEL),
    "sync, by given statistics": (lambda *t: _sync(*t, module=sync_batchnorm_kernel), PER_CHANNEL),
    "groupbn": (_bnp, PER_CHANNEL),
    "groupbn, added": (_bnp_add, [*PER_CHANNEL, (2, 8, 3, 9)]),
    "group": (_group, PER_CHANNEL),
    "group, layer": (
        lambda *t: layer(t[0], None, *t[1:], *_statistics(), 0.1, 1e-5, True, True, False)[0],
        PER_CHANNEL,
    ),
    "fmha": (_fmha, []),
    "attention": (_attention, []),
    "attention without dropout": (lambda x: _attention(x, 0.0), []),
    "softmax alone": (_alone, []),
}


@pytest.mark.parametrize("alone", (False, True))
@pytest.mark.parametrize("given", ("whole", "every second"))
@pytest.mark.parametrize("loss", (linear, squares))
@pytest.mark.parametrize("name", NODES)
def test_nodes_in_python(name, loss, given, alone):
    """Of tensors that a node makes contiguous for itself, too; and where nothing else has a history."""
    function, others = NODES[name]
    generator = torch.Generator("cpu").manual_seed(4)
    leaves = [torch.randn(s, generator=generator, dtype=F64, device="cpu") for s in ((2, 8, 3, 18), *others)]

    def run(x, *rest):
        torch.manual_seed(1)
        x = x[..., ::2] if given == "every second" else x[..., :9].clone()
        return [function(x, *rest)]

    if alone:
        check(lambda x: run(x, *leaves[1:]), leaves[:1], loss)
    else:
        check(run, leaves, loss)
