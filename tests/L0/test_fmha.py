"""apex.contrib.fmha and fmhalib: attention of packed sequences against float64, by torch's own ops."""

from __future__ import annotations

import contextlib
import itertools
import threading
import types

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex._legacy import fmhalib as raw
from apex.contrib.fmha import FMHAFun, _flash
from apex.contrib.fmha.fmha import FMHA

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Lengths of sequences: one; none among others; several; as long as a block of rows and more; beyond what is padded.
LENGTHS = [(5,), (3, 0, 7, 0), (1, 128, 64, 2, 9), (300, 17), (700, 1, 0, 300)]


def packed(lengths, dtype, device, heads=2, d=32, more=0):
    """(qkv that requires gradients, cu_seqlens, the output's gradient); `more` tokens belong to nobody."""
    total = sum(lengths) + more
    qkv, g = lists.random(dtype, device, ((total, 3, heads, d), (total, heads, d)), seed=len(lengths))
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return qkv.requires_grad_(), cu, g


def exactly(qkv, cu, keep=None, p=0.0):
    """The attention of each sequence alone. keep: [sequences, h, S, S], what dropout leaves."""
    rows, begins = torch.zeros_like(qkv[:, 0]), cu.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(begins)):
        q, k, v = (t.transpose(0, 1) for t in qkv[begin:end].unbind(1))
        softmax = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1)
        if keep is not None:
            softmax = softmax * keep[i, :, : end - begin, : end - begin] / (1 - p)
        rows = torch.cat((rows[:begin], (softmax @ v).transpose(0, 1), rows[end:]))
    return rows


def near(found, wanted, loose=32):
    unit = loose * lists.ROUNDING[found.dtype]
    scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    torch.testing.assert_close(
        found.detach().double(), wanted.detach().double(), rtol=unit, atol=unit * scale
    )


def run(qkv, cu, g, p=0.0, max_s=None, training=True):
    max_s = max_s or max(cu.diff().max().item(), 1)
    y = FMHAFun.apply(qkv, cu, p, max_s, training, False)
    return [y, *torch.autograd.grad(y, qkv, g)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_values(device, dtype, lengths):
    for d, more in ((32, 0), (64, 3), (72, 0)):
        qkv, cu, g = packed(lengths, dtype, device, d=d, more=more)
        wide = qkv.detach().double().requires_grad_()
        wanted = exactly(wide, cu)
        (gradient,) = torch.autograd.grad(wanted, wide, g.double())
        found = run(qkv, cu, g)
        assert found[0].dtype == dtype and found[0].shape == g.shape
        near(found[0], wanted)
        near(found[1], gradient)
        assert not found[0][sum(lengths) :].any() and not found[1][sum(lengths) :].any()
        lists.assert_same_bits(found, run(qkv, cu, g, p=0.5, training=False))  # nothing is dropped


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_raw_functions(device, dtype):
    """Values, gradients and the softmax with its dropped values, all by the mask that is returned."""
    for lengths, p in itertools.product(LENGTHS[:4], (0.0, 0.3)):
        qkv, cu, g = packed(lengths, dtype, device, d=64, more=1)
        longest = max(lengths)
        y, softmax = raw.fwd(qkv, cu, p, longest, True, False, False, None)
        size = -(-longest // 128) * 128
        assert softmax.shape == (len(lengths), 2, size, size) and not y.requires_grad
        keep = ~softmax.signbit()
        wide = qkv.detach().double().requires_grad_()
        wanted = exactly(wide, cu, keep.double(), p)
        near(y, wanted)
        for i, n in enumerate(lengths):
            assert not softmax[i, :, n:].any() and not softmax[i, :, :, n:].any()
            near(softmax[i, :, :n, :n].abs().sum(-1), torch.ones(2, n, dtype=dtype, device=device))
        (gradient,) = torch.autograd.grad(wanted, wide, g.double())
        kept = softmax.clone()
        of_qkv, of_scores = raw.bwd(g, qkv, softmax, cu, p, longest, True)
        near(of_qkv, gradient)
        assert of_scores.shape == softmax.shape
        lists.assert_same_bits([softmax], [kept])  # a second backward finds it
        one = raw.bwd(g.unsqueeze(0), qkv, softmax, cu, p, longest, False)[
            0
        ]  # [sequences, tokens, h, d], as there
        lists.assert_same_bits([one], [of_qkv])
        again, _, of_kv = raw.bwd_nl(g, qkv, softmax, cu, p, longest, False)
        lists.assert_same_bits([again], [of_qkv])
        near(of_kv.sum(1), gradient[:, 1:])


@pytest.mark.parametrize("device", DEVICES)
def test_dropout(device):
    """Dropped as often as asked, another way each time; the same from the same seed, and in the backward."""
    for lengths in ((128, 100, 60, 90), (600, 40)):
        qkv, cu, g = packed(lengths, F32, device, heads=4)
        qkv, p = qkv.detach(), 0.25
        value = qkv.clone()
        value[:, 2] = 1.0  # then the attention is what is left of the softmax
        value[:, :2] = 0.0
        made = [FMHAFun.apply(value, cu, p, max(lengths), True, False) for _ in range(2)]
        assert not torch.equal(*made)
        assert abs(made[0][: lengths[0]].mean().item() - 1) < 0.02
        spread = (p / (1 - p) / lengths[0]) ** 0.5  # of a mean of so many values
        assert abs(made[0][: lengths[0], :, 0].std().item() / spread - 1) < 0.2
        torch.manual_seed(5)
        leaf = qkv.clone().requires_grad_()
        y = FMHAFun.apply(leaf, cu, p, max(lengths), True, False)
        torch.manual_seed(5)
        lists.assert_same_bits([y], [FMHAFun.apply(leaf, cu, p, max(lengths), True, False)])
        # The attention is linear in the values: their gradient is that of the same mask.
        (gradient,) = torch.autograd.grad(y, leaf, g)
        near((gradient[:, 2] * qkv[:, 2]).sum(), (y * g).sum(), 2**10)


def test_dropout_by_a_generator_of_the_caller():
    for lengths in ((20, 9), (600, 40)):
        qkv, cu, g = packed(lengths, F32, "cpu")
        arguments = qkv, cu, 0.3, max(lengths), True, False, False
        (y, state), (again, _) = (raw.fwd(*arguments, torch.Generator().manual_seed(3)) for _ in range(2))
        lists.assert_same_bits([y], [again])
        found = raw.bwd(g, qkv, state, cu, 0.3, max(lengths), False)
        near((found[0][:, 2] * qkv[:, 2]).sum(), (y * g).sum(), 2**10)


@pytest.mark.parametrize("device", DEVICES)
def test_padded_and_one_by_one(device):
    """The same, whichever max_s says."""
    qkv, cu, g = packed((40, 3, 0, 500), F32, device)
    for a, b in zip(run(qkv, cu, g, max_s=512), run(qkv, cu, g, max_s=513), strict=True):
        near(a, b)


def test_module():
    """As public apex's: hidden states [total, 3 * hidden], a configuration as BERT's."""
    config = types.SimpleNamespace(attention_probs_dropout_prob=0.0, num_attention_heads=2, hidden_size=64)
    module = FMHA(config)
    qkv, cu, g = packed((3, 8, 1, 2, 4), F32, "cpu")
    found = module(qkv.detach().view(18, -1), cu, 8)
    lists.assert_same_bits([found], [run(qkv, cu, g)[0].view(18, 64)])
    with pytest.raises(ValueError, match="does not divide into 2 heads"):
        FMHA(types.SimpleNamespace(attention_probs_dropout_prob=0.0, num_attention_heads=2, hidden_size=63))


def test_nobody_else_s_tokens_are_read():
    """What is behind the last sequence, or between its end and max_s, does not count: not even nan."""
    qkv, cu, g = packed((3, 7), F32, "cpu", more=4)
    wanted = run(qkv, cu, g)
    with torch.no_grad():
        qkv[10:] = torch.nan
    for a, b in zip(run(qkv, cu, g), wanted, strict=True):
        lists.assert_same_bits([a[:10]], [b[:10]])
        assert not a[10:].any()


def test_compiled(counting_backend):
    qkv, cu, g = packed((3, 7, 2, 5), F32, "cpu")
    graph = torch.compile(
        lambda x: FMHAFun.apply(x, cu, 0.0, 7, True, False), fullgraph=True, backend=counting_backend
    )
    y = graph(qkv)
    for a, b in zip([y, *torch.autograd.grad(y, qkv, g)], run(qkv, cu, g), strict=True):
        near(a, b)
    assert counting_backend.frame_count == 1


def test_casts_of_others():
    """Neither torch.autocast nor amp's O1 changes what is computed; a checkpoint drops the same values."""
    qkv, cu, g = packed((3, 7, 2, 5), F32, "cpu")
    long = packed((520,), F32, "cpu")
    wanted = run(qkv, cu, g), run(*long)
    with torch.autocast("cpu", BF16):
        for found, plain in zip((run(qkv, cu, g), run(*long)), wanted, strict=True):
            lists.assert_same_bits(found, plain)
    model = torch.nn.Linear(4, 4, device="cpu", dtype=F32)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    try:
        for found, plain in zip((run(qkv, cu, g), run(*long)), wanted, strict=True):
            lists.assert_same_bits(found, plain)
    finally:
        amp._amp_state.handle._deactivate()
    made = lambda x: FMHAFun.apply(x, cu, 0.4, 7, True, False)  # noqa: E731
    torch.manual_seed(3)
    y = made(qkv)
    torch.manual_seed(3)
    again = checkpoint(made, qkv, use_reentrant=False)
    lists.assert_same_bits(torch.autograd.grad(again, qkv, g), torch.autograd.grad(y, qkv, g))


def test_no_gradients_of_gradients():
    """They are refused, not wrong."""
    qkv, cu, g = packed((3, 7), F64, "cpu")
    y = FMHAFun.apply(qkv, cu, 0.0, 7, True, False)
    for of_y in (g, g.requires_grad_()):  # without a history, too, as a sum's
        (gradient,) = torch.autograd.grad(y, qkv, of_y, create_graph=True, retain_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.grad(gradient.sum() + qkv.sum(), qkv)


def test_backward_under_an_autocast():
    """That of the backward alone: nothing of it is rounded to another dtype."""
    for max_s in (7, 600):
        qkv, cu, g = packed((3, 7), F32, "cpu")
        y = FMHAFun.apply(qkv, cu, 0.3, max_s, True, False)
        wanted = torch.autograd.grad(y, qkv, g, retain_graph=True)
        with torch.autocast("cpu", BF16):
            lists.assert_same_bits(torch.autograd.grad(y, qkv, g), wanted)


def test_without_memory():
    """On the meta device, and of what FakeTensorMode makes up: shapes, though nothing says where sequences are."""
    for max_s, fake in itertools.product((7, 600), (True, False)):
        device = "cpu" if fake else "meta"
        with FakeTensorMode() if fake else contextlib.nullcontext():
            qkv = torch.empty(10, 3, 2, 8, dtype=F32, device=device, requires_grad=True)
            y = FMHAFun.apply(qkv, torch.empty(3, dtype=torch.int32, device=device), 0.5, max_s, True, False)
            (gradient,) = torch.autograd.grad(y.sum(), qkv)
        assert y.shape == (10, 2, 8) and gradient.shape == qkv.shape


def test_fixed_order_of_flash_attention():
    """torch's flash attention has one where its deterministic algorithms are asked for, and more than as a warning."""
    asked = lambda: (  # noqa: E731
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        for before in ((False, False), (True, True), (True, False)):
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            with pytest.raises(ArithmeticError), _flash._in_a_fixed_order():
                assert asked() == (True, False)
                raise ArithmeticError
            assert asked() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_fixed_order_of_two_threads():
    """A backward that ends does not turn torch's switch back under another one that still runs, nor leave it turned."""
    inside, ended, seen = threading.Event(), threading.Event(), []

    def other():
        with _flash._in_a_fixed_order():
            inside.set()
            ended.wait(0.2)  # the lock keeps the first one out until this has ended
            seen.append(torch.are_deterministic_algorithms_enabled())

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with _flash._in_a_fixed_order():
        seen.append(torch.are_deterministic_algorithms_enabled())
    ended.set()
    thread.join(10)
    assert seen == [True, True] and not torch.are_deterministic_algorithms_enabled()


def test_what_flash_attention_reads():
    """Rows that begin at multiples of 16 bytes; no sequence where the numbers do not fit."""
    qkv = torch.arange(5 * 3 * 2 * 17, dtype=F16, device="cpu").view(5, 3, 2, 17)
    narrow, flat = qkv[..., :16].contiguous(), qkv.flatten()
    for tensor in (narrow, narrow[1:], narrow[:, :, 1:]):
        assert _flash.readable(tensor) is tensor
    for tensor in (qkv[..., :16], narrow[..., ::2], narrow.transpose(2, 3), flat[1:97].view(2, 3, 2, 8)):
        found = _flash.readable(tensor)
        assert found.is_contiguous() and found.storage_offset() == 0 and torch.equal(found, tensor)
    numbers = lambda *values: torch.tensor(values, dtype=torch.int32, device="cpu")  # noqa: E731
    for cu, fits in ((numbers(0, 3, 10), True), (numbers(0, 2, 10), False), (numbers(0, 5, 4), False)):
        begins, bad = _flash._begins(cu, 10, 7)
        assert bool(bad) is not fits and torch.equal(begins, cu * fits) and begins.dtype == torch.int32


def test_the_layer_takes_its_own_width():
    """[20, 60] is no qkv of 40 tokens."""
    layer = FMHA(
        types.SimpleNamespace(attention_probs_dropout_prob=0.0, num_attention_heads=2, hidden_size=10)
    )
    cu = torch.tensor([0, 20], dtype=torch.int32, device="cpu")
    for shape in ((20, 60), (20, 31), (20, 3, 10)):
        with pytest.raises(ValueError, match=r"qkv must be \[total, 30\]"):
            layer(torch.zeros(shape, dtype=F32, device="cpu"), cu, 20)


def test_refused():
    qkv, cu, g = packed((3, 7), F32, "cpu")
    qkv = qkv.detach()
    numbers = lambda *n: torch.tensor(n, dtype=torch.int32, device="cpu")  # noqa: E731
    for error, text, changed in [
        (TypeError, "not torch.int64", dict(qkv=qkv.long())),
        (TypeError, "must be int32", dict(cu_seqlens=cu.long())),
        (ValueError, r"\[total, 3, heads, d\]", dict(qkv=qkv[:, :2])),
        (ValueError, r"\[total, 3, heads, d\]", dict(qkv=qkv[0])),
        (ValueError, "d from 1 to 256", dict(qkv=torch.zeros(10, 3, 2, 257, dtype=F32, device="cpu"))),
        (ValueError, r"\[sequences \+ 1\]", dict(cu_seqlens=cu[:1])),
        (ValueError, "on meta", dict(cu_seqlens=cu.to("meta"))),
        (ValueError, r"in \[0, 1\)", dict(p_dropout=1.0)),
        (ValueError, "from 1 to 65536", dict(max_s=0)),
        (ValueError, "from 1 to 65536", dict(max_s=65537)),
        (ValueError, "never fall", dict(cu_seqlens=numbers(0, 5, 4))),
        (ValueError, "begin with 0", dict(cu_seqlens=numbers(1, 5, 10))),
        (ValueError, "end at most at 10", dict(cu_seqlens=numbers(0, 5, 11))),
        (ValueError, "longer than max_s, 6", dict(max_s=6)),
    ]:
        given = dict(qkv=qkv, cu_seqlens=cu, p_dropout=0.0, max_s=7) | changed
        with pytest.raises(error, match=text):
            FMHAFun.apply(*given.values(), True, False)
        with pytest.raises(error, match=text):
            raw.fwd(**given, is_training=True, is_nl=False, zero_tensors=False)
    _, softmax = raw.fwd(qkv, cu, 0.0, 7, True, False, False)
    with pytest.raises(ValueError, match="dout must be"):
        raw.bwd(g[:3], qkv, softmax, cu, 0.0, 7, False)
    with pytest.raises(TypeError, match="dout is"):
        raw.bwd(g.half(), qkv, softmax, cu, 0.0, 7, False)
    for state, longest in (
        (softmax[:1], 7),
        (softmax[:, :1], 7),
        (softmax[..., :64], 7),
        (softmax[..., :4, :4], 7),
        (softmax.to("meta"), 7),
        (softmax.flatten(), 7),
        (softmax, 600),
        (softmax.new_zeros(3, dtype=torch.uint8), 600),
    ):
        with pytest.raises(ValueError, match="is not what fwd gave"):
            raw.bwd(g, qkv, state, cu, 0.0, longest, False)
    with pytest.raises(TypeError, match="softmax is"):
        raw.bwd(g, qkv, softmax.double(), cu, 0.0, 7, False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_numbers_that_do_not_fit_give_nan_on_a_gpu(dtype):
    """No memory is read for them, and the host does not wait."""
    qkv, cu, g = packed((3, 7), dtype, "cuda")
    for wrong, max_s in (
        ((0, 5, 4), 7),
        ((0, 5, 900), 7),
        ((-3, 5, 10), 7),
        ((0, 3, 10), 6),
        ((2, 3, 10), 7),
    ):
        cu = torch.tensor(wrong, dtype=torch.int32, device="cuda")
        with torch.cuda.device(0):
            torch.cuda.set_sync_debug_mode("error")
            try:
                y = FMHAFun.apply(qkv, cu, 0.0, max_s, True, False)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert y.isnan().all()
        assert torch.autograd.grad(y, qkv, g)[0].isnan().all()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("warn_only", [False, True])
def test_the_same_from_run_to_run_on_a_gpu(warn_only):
    """Many blocks of keys add to the gradient of one block of queries."""
    qkv, cu, g = packed((4000, 1900), F16, "cuda", heads=8, d=64)
    torch.use_deterministic_algorithms(warn_only, warn_only=warn_only)
    try:
        first = run(qkv, cu, g)
        for _ in range(5):
            lists.assert_same_bits(run(qkv, cu, g), first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 256])
def test_views_on_a_gpu(d):
    """Rows that do not begin at multiples of 16 bytes, gradients of a sum, heads of any width that is served."""
    wide, cu, _ = packed((3, 300), F16, "cuda", d=d + 1)
    flat = torch.randn(303 * 6 * d + 1, dtype=F32, device="cuda").half()
    for qkv in (
        wide.detach()[..., 1:],
        flat[1:].view(303, 3, 2, d),
        flat[:-1].view(2, d, 3, 303).permute(3, 2, 0, 1),
    ):
        plain = qkv.clone(memory_format=torch.contiguous_format).requires_grad_()
        found = [FMHAFun.apply(t, cu, 0.0, 300, True, False) for t in (qkv.requires_grad_(), plain)]
        gradients = [torch.autograd.grad(y.sum(), t)[0] for y, t in zip(found, (qkv, plain), strict=True)]
        lists.assert_same_bits([found[0], gradients[0]], [found[1], gradients[1]])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_captured(dtype):
    """Replays have new sequences, and drop other values each time."""
    qkv, cu, g = packed((3, 7, 20, 2), dtype, "cuda", d=64)
    step = lambda p: run(qkv, cu, g, p, max_s=32)  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for p in (0.0, 0.3):
            step(p)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, dropped = step(0.0), step(0.3)
    seen = []
    for lengths in ((3, 7, 20, 2), (8, 0, 4, 20)):
        cu.copy_(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cpu"))
        graph.replay()
        for a, b in zip(captured, step(0.0), strict=True):
            near(a, b)
        seen.append(dropped[0].clone())
    graph.replay()
    assert not torch.equal(dropped[0], seen[1])
