"""The transducer loss against float64, on everything that can serve it, and as users call it."""

from __future__ import annotations

import functools
import itertools
import math

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64

from apex._legacy import transducer_loss_cuda
from apex.contrib.transducer import TransducerLoss, _transducer_ref
from apex.contrib.transducer.transducer import TransducerLossFunc
from tests.L0.signatures import signature

DTYPES = [F32, F16, BF16, F64]
BLANK = 2
# (batch, frames, labels, classes): one node; no labels; odd rows; vectors; more labels than lanes; a block a row.
CASES = [(1, 1, 0, 3), (2, 4, 0, 5), (3, 6, 3, 13), (2, 3, 2, 64), (2, 3, 70, 8), (2, 2, 1, 5000)]


@functools.cache
def lengths_of(case):
    batch, frames, labels, classes = case
    index = torch.arange(batch, device="cpu", dtype=torch.int64)
    generator = torch.Generator().manual_seed(classes)
    label = torch.randint(0, classes, (batch, labels), generator=generator, device="cpu", dtype=torch.int64)
    return label, frames - index % frames, labels - (index + 1) % batch % (labels + 1)


@functools.cache
def exact(case, dtype, scale):
    """(loss, gradient of the sum of 1, 2, .. of it, alpha, beta) in float64, by autograd through the lattice."""
    x = lists.random(dtype, "cpu", ((case[0], case[1], case[2] + 1, case[3]),), scale=scale)[0].double()
    x.requires_grad_()
    label, f_len, y_len = lengths_of(case)
    g = torch.arange(1.0, case[0] + 1, dtype=F64, device="cpu")
    alpha, beta, gradient, loss = _transducer_ref.transducer_loss_reference(x, label, f_len, y_len, BLANK, g)
    return loss, gradient, alpha, beta


class Loss:
    """A case: x, labels and lengths, which differ from item to item; where no item is x has large values."""

    def __init__(self, case, dtype, device, packed=False, rest=0, wide=False, scale=2.0):
        self.case, self.dtype, self.packed, self.scale = case, dtype, packed, scale
        batch, frames, labels, classes = case
        kind = torch.int64 if wide else torch.int32
        label, f_len, y_len = lengths_of(case)
        self.inside = (torch.arange(frames, device="cpu", dtype=torch.int64) < f_len[:, None])[:, :, None] & (
            torch.arange(labels + 1, device="cpu", dtype=torch.int64) <= y_len[:, None]
        )[:, None]
        whole = lists.random(dtype, device, ((batch, frames, labels + 1, classes),), scale=scale)[0]
        inside = self.inside.to(device)
        if packed:
            x = torch.full((int(inside.sum()) + rest, classes), 1e4, dtype=dtype, device=device)
            x[: int(inside.sum())] = whole[inside]
        else:
            x = whole.masked_fill(~inside[..., None], 1e4)
        self.x = x.requires_grad_()
        self.lengths = [t.to(kind).to(device) for t in (label, f_len, y_len)]
        offset = torch.cumsum(f_len * (y_len + 1), 0).to(device)
        self.packing = [offset, frames] if packed else [None, 0]

    @property
    def arguments(self):
        return [self.x, *self.lengths, BLANK, *self.packing]

    def unpack(self, tensor):
        """[batch, frames, labels + 1, ...] of x's rows, zeros where no item is."""
        tensor = tensor.detach().cpu()
        whole = torch.zeros((*self.inside.shape, *tensor.shape[-1:]), dtype=tensor.dtype, device="cpu")
        whole[self.inside] = tensor[: int(self.inside.sum())] if self.packed else tensor[self.inside]
        return whole

    def check(self, half_to_float=False):
        """Forward and backward against float64; returns (loss, gradient)."""
        loss, alpha, beta, normalizers = torch.ops.apex.transducer_loss_forward(
            *self.arguments, False, half_to_float
        )
        work = lists.ROUNDING[lists.math_dtype(self.dtype)]
        assert loss.dtype == (lists.math_dtype(self.dtype) if half_to_float else self.dtype)
        expected, wanted, of_alpha, of_beta = exact(self.case, self.dtype, self.scale)
        nodes = self.case[1] + self.case[2] + 8
        size = 8 + max(expected.abs().max(), of_alpha.abs().max()).item()
        allowed = dict(rtol=0, atol=nodes * size * work)
        torch.testing.assert_close(alpha.cpu().double().sum(-1), of_alpha, **allowed)
        torch.testing.assert_close(beta.cpu().double().sum(-1), of_beta, **allowed)
        own = lists.ROUNDING[loss.dtype]
        torch.testing.assert_close(
            loss.detach().cpu().double(), expected, rtol=1.01 * own, atol=nodes * size * work
        )
        assert normalizers.shape == (*self.x.shape[:-1], 2)
        g = torch.arange(1, self.case[0] + 1, dtype=loss.dtype, device=loss.device)
        (found,) = torch.autograd.grad(loss, self.x, g)
        assert found.dtype == self.dtype and found.is_contiguous()
        error = (self.unpack(found).double() - wanted).abs()
        allowed = 1.01 * lists.ROUNDING[found.dtype] * wanted.abs() + 4 * nodes * size * work * len(g)
        assert (error <= allowed + lists.SMALLEST[found.dtype]).all(), f"largest error {error.max()}"
        rest = found[int(self.inside.sum()) :] if self.packed else found.cpu()[~self.inside]
        assert rest.eq(0).all()
        return loss.detach(), found


def test_every_way_is_counted(variant):
    """The sum over all ways, written out: T - 1 + U steps, of which U emit; then the last blank."""
    case = (2, 3, 2, 5)
    problem = Loss(case, F64, variant.device)
    loss, _ = problem.check()
    label, f_len, y_len = lengths_of(case)
    p = torch.softmax(problem.x.detach().cpu(), -1)
    for b in range(2):
        last_t, last_u, total = int(f_len[b]) - 1, int(y_len[b]), 0.0
        for emits in itertools.combinations(range(last_t + last_u), last_u):
            t = u = 0
            way = 1.0
            for step in range(last_t + last_u):
                if step in emits:
                    way, u = way * p[b, t, u, label[b, u]], u + 1
                else:
                    way, t = way * p[b, t, u, BLANK], t + 1
            total += way * p[b, t, u, BLANK]
        assert math.isclose(loss[b].item(), -math.log(total), rel_tol=1e-12)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(variant, dtype, packed):
    for case in CASES:
        first = Loss(case, dtype, variant.device, packed).check()
        again = Loss(case, dtype, variant.device, packed, rest=2 * packed, wide=True).check(dtype == F32)
        rows = len(first[1])
        lists.assert_same_bits(first, (again[0], again[1][:rows]))
    Loss(CASES[2], dtype, variant.device, packed).check(True)
    Loss(CASES[2], dtype, variant.device, packed, scale=30.0).check()


def test_more_labels_than_threads(variant):
    """The lattice's block goes around; where that is more than its memory holds, it reads again what it wrote."""
    for labels in (700, 6200) if variant.simt else (700,):
        case, device = (1, 2, labels, 4), variant.device
        x = lists.random(F32, device, ((1, 2, labels + 1, 4),))[0]
        label = torch.randint(
            0, 4, (1, labels), generator=torch.Generator().manual_seed(1), device="cpu", dtype=torch.int64
        )
        arguments = [
            x,
            label.to(device),
            torch.tensor([2], device=device, dtype=torch.int64),
            torch.tensor([labels], dtype=torch.int64, device=device),
        ]
        loss, alpha, _, _ = torch.ops.apex.transducer_loss_forward(*arguments, BLANK)
        p = torch.log_softmax(x[0].double().cpu(), -1)
        emit = p[:, :-1].gather(-1, label[0].expand(2, -1)[..., None])[..., 0]
        first = torch.nn.functional.pad(emit[0].cumsum(0), (1, 0))  # all ways to (0, u)
        after = emit[1].flip(0).cumsum(0).flip(0)
        ways = first + p[0, :, BLANK] + torch.nn.functional.pad(after, (0, 1)) + p[1, -1, BLANK]
        expected = -ways.logsumexp(0)
        assert math.isclose(loss.item(), expected.item(), rel_tol=1e-5), case
        assert math.isclose(alpha[0, 0, -1].sum().item(), first[-1].item(), rel_tol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_layouts(variant, dtype):
    """Strided and misaligned x, one gradient for all items, lengths of two types."""
    problem = Loss((3, 6, 3, 24), dtype, variant.device)
    loss, gradient = problem.check()
    x = problem.x.detach()
    for change in (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
        lambda t: lists.misaligned([t])[0],
    ):
        problem.x = change(x).requires_grad_()
        found = problem.check()
        torch.testing.assert_close(found[0], loss, rtol=1e-6 if dtype == F32 else 1e-2, atol=0)
        torch.testing.assert_close(found[1], gradient, rtol=1e-4 if dtype == F32 else 1e-2, atol=1e-6)
    problem.lengths[1] = problem.lengths[1].long()
    losses = torch.ops.apex.transducer_loss_forward(*problem.arguments)[0]
    of_sum = torch.autograd.grad(losses.sum(), problem.x, retain_graph=True)
    lists.assert_same_bits(of_sum, torch.autograd.grad(losses, problem.x, torch.ones_like(losses)))


def test_gradients_of_any_sign(variant):
    """Public apex takes the logarithm of the losses' gradient: negative ones are nan there."""
    problem = Loss((3, 6, 3, 13), F32, variant.device)
    losses = torch.ops.apex.transducer_loss_forward(*problem.arguments)[0]
    g = torch.tensor([-1.0, 0.0, 2.0], device=variant.device, dtype=F32)
    (found,) = torch.autograd.grad(losses, problem.x, g, retain_graph=True)
    (ones,) = torch.autograd.grad(losses, problem.x, torch.ones_like(g))
    torch.testing.assert_close(found, ones * g[:, None, None, None])


def test_labels_that_are_the_blank(variant):
    """Both edges then take from one class."""
    case = (2, 3, 2, 5)
    problem = Loss(case, F64, variant.device)
    problem.lengths[0][:] = BLANK
    x = problem.x.detach().cpu().requires_grad_()
    lengths = [t.cpu() for t in problem.lengths]
    g = torch.ones(2, dtype=F64, device="cpu")
    _, _, wanted, expected = _transducer_ref.transducer_loss_reference(x, *lengths, BLANK, g)
    losses = torch.ops.apex.transducer_loss_forward(*problem.arguments)[0]
    (found,) = torch.autograd.grad(losses.sum(), problem.x)
    torch.testing.assert_close(losses.detach().cpu(), expected)
    torch.testing.assert_close(problem.unpack(found), wanted)


def test_impossible_classes(variant):
    """A class of -inf has probability 0, and gradient 0; labels that need it have an infinite loss."""
    case = (2, 3, 2, 5)
    problem = Loss(case, F32, variant.device)
    label = problem.lengths[0]
    label[0], label[1] = 0, 1
    with torch.no_grad():
        problem.x[..., 4] = float("-inf")
        problem.x[1, ..., 1] = float("-inf")
    losses = torch.ops.apex.transducer_loss_forward(*problem.arguments)[0]
    assert losses[0].isfinite() and losses[1] == float("inf")
    (found,) = torch.autograd.grad(losses[0], problem.x)
    assert found[0].isfinite().all() and found[0, ..., 4].eq(0).all()


def test_same_bits(variant):
    for case in ((3, 6, 3, 13), (2, 3, 70, 8)):
        problem = Loss(case, BF16, variant.device)
        lists.assert_same_bits(problem.check(), problem.check())


def test_items_that_do_not_fit(variant):
    """Refused on a CPU; elsewhere nan, and only theirs. An item without frames has no probability."""
    for change, error, text in (
        (dict(f_len=0), ValueError, r"f_len\[0\] is 0, outside \[1, 6\]: an item has at least one frame"),
        (dict(f_len=7), ValueError, r"f_len\[0\] is 7"),
        (dict(y_len=-1), ValueError, r"y_len\[0\] is -1"),
        (dict(y_len=4), ValueError, r"y_len\[0\] is 4, but label has 3 columns"),
        (dict(label=13), IndexError, r"label\[0, 0\] is 13, outside \[0, 13\)"),
        (dict(label=-1), IndexError, r"label\[0, 0\] is -1"),
        (dict(offset=5), ValueError, r"batch_offset\[0\] is 5"),
    ):
        for packed in {"offset" in change, True}:
            problem = Loss((3, 6, 3, 13), F32, variant.device, packed)
            for i, name in enumerate(("label", "f_len", "y_len")):
                if name in change:
                    problem.lengths[i][0] = change[name]
            if "offset" in change:
                problem.packing[0][0] = change["offset"]
            if variant.device.type == "cpu":
                with pytest.raises(error, match=text):
                    torch.ops.apex.transducer_loss_forward(*problem.arguments)
                continue
            losses = torch.ops.apex.transducer_loss_forward(*problem.arguments)[0]
            (found,) = torch.autograd.grad(losses.nansum(), problem.x)
            assert losses[0].isnan() and losses[2].isfinite() and found.isnan().any()
            if not packed:
                assert found[1:].isfinite().all()
    problem = Loss((3, 6, 3, 13), F32, variant.device, True)
    problem.x = problem.x.detach()[:-1]
    if variant.device.type == "cpu":
        with pytest.raises(ValueError, match="less than the"):
            torch.ops.apex.transducer_loss_forward(*problem.arguments)


def test_no_items(variant):
    for shape, packing in (
        ((0, 4, 3, 5), [None, 0]),
        ((2, 5), [torch.zeros(0, dtype=torch.int64, device="cpu"), 4]),
    ):
        x = torch.randn(shape, device=variant.device, requires_grad=True, dtype=F32)
        label = torch.zeros((0, 2), dtype=torch.int32, device=variant.device)
        packing = [t.to(variant.device) if isinstance(t, torch.Tensor) else t for t in packing]
        loss = torch.ops.apex.transducer_loss_forward(x, label, label[:, 0], label[:, 0], 0, *packing)[0]
        assert loss.shape == (0,)
        assert torch.autograd.grad(loss.sum(), x)[0].eq(0).all()


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda x, y, t, u, b: (x.int(), y, t, u, b), TypeError),
        (lambda x, y, t, u, b: (x, y.float(), t, u, b), TypeError),
        (lambda x, y, t, u, b: (x, y, t.float(), u, b), TypeError),
        (lambda x, y, t, u, b: (x[0], y, t, u, b), ValueError),
        (lambda x, y, t, u, b: (x[:, :, 1:], y, t, u, b), ValueError),
        (lambda x, y, t, u, b: (x, y[0], t, u, b), ValueError),
        (lambda x, y, t, u, b: (x, y, t[:1], u, b), ValueError),
        (lambda x, y, t, u, b: (x, y, t, u[:, None], b), ValueError),
        (lambda x, y, t, u, b: (x, y, t, u, 13), ValueError),
        (lambda x, y, t, u, b: (x, y, t, u, -1), ValueError),
        (lambda x, y, t, u, b: (x, y, t, u, b, t.long(), 6), ValueError),
    ],
)
def test_bad_arguments(variant, change, error):
    problem = Loss((3, 6, 3, 13), F32, variant.device)
    with pytest.raises(error, match="transducer_loss"):
        torch.ops.apex.transducer_loss_forward(*change(problem.x.detach(), *problem.lengths, BLANK))


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_module(variant, packed, fused):
    """TransducerLoss with and without the softmax inside; alpha and beta in an empty debug_list."""
    for dtype, tolerance in ((F32, 1e-5), (F16, 2e-3)):
        problem = Loss((3, 6, 3, 13), dtype, variant.device, packed)
        module, debug = TransducerLoss(fuse_softmax_backward=fused, packed_input=packed), []
        losses = module(problem.x, *problem.lengths, BLANK, *problem.packing, debug)
        losses.backward(torch.arange(1, 4, dtype=dtype, device=variant.device))
        expected, wanted, alpha, beta = exact(problem.case, dtype, problem.scale)
        found = losses, problem.unpack(problem.x.grad), *debug
        for a, b in zip(found, (expected, wanted, alpha, beta), strict=True):
            torch.testing.assert_close(a.detach().cpu().double(), b, rtol=tolerance, atol=30 * tolerance)
        module(problem.x, *problem.lengths, BLANK, *problem.packing, debug)
        assert len(debug) == 2


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_transducer_loss_cuda(variant, dtype, packed):
    """The legacy module's functions: of logarithms, with both of its gradients."""
    problem = Loss((3, 6, 3, 13), dtype, variant.device, packed)
    label, f_len, y_len = problem.lengths
    offset, frames = problem.packing
    offset, frames = (torch.empty(0, dtype=F32, device="cpu"), 6) if offset is None else (offset, frames)
    logits = problem.x.detach().clone().requires_grad_()
    log_p = torch.log_softmax(logits, -1)
    alpha, beta, loss = transducer_loss_cuda.forward(
        log_p, label, f_len, y_len, offset, frames, BLANK, 1, packed
    )
    assert not loss.requires_grad
    expected, wanted, of_alpha, of_beta = exact(problem.case, dtype, problem.scale)
    near = dict(rtol=1e-5, atol=1e-4)
    for a, b in ((loss, expected), (alpha, of_alpha), (beta, of_beta)):
        torch.testing.assert_close(a.cpu().double(), b, **near)
    g = torch.arange(1, 4, dtype=dtype, device=variant.device)
    rest = alpha, beta, f_len, y_len, label, offset, frames, BLANK, 1
    fused = transducer_loss_cuda.backward(log_p, g, *rest, True, packed)
    torch.testing.assert_close(problem.unpack(fused).double(), wanted, **near)
    apart = transducer_loss_cuda.backward(log_p, g, *rest, False, packed)
    assert (apart != 0).sum(-1).max() <= 2
    log_p.backward(apart)
    torch.testing.assert_close(problem.unpack(logits.grad).double(), wanted, **near)


def test_public_names():
    assert signature(TransducerLoss) == "(fuse_softmax_backward=True, opt=1, packed_input=False)"
    assert signature(TransducerLoss.forward) == (
        "(self, x, label, f_len, y_len, blank_idx, batch_offset=None, max_f_len=None, debug_list=None)"
    )
    assert signature(TransducerLossFunc.forward) == (
        "(ctx, x, label, f_len, y_len, batch_offset, max_f_len, blank_idx, fuse_softmax_backward, debug_list, opt, "
        "packed_input)"
    )
    with pytest.raises(ValueError, match="opt is 0 or 1"):
        TransducerLoss(opt=2)
    problem = Loss(CASES[2], F32, "cpu")
    with pytest.raises(ValueError, match="needs batch_offset and max_f_len"):
        TransducerLoss(packed_input=True)(problem.x, *problem.lengths, BLANK)


def test_around_the_op():
    """opcheck, autocast, torch.func, and what is refused: forward mode and the gradient of the gradient."""
    op = torch.ops.apex.transducer_loss_forward
    for packed in (False, True):
        for log_probs in (False, True):
            problem = Loss((2, 4, 2, 7), F32, "cpu", packed, rest=packed)
            torch.library.opcheck(op.default, (*problem.arguments, log_probs))
            loss, alpha, beta, normalizers = op(*problem.arguments, log_probs)
            kept = None if log_probs else normalizers
            arguments = (
                torch.ones(2, dtype=F32, device="cpu"),
                problem.x.detach(),
                *problem.lengths,
                alpha,
                beta,
                kept,
                BLANK,
            )
            arguments += (problem.packing[0], not log_probs)
            torch.library.opcheck(torch.ops.apex.transducer_loss_backward.default, arguments)
    problem = Loss((2, 4, 2, 7), F32, "cpu")
    rest = problem.arguments[1:]
    with torch.autocast("cpu", BF16):
        assert op(problem.x.bfloat16(), *rest)[0].dtype == F32
    found = torch.func.grad(lambda x: op(x, *rest)[0].square().sum())(problem.x.detach())
    losses = op(problem.x, *rest)[0]
    torch.testing.assert_close(found, torch.autograd.grad(losses.square().sum(), problem.x)[0])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: op(x, *rest)[0], (problem.x.detach(),), (problem.x.detach(),))
    (first,) = torch.autograd.grad(op(problem.x, *rest)[0].sum(), problem.x, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        first.sum().backward()
    wide = Loss((2, 3, 2, 4), F64, "cpu")
    assert torch.autograd.gradcheck(lambda x: op(x, *wide.arguments[1:])[0], wide.x.detach().requires_grad_())


def test_compiled():
    """One graph for every number of frames, joint and loss in it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, counts, module = CompileCounterWithBackend("aot_eager"), [], TransducerLoss()

    def function(x, label, f_len, y_len):
        return module(x * 2, label, f_len, y_len, BLANK)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for frames in (7, 6, 9):  # no other size is one of these
        problem = Loss((3, frames, 3, 13), F32, "cpu")
        ours, eager = (
            torch.autograd.grad(f(problem.x, *problem.lengths).sum(), problem.x) for f in (compiled, function)
        )
        torch.testing.assert_close(ours, eager)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits():
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of GPU memory")
    batch, frames, labels, classes = 5, 1000, 429, 1024
    x = torch.randn(batch, frames, labels + 1, classes, device="cuda", dtype=BF16).requires_grad_()
    label = torch.randint(1, classes, (batch, labels), device="cuda", dtype=torch.int64)
    f_len = torch.full((batch,), frames, device="cuda", dtype=torch.int32)
    y_len = torch.full((batch,), labels, device="cuda", dtype=torch.int32)
    losses = torch.ops.apex.transducer_loss_forward(x, label, f_len, y_len, 0, half_to_float=True)[0]
    (gradient,) = torch.autograd.grad(losses.sum(), x)
    last = x[4:].detach().clone().requires_grad_()
    part = torch.ops.apex.transducer_loss_forward(
        last, label[4:], f_len[4:], y_len[4:], 0, half_to_float=True
    )[0]
    assert torch.equal(part, losses[4:])
    assert torch.equal(torch.autograd.grad(part.sum(), last)[0], gradient[4:])
