"""The transducer joint against float64, on everything that can serve it, and as users call it."""

from __future__ import annotations

import inspect

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64

from apex._legacy import transducer_joint_cuda
from apex.contrib.transducer import TransducerJoint, _transducer_ref
from apex.contrib.transducer.transducer import TransducerJointFunc
from apex.reference import _masks
from tests.L0.signatures import signature

DTYPES = [F32, F16, BF16, F64]
# (batch, frames, labels, hidden): one; rows that no vector fits, short and longer; vectors; more labels than are held;
# more frames, more labels than a sum apart takes.
CASES = [
    (1, 1, 1, 1),
    (2, 5, 3, 13),
    (3, 4, 35, 77),
    (3, 9, 4, 72),
    (2, 4, 35, 16),
    (1, 3, 33, 5),
    (2, 130, 4, 72),
]
CASES += [(1, 3, 140, 16)]


class Joint:
    """A case: inputs, lengths that differ, and the output's gradient, with large values where no item is."""

    def __init__(self, case, dtype, device, packed=False, rest=0, wide=False):
        self.batch, self.frames, self.labels, self.hidden = case
        shapes = (self.batch, self.frames, self.hidden), (self.batch, self.labels, self.hidden)
        self.f, self.g = (t.requires_grad_() for t in lists.random(dtype, device, shapes))
        index = torch.arange(self.batch, device="cpu", dtype=torch.int64)
        kind = torch.int64 if wide else torch.int32
        self.f_len = (self.frames - index % self.frames).to(kind)
        self.g_len = (self.labels - (index + 1) % self.batch % self.labels).to(kind)
        self.offset = torch.cumsum(self.f_len * self.g_len, 0) if packed else None
        rows = int(self.offset[-1]) + rest if packed else 0
        self.inside = (torch.arange(self.frames, device="cpu", dtype=torch.int64) < self.f_len[:, None])[
            :, :, None
        ] & (torch.arange(self.labels, device="cpu", dtype=torch.int64) < self.g_len[:, None])[:, None]
        shape = (rows, self.hidden) if packed else (self.batch, self.frames, self.labels, self.hidden)
        own = int(self.inside.sum())
        values = lists.random(dtype, device, ((own, self.hidden),), seed=3)[0]
        self.grad = torch.full(shape, 1e4, dtype=dtype, device=device)
        if packed:
            self.grad[:own] = values
        else:
            self.grad[self.inside.to(device)] = values
        self.arguments = [
            self.f,
            self.g,
            self.f_len.to(device),
            self.g_len.to(device),
            None if self.offset is None else self.offset.to(device),
            rows,
        ]

    def unpack(self, tensor, otherwise):
        """[batch, frames, labels, columns] of a tensor, packed or not, with `otherwise` where no item is."""
        whole = torch.full(
            (*self.inside.shape, tensor.shape[-1]), otherwise, dtype=tensor.dtype, device="cpu"
        )
        tensor = tensor.detach().cpu()
        whole[self.inside] = (
            tensor[: int(self.inside.sum())] if self.offset is not None else tensor[self.inside]
        )
        return whole

    def check(self, relu=False, dropout=0.0, seed=None):
        """Forward and backward against float64; returns (output, mask, gradients)."""
        output, mask = torch.ops.apex.transducer_joint_forward(*self.arguments, relu, dropout, seed)
        assert output.dtype == self.f.dtype and output.is_contiguous() and output.shape == self.grad.shape
        found = torch.autograd.grad(output, (self.f, self.g), self.grad)
        f, g = (t.detach().cpu().double() for t in (self.f, self.g))
        total = f[:, :, None] + g[:, None]
        passes = self.inside[..., None].expand_as(total)
        scale = 1 / (1 - dropout) if dropout < 1 else 0
        if dropout:
            kept = _masks.unpack(self.unpack(mask, 0), self.hidden)
            assert not (kept & ~passes).any() and (not relu or not (kept & (total <= 0)).any())
            passes = kept
        elif relu:
            passes = passes & (total > 0)
        expected = torch.where(passes, total * scale, 0.0)
        lists.assert_near([self.unpack(output, 0)], [expected], units=1, arithmetic=4)
        if self.offset is None:
            assert output.detach().cpu()[~self.inside].eq(-1).all()
        else:
            assert output[int(self.offset[-1]) :].eq(-1).all()
        grad = torch.where(passes, self.unpack(self.grad, 0).double(), 0.0) * scale
        own, work = lists.ROUNDING[output.dtype], lists.ROUNDING[lists.math_dtype(output.dtype)]
        for a, dim in zip(found, (2, 1), strict=True):
            error = (a.cpu().double() - grad.sum(dim)).abs()
            allowed = (
                1.01 * own * grad.sum(dim).abs() + 64 * work * grad.abs().sum(dim) + lists.SMALLEST[a.dtype]
            )
            assert a.dtype == output.dtype and (error <= allowed).all(), f"largest error {error.max()}"
        return output.detach(), mask, *found


def seed_of(value, device):
    return torch.tensor([value], dtype=torch.int64, device=device)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(variant, dtype, packed):
    for case in CASES:
        for relu in (False, True):
            first = Joint(case, dtype, variant.device, packed).check(relu)
            again = Joint(case, dtype, variant.device, packed, rest=3 * packed, wide=True).check(relu)
            lists.assert_same_bits(first[2:], again[2:])


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout(variant, dtype, packed):
    for case, probability in zip(CASES[1:], (0.5, 0.3, 0.1, 0.9, 1.0, 0.25, 0.6), strict=True):
        for relu in (False, True):
            joint = Joint(case, dtype, variant.device, packed, rest=packed)
            joint.check(relu, probability, seed_of(2**61 + 7, variant.device))


def test_dropout_is_the_same_everywhere(variant):
    """Philox's words are the published ones; every variant drops what the reference drops."""
    from apex.reference import _philox

    assert [
        hex(int(w))
        for w in _philox.words(
            torch.tensor(0, device="cpu", dtype=torch.int64), torch.tensor(0, device="cpu", dtype=torch.int64)
        )
    ] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]
    for hidden in (40, 13):
        case, seed = (2, 5, 3, hidden), seed_of(12345678901234567, variant.device)
        _, mask, *_ = Joint(case, F32, variant.device).check(False, 0.25, seed)
        parts = mask.shape[-1]
        counter = torch.arange(mask.numel(), device="cpu", dtype=torch.int64).view(mask.shape)
        kept = _philox.keep_eight(seed[0].cpu(), counter, round(0.75 * 65536)).flatten(-2)[..., :hidden]
        joint = Joint(case, F32, "cpu")
        wanted = _masks.pack(kept & joint.inside[..., None])
        assert torch.equal(mask.cpu(), wanted) and parts == -(-hidden // 8)
        other = Joint(case, F32, variant.device).check(False, 0.25, seed + 1)[1]
        assert not torch.equal(mask, other)


def test_how_often_dropout_keeps(variant):
    joint = Joint((2, 20, 9, 64), F32, variant.device)
    joint.f_len[:], joint.g_len[:] = 20, 9
    arguments = [
        *joint.arguments[:2],
        joint.f_len.to(variant.device),
        joint.g_len.to(variant.device),
        None,
        0,
    ]
    for probability in (0.1, 0.5):
        seed = seed_of(99, variant.device)
        _, mask = torch.ops.apex.transducer_joint_forward(*arguments, False, probability, seed)
        kept = _masks.unpack(mask, 64).double()
        deviation = (probability * (1 - probability) / kept.numel()) ** 0.5
        assert abs(kept.mean().item() - (1 - probability)) < 5 * deviation
        for neighbour in (kept[..., 1:] * kept[..., :-1], kept[:, :, 1:] * kept[:, :, :-1]):
            assert abs(neighbour.mean().item() - (1 - probability) ** 2) < 10 * deviation


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_layouts(variant, dtype):
    """Strided and misaligned inputs, an expanded gradient, lengths of two types."""
    joint = Joint((2, 5, 3, 16), dtype, variant.device)
    wanted = joint.check(True)
    f, g = joint.f.detach(), joint.g.detach()
    for change in (
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
        lambda t: lists.misaligned([t])[0],
    ):
        joint.f, joint.g = (change(t).requires_grad_() for t in (f, g))
        joint.arguments[:2] = joint.f, joint.g
        found = joint.check(True)
        lists.assert_same_bits((found[0], *found[2:]), (wanted[0], *wanted[2:]))
    joint.arguments[2] = joint.arguments[2].long()
    output, _ = torch.ops.apex.transducer_joint_forward(*joint.arguments)
    of_sum = torch.autograd.grad(output.sum(), (joint.f, joint.g), retain_graph=True)
    lists.assert_same_bits(of_sum, torch.autograd.grad(output, (joint.f, joint.g), torch.ones_like(output)))


def test_special_values_stay_in_their_rows(variant):
    """ReLU lets nan through, as torch's; its gradient passes there too. Columns do not meet."""
    joint = Joint((1, 3, 2, 8), F32, variant.device)
    with torch.no_grad():
        joint.f[0, 1, 2], joint.f[0, 2, 3], joint.g[0, 0, 4] = float("nan"), float("inf"), float("-inf")
    joint.f_len[:], joint.g_len[:] = 3, 2
    arguments = [joint.f, joint.g, joint.f_len.to(variant.device), joint.g_len.to(variant.device), None, 0]
    output, _ = torch.ops.apex.transducer_joint_forward(*arguments, True)
    expected = torch.relu(joint.f[:, :, None] + joint.g[:, None])
    torch.testing.assert_close(output, expected, equal_nan=True, rtol=0, atol=0)
    g = torch.ones_like(output)
    found, wanted = (torch.autograd.grad(y, (joint.f, joint.g), g) for y in (output, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_empty_items(variant, packed):
    """Items without frames or labels; a batch of none; nothing but a rest."""
    joint = Joint((3, 4, 3, 8), F32, variant.device)
    f_len, g_len = (
        torch.tensor([0, 4, 2], device="cpu", dtype=torch.int64),
        torch.tensor([3, 0, 1], device="cpu", dtype=torch.int64),
    )
    offset = torch.cumsum(f_len * g_len, 0)
    packing = [offset.to(variant.device), 3] if packed else [None, 0]
    arguments = [joint.f, joint.g, f_len.to(variant.device), g_len.to(variant.device), *packing]
    output, _ = torch.ops.apex.transducer_joint_forward(*arguments)
    live = output[:2] if packed else output[2, :2, 0]
    assert torch.equal(live, (joint.f[2, :2] + joint.g[2, :1]).detach())
    assert (output == -1).sum() == output.numel() - live.numel()
    of_f, of_g = torch.autograd.grad(output.sum(), (joint.f, joint.g))
    assert of_f[2, :2].eq(1).all() and of_f.sum() == 16 and of_g[2, 0].eq(2).all() and of_g.sum() == 16
    none = [t[:0] for t in arguments[:4]]
    for tail in ([None, 0], [offset[:0].to(variant.device), 2]):
        output, _ = torch.ops.apex.transducer_joint_forward(*none, *tail)
        assert output.eq(-1).all() and output.shape[0] == tail[1]


def test_items_that_do_not_fit(variant):
    """Refused on a CPU; elsewhere nan, and only theirs."""
    for change, text in (
        (dict(f_len=(5, 2)), r"f_len\[0\] is 5, but f has 4 frames"),
        (dict(f_len=(-1, 2)), r"f_len\[0\] is -1"),
        (dict(g_len=(4, 2)), r"g_len\[0\] is 4, but g has 3 labels"),
        (dict(offset=(5, 10)), r"batch_offset\[0\] is 5"),
        (dict(offset=(6, 10), rows=8), "packed_batch is 8, less than the 10 rows"),
    ):
        joint = Joint((2, 4, 3, 8), F32, variant.device)
        f_len, g_len = (
            torch.tensor(change.get(k, v), dtype=torch.int64, device="cpu")
            for k, v in (("f_len", (2, 2)), ("g_len", (3, 2)))
        )
        packing = (
            [torch.tensor(change["offset"], dtype=torch.int64, device="cpu"), change.get("rows", 10)]
            if "offset" in change
            else [None, 0]
        )
        arguments = [joint.f, joint.g, f_len, g_len, *packing]
        arguments = [t.to(variant.device) if isinstance(t, torch.Tensor) else t for t in arguments]
        if variant.device.type == "cpu":
            with pytest.raises(ValueError, match=text):
                torch.ops.apex.transducer_joint_forward(*arguments)
        else:
            output, _ = torch.ops.apex.transducer_joint_forward(*arguments)
            found = torch.autograd.grad(output.nansum(), (joint.f, joint.g))
            for gradient in found:
                assert gradient.flatten(1).isnan().all(1).any()
            if packing[0] is None:
                assert output[0].isnan().all() and output[1].isfinite().all()
                assert found[0][1].isfinite().all() and found[0][0].isnan().all()


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda f, g, t, u: (f.int(), g.int(), t, u), TypeError),
        (lambda f, g, t, u: (f, g.half(), t, u), TypeError),
        (lambda f, g, t, u: (f, g, t.float(), u), TypeError),
        (lambda f, g, t, u: (f[0], g, t, u), ValueError),
        (lambda f, g, t, u: (f, g[..., :3], t, u), ValueError),
        (lambda f, g, t, u: (f, g, t[:1], u), ValueError),
        (lambda f, g, t, u: (f, g, t, u[:, None]), ValueError),
        (lambda f, g, t, u: (f, g, t, u, t[:1], 4), ValueError),
        (lambda f, g, t, u: (f, g, t, u, t, -1), ValueError),
        (lambda f, g, t, u: (f, g, t, u, None, 0, False, 1.5), ValueError),
        (lambda f, g, t, u: (f, g, t, u, None, 0, False, 0.5), ValueError),
    ],
)
def test_bad_arguments(variant, change, error):
    joint = Joint((2, 4, 3, 8), F32, variant.device)
    with pytest.raises(error, match="transducer_joint"):
        torch.ops.apex.transducer_joint_forward(*change(*(t.detach() for t in joint.arguments[:4])))


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("relu, dropout", [(False, False), (True, False), (False, True), (True, True)])
def test_module_against_the_reference(variant, packed, relu, dropout):
    """Public apex's own test, with every mask (there dropout is expected to fail)."""
    for hidden in (24, 13):
        joint = Joint((3, 7, 5, hidden), F16, variant.device, packed)
        module = TransducerJoint(packed, relu, dropout, dropout_prob=0.5, probe_mask=True)
        output = module(*joint.arguments[:4], *joint.arguments[4:])
        output.backward(joint.grad)
        mask = joint.unpack(module.mask_probe[0], 0) if relu or dropout else None
        f, g = (t.detach().cpu().float().requires_grad_() for t in (joint.f, joint.g))
        grad = joint.unpack(joint.grad, 0).float()
        lengths = joint.f_len, joint.g_len
        wanted = _transducer_ref.transducer_joint_reference(
            f, g, grad, *lengths, packed, relu, dropout, 0.5, mask
        )
        found = output.detach(), joint.f.grad, joint.g.grad
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.cpu().float(), b, atol=2e-3, rtol=2e-3)
        module.eval()
        output = module(*joint.arguments)
        assert not dropout or relu or not (output == 0).any()


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_transducer_joint_cuda(variant, packed):
    """The legacy module's functions: the same values and gradients, with a mask of one byte an element."""
    joint = Joint((3, 7, 5, 24), F32, variant.device, packed)
    f, g, f_len, g_len, offset, rows = joint.arguments
    offset = torch.empty(0, dtype=F32, device="cpu") if offset is None else offset

    def run(relu, dropout, probability):
        made = transducer_joint_cuda.forward(
            f, g, f_len, g_len, offset, rows, 1, packed, relu, dropout, probability, 4
        )
        inputs = [joint.grad, *made[1:]]
        scale = 1 / (1 - probability)
        found = transducer_joint_cuda.backward(inputs, f_len, g_len, offset, 7, 5, packed, scale)
        return made, found

    for relu in (False, True):
        made, found = run(relu, False, 0.0)
        output, _ = torch.ops.apex.transducer_joint_forward(*joint.arguments, relu)
        assert len(made) == 1 + relu and not made[0].requires_grad
        lists.assert_same_bits((made[0], *found), (output, *torch.autograd.grad(output, (f, g), joint.grad)))
        (output, mask), found = run(relu, True, 0.5)
        assert mask.dtype == torch.uint8 and mask.shape == output.shape
        passes = joint.unpack(mask, 0).bool()
        total = (f[:, :, None] + g[:, None]).detach().cpu()
        torch.testing.assert_close(joint.unpack(output, 0), torch.where(passes, total * 2, 0))
        grad = torch.where(passes, joint.unpack(joint.grad, 0) * 2, 0)
        torch.testing.assert_close(found[0].cpu(), grad.sum(2))
        torch.testing.assert_close(found[1].cpu(), grad.sum(1))


def test_public_names():
    wanted = "pack_output=False, relu=False, dropout=False, opt=1, fwd_tile_size=4, dropout_prob=0, probe_mask=False"
    assert signature(TransducerJoint) == f"({wanted})"
    assert signature(TransducerJoint.forward) == (
        "(self, f, g, f_len, g_len, batch_offset=None, packed_batch=0)"
    )
    assert list(inspect.signature(TransducerJointFunc.forward).parameters)[:3] == ["ctx", "f", "g"]
    for relu, dropout in ((True, False), (False, True)):
        with pytest.raises(NotImplementedError, match="opt=1"):
            TransducerJoint(relu=relu, dropout=dropout, opt=0)
    for bad in (dict(opt=2), dict(dropout_prob=1.5)):
        with pytest.raises(ValueError, match="TransducerJoint"):
            TransducerJoint(**bad)
    with pytest.raises(ValueError, match="needs batch_offset and packed_batch"):
        TransducerJoint(pack_output=True)(*Joint(CASES[1], F32, "cpu").arguments[:4])


def test_around_the_op():
    """opcheck, autocast, torch.func, and what is refused: forward mode and the gradient of the gradient."""
    seed = seed_of(5, "cpu")
    for packed in (False, True):
        joint = Joint((2, 5, 3, 12), F32, "cpu", packed, rest=packed)
        for tail in ((True, 0.0, None), (False, 0.5, seed)):
            torch.library.opcheck(torch.ops.apex.transducer_joint_forward.default, (*joint.arguments, *tail))
            _, mask = torch.ops.apex.transducer_joint_forward(*joint.arguments, *tail)
            saved = (None, None, mask) if tail[1] else (joint.f.detach(), joint.g.detach(), None)
            arguments = (joint.grad, *saved, *joint.arguments[2:5], 5, 3, 2.0)
            torch.library.opcheck(torch.ops.apex.transducer_joint_backward.default, arguments)
    joint = Joint((2, 5, 3, 12), F32, "cpu")
    op, rest = torch.ops.apex.transducer_joint_forward, joint.arguments[2:]
    with torch.autocast("cpu", BF16):
        assert op(joint.f.bfloat16(), joint.g, *rest)[0].dtype == F32
        assert op(joint.f.bfloat16(), joint.g.bfloat16(), *rest)[0].dtype == BF16
    found = torch.func.grad(lambda f: op(f, joint.g, *rest, True)[0].square().sum())(joint.f.detach())
    output = op(*joint.arguments, True)[0]
    torch.testing.assert_close(found, torch.autograd.grad(output.square().sum(), joint.f)[0])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda f: op(f, joint.g, *rest)[0], (joint.f.detach(),), (joint.f.detach(),))
    grad = joint.grad.requires_grad_()
    (first,) = torch.autograd.grad(op(*joint.arguments)[0], joint.f, grad, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        first.sum().backward()
    wide = Joint((2, 3, 2, 5), F64, "cpu")
    assert torch.autograd.gradcheck(lambda f, g: op(f, g, *wide.arguments[2:], True)[0], wide.arguments[:2])


def test_compiled():
    """One graph for every length, with dropout in it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, counts = CompileCounterWithBackend("aot_eager"), []
    module = TransducerJoint(relu=True)
    dropping = TransducerJoint(dropout=True, dropout_prob=0.5)

    def function(f, g, f_len, g_len):
        return module(f * 2, g, f_len, g_len)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for frames in (6, 9, 12):
        arguments = Joint((2, frames, 3, 16), F32, "cpu").arguments[:4]
        ours, eager = (torch.autograd.grad(f(*arguments).sum(), arguments[:2]) for f in (compiled, function))
        torch.testing.assert_close(ours, eager)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1
    torch.manual_seed(3)
    output = torch.compile(dropping, fullgraph=True, backend="aot_eager")(*arguments)
    live = output[output != -1]
    assert 0.3 < (live == 0).double().mean() < 0.7
    torch.autograd.grad(output.sum(), arguments[:2])


def test_dropout_follows_torchs_generator(variant):
    arguments = Joint((2, 5, 3, 16), F32, variant.device).arguments[:4]
    module = TransducerJoint(dropout=True, dropout_prob=0.5)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append([module(*arguments), module(*arguments)])
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
    assert not torch.equal(outputs[0][0], outputs[0][1]) and not torch.equal(outputs[0][0], outputs[2][0])


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Forward, dropout and backward in one graph: every replay drops others, and the sums are right."""
    joint = Joint((16, 40, 37, 64), BF16, "cuda")
    module = TransducerJoint(dropout=True, dropout_prob=0.5, probe_mask=True)

    def step():
        module.mask_probe.clear()
        output = module(*joint.arguments[:4])
        return output, *torch.autograd.grad(output, (joint.f, joint.g), joint.grad), module.mask_probe[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(found[3].clone())
        grad = torch.where(masks[-1].bool(), joint.grad.double() * 2, 0.0)
        for a, dim in ((found[1], 2), (found[2], 1)):
            torch.testing.assert_close(a.double(), grad.sum(dim), rtol=1e-2, atol=1e-2)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of GPU memory")
    batch, frames, labels, hidden = 5, 1000, 430, 1024
    f = torch.randn(batch, frames, hidden, device="cuda", dtype=BF16).requires_grad_()
    g = torch.randn(batch, labels, hidden, device="cuda", dtype=BF16).requires_grad_()
    f_len, g_len = (torch.full((batch,), n, device="cuda", dtype=torch.int32) for n in (frames, labels))
    output, _ = torch.ops.apex.transducer_joint_forward(f, g, f_len, g_len, None, 0, True)
    for b, t in ((0, 0), (2, 500), (4, 999)):
        wanted = torch.relu(f[b, t] + g[b])
        assert torch.equal(output[b, t], wanted)
    of_f, of_g = torch.autograd.grad(output, (f, g), output.detach())
    last = output[4].detach().float()
    torch.testing.assert_close(of_f[4].float(), last.sum(1), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(of_g[4].float(), last.sum(0), rtol=1e-2, atol=1e-2)
