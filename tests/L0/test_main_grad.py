"""Dense layers that add the gradients of weights to main_grad: values, hooks, what autograd is given."""

from __future__ import annotations

import copy

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from apex import amp, fused_dense
from apex.fused_dense import FusedDense, FusedDenseGeluDense

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAKE = [
    lambda **options: FusedDense(16, 24, **options),
    lambda **options: FusedDense(16, 24, bias=False, **options),
    lambda **options: FusedDenseGeluDense(16, 32, 24, **options),
    lambda **options: FusedDenseGeluDense(16, 32, 24, bias=False, **options),
]
MAKERS = pytest.mark.parametrize("make", MAKE, ids=["dense", "plain", "gelu", "gelu-plain"])


def pair(make, dtype=F32, device="cpu", main_dtype=F32, value=0.5):
    """(layers with main_grad, the same without); main gradients are views of one flat buffer."""
    torch.manual_seed(1)
    ours = make(main_grad=True, dtype=dtype, device=device)
    theirs = make(dtype=dtype, device=device)
    theirs.load_state_dict(ours.state_dict())
    matrices = [p for p in ours.parameters() if p.dim() == 2]
    flat = torch.full((sum(p.numel() + 1 for p in matrices),), value, dtype=main_dtype, device=device)
    at = 1
    for p in matrices:
        p.main_grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel() + 1
    return ours, theirs


def run(module, dtype=F32, device="cpu", seed=2, leading=(5,)):
    """The input's gradient, of a backward pass."""
    x = lists.random(dtype, device, ((*leading, 16),), seed=seed)[0].requires_grad_()
    y = module(x)
    y.backward(lists.random(y.dtype, device, (y.shape,), seed=seed + 1)[0])
    return x.grad


def near(found, wanted, units=8, dtype=None):
    """Within some roundings to the coarsest of these dtypes."""
    unit = units * max(lists.ROUNDING[dtype or found.dtype], lists.ROUNDING[found.dtype])
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted.double(), rtol=unit, atol=unit * scale)


def check(ours, theirs, before=0.5, units=8, dtype=None):
    """What is in main_grad beside what was there before, in .grad of a layer without it."""
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        if p.dim() == 2:
            near(p.main_grad, q.grad.double() + before, units, dtype or q.grad.dtype)
        else:
            near(p.grad, q.grad, units, dtype)


@pytest.mark.parametrize("device", DEVICES)
@MAKERS
@pytest.mark.parametrize(
    "dtype, main_dtype", [(F32, F32), (F16, F32), (BF16, F32), (BF16, BF16), (F64, F64)], ids=str
)
def test_values(make, dtype, main_dtype, device):
    """As the layers without; the weights' .grad stays None. Two passes add up; any leading dimensions."""
    ours, theirs = pair(make, dtype, device, main_dtype)
    for leading, seed in (((5,), 2), ((2, 3), 4), ((), 6)):
        near(*(run(m, dtype, device, seed, leading) for m in (ours, theirs)), units=32)
    check(ours, theirs, units=64)
    assert all(p.grad is None for p in ours.parameters() if p.dim() == 2)


@MAKERS
def test_no_rows(make):
    ours, _ = pair(make)
    assert run(ours, leading=(0,)).shape == (0, 16)
    assert all((p.main_grad == 0.5).all() for p in ours.parameters() if p.dim() == 2)


@MAKERS
@pytest.mark.parametrize("zero_out", [False, True], ids=["empty", "zeros"])
def test_hooks_of_megatron(make, zero_out):
    """A weight that says grad_added_to_main_grad is told so, and its hooks run: on its accumulator and behind it."""
    ours, theirs = pair(make)
    called = []
    kept = []
    for p in [p for p in ours.parameters() if p.dim() == 2]:
        p.grad_added_to_main_grad = False
        if zero_out:
            p.zero_out_wgrad = True

        def behind(*_, p=p):
            assert p.grad_added_to_main_grad
            if zero_out:
                assert not p.grad.any()
            called.append(p)
            p.grad = None

        kept.append(p.expand_as(p).grad_fn.next_functions[0][0])
        kept[-1].register_hook(behind)
        p.register_post_accumulate_grad_hook(lambda p: called.append(p))
    run(ours), run(theirs)
    check(ours, theirs)
    assert len(called) == 2 * sum(p.dim() == 2 for p in ours.parameters())


@MAKERS
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpoint(make, reentrant):
    """What is computed anew in the backward is added once."""
    ours, theirs = pair(make)
    run(lambda x: checkpoint(ours, x, use_reentrant=reentrant))
    run(theirs)
    check(ours, theirs)


@MAKERS
def test_frozen_and_without_gradients(make):
    """No main_grad is wanted where no gradient is."""
    ours, theirs = pair(make)
    first, *rest = [p for p in ours.parameters() if p.dim() == 2]
    first.requires_grad_(False)
    run(ours), run(theirs)
    assert (first.main_grad == 0.5).all()
    for p, q in zip(rest, [q for q in theirs.parameters() if q.dim() == 2][1:], strict=True):
        near(p.main_grad, q.grad + 0.5)
    del first.main_grad
    run(ours)
    for p in rest:
        p.requires_grad_(False)
    x = torch.ones(2, 16, dtype=F32, device="cpu", requires_grad=True)
    near(torch.autograd.grad(ours(x).sum(), x)[0], torch.autograd.grad(theirs(x).sum(), x)[0])
    with torch.no_grad():
        near(ours(x), theirs(x))


@MAKERS
def test_one_layer_twice(make):
    """Tied weights: both uses add."""
    torch.manual_seed(1)
    ours, theirs = FusedDense(16, 16, main_grad=True), FusedDense(16, 16)
    theirs.load_state_dict(ours.state_dict())
    ours.weight.main_grad = torch.full_like(ours.weight, 0.5)
    run(lambda x: ours(ours(x))), run(lambda x: theirs(theirs(x)))
    check(ours, theirs)


@MAKERS
def test_refused(make):
    """A weight without main_grad in the forward; one that does not fit in the backward; second derivatives."""
    module = make(main_grad=True)
    x = torch.ones(2, 16, dtype=F32, device="cpu", requires_grad=True)
    with pytest.raises(ValueError, match="weight.main_grad = torch.zeros_like"):
        module(x)
    ours, theirs = pair(make)
    (weight, *_) = [p for p in ours.parameters() if p.dim() == 2]
    weight.main_grad = torch.zeros(3, 3, dtype=F32, device="cpu")
    with pytest.raises(ValueError, match=r"main_grad has shape \[3, 3\]"):
        run(ours)
    ours, theirs = pair(make)  # after a failure the next pass is whole
    run(ours), run(theirs)
    check(ours, theirs)
    with pytest.raises(RuntimeError, match="create_graph=True would lose gradients"):
        torch.autograd.grad(ours(x).sum(), x, create_graph=True)


@MAKERS
def test_autocast(make):
    """Products are half, main gradients float32, the input's gradient of the input's dtype."""
    ours, theirs = pair(make)
    with torch.autocast("cpu", BF16):
        found, wanted = run(ours), run(theirs)
        assert ours(torch.ones(2, 16, dtype=F32, device="cpu")).dtype == BF16
    assert found.dtype == F32
    near(found, wanted, dtype=BF16)
    check(ours, theirs, dtype=BF16)


def test_casts_of_amp_are_not_kept_without_their_history():
    """O1 keeps the half copy of a weight for the next layer that uses it: that one's gradient arrives."""
    model = FusedDense(16, 16, main_grad=True)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0
    )
    try:
        model.weight.main_grad = torch.zeros_like(model.weight)
        x = torch.randn(4, 16, dtype=F32, device="cpu")
        output = model(x)
        assert output.dtype == F16
        tied = fused_dense.dense_no_bias_function(output, model.weight)
        with amp.scale_loss(tied.float().sum(), optimizer) as loss:
            loss.backward()
        assert model.weight.grad.any() and model.weight.main_grad.any()
    finally:
        amp._amp_state.handle._deactivate()


@pytest.mark.parametrize("device", DEVICES)
def test_function(device):
    x, g = lists.random(BF16, device, ((2, 3, 8), (2, 3, 4)), seed=1)
    main = torch.ones(4, 8, dtype=F32, device=device)
    assert fused_dense.accumulate_weight_gradient(x, g, main) is None
    wide = 1 + g.double().reshape(6, 4).t() @ x.double().reshape(6, 8)
    near(main, wide)
    with pytest.raises(TypeError, match="main_grad is"):
        fused_dense.accumulate_weight_gradient(x, g, main.half())


@MAKERS
def test_modules_are_copied_and_pickled(make):
    ours, _ = pair(make)
    assert copy.deepcopy(ours).main_grad is True
    assert make().main_grad is False and "main_grad" not in ours.state_dict()
    assert repr(ours).endswith(", main_grad=True)") and "main_grad" not in repr(make())


@MAKERS
def test_compiled(make):
    """torch.compile trains them, with the values of eager."""
    ours, theirs = pair(make)
    graph = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for seed in (2, 4):
        run(graph, seed=seed), run(theirs, seed=seed)
    check(ours, theirs)


@MAKERS
def test_compiled_autograd(make):
    """A backward that is captured as a graph adds to main_grad, too."""
    ours, theirs = pair(make)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        run(ours)
    run(theirs)
    check(ours, theirs)


@MAKERS
def test_traced(make):
    """torch.jit.trace sees the layer without main_grad: a traced module can be saved."""
    ours, theirs = pair(make)
    x = torch.ones(2, 16, dtype=F32, device="cpu")
    graph = torch.jit.trace(ours, (x,))
    assert "PythonOp" not in str(graph.inlined_graph) and "^" not in str(graph.inlined_graph)
    near(graph(x), theirs(x))


@MAKERS
def test_backward_under_an_autocast(make):
    """That of the backward alone: no product of it is rounded to another dtype."""
    found = []
    for autocast in (False, True):
        layer, _ = pair(make)
        x = torch.ones(5, 16, dtype=F32, device="cpu").mul_(0.3).requires_grad_()
        y = layer(x)
        with torch.autocast("cpu", BF16, enabled=autocast):
            y.square().sum().backward()
        found.append([x.grad, *(p.grad if p.grad is not None else p.main_grad for p in layer.parameters())])
    lists.assert_same_bits(*found)


@MAKERS
def test_lazy_negatives(make):
    """Inputs and gradients that torch has not negated yet, as those of imaginary parts of conjugates."""
    ours, theirs = pair(make)
    lazily = lambda t: torch.complex(t, -t).conj().imag  # noqa: E731
    for layer in (ours, theirs):
        torch.manual_seed(3)
        x, g = (torch.randn(5, n, dtype=F32, device="cpu") for n in (16, 24))
        assert lazily(g).is_neg()
        layer(lazily(x)).backward(lazily(g))
    check(ours, theirs)
