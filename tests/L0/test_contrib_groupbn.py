"""apex.contrib.groupbn and apex.contrib.cudnn_gbn in one process, against torch's batch norm."""

from __future__ import annotations

import copy
import inspect
import pickle

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64
from torch_defaults import float32_on_cpu

from apex.contrib import cudnn_gbn, groupbn
from apex.contrib.groupbn import batch_norm
from apex.parallel import _group_batch_norm

BatchNorm2d_NHWC = float32_on_cpu()(groupbn.BatchNorm2d_NHWC)
GroupBatchNorm2d = float32_on_cpu()(cudnn_gbn.GroupBatchNorm2d)
CHANNELS_LAST = torch.channels_last
TOLERANCE = {F32: 3e-5, F16: 3e-3, BF16: 2e-2, F64: 1e-12}


def random(shape, dtype, device, seed=1):
    return lists.random(dtype, device, (shape,), seed=seed)[0]


def pair(channels, device, make=BatchNorm2d_NHWC, **options):
    """(ours, torch's in float64) with the same weights, which are not the initial ones."""
    ours, theirs = make(channels, **options), torch.nn.BatchNorm2d(channels, dtype=F32, device="cpu")
    for seed, (a, b) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
        with torch.no_grad():
            b.copy_(a.copy_(random(a.shape, F32, "cpu", seed=seed) + 1))
    return ours.to(device), theirs.double()


def same(found, expected, tolerance=3e-5):
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        found.detach().cpu().double(), expected.detach().double(), rtol=tolerance, atol=tolerance * scale
    )


def check(ours, theirs, x, z, relu, nhwc=False, steps=2):
    """Outputs, gradients and running statistics; x and z are [N, C, H, W], and handed over as NHWC if `nhwc`."""
    tolerance = TOLERANCE[x.dtype]
    for step in range(steps):
        leaves = [t.detach() for t in ([x] if z is None else [x, z])]
        leaves = [(t.movedim(1, -1).contiguous() if nhwc else t).requires_grad_() for t in leaves]
        wide = [t.detach().cpu().double().requires_grad_() for t in ([x] if z is None else [x, z])]
        y = ours(*leaves)
        expected = theirs(wide[0])
        expected = expected if z is None else expected + wide[1]
        expected = expected.relu() if relu else expected
        assert y.dtype == x.dtype and y.is_contiguous(
            memory_format=torch.contiguous_format if nhwc else CHANNELS_LAST
        )
        same(y.movedim(-1, 1) if nhwc else y, expected, tolerance)
        gradient = random(x.shape, y.dtype, y.device, seed=10 + step)
        # Where the rounded output is on the other side of 0, both gradients are right.
        gradient[((y.movedim(-1, 1) if nhwc else y) > 0) != (expected > 0).to(y.device)] = 0
        given = gradient.movedim(1, -1) if nhwc else gradient
        found = torch.autograd.grad(y, [*leaves, *ours.parameters()], given)
        wanted = torch.autograd.grad(expected, [*wide, *theirs.parameters()], gradient.cpu().double())
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert a.dtype == (x.dtype if i < len(leaves) else F32)
            same(a.movedim(-1, 1) if nhwc and i < len(leaves) else a, b, 2 * tolerance)
    same(ours.running_mean, theirs.running_mean, tolerance)
    same(ours.running_var, theirs.running_var, tolerance)


@pytest.mark.parametrize("form", ["nhwc", "seen", "converted"])
@pytest.mark.parametrize("mode", ["", "relu", "add relu", "add"])
def test_like_torch(variant, form, mode):
    """The three layouts that public apex takes, in training and in eval mode, both with gradients."""
    relu, shape = "relu" in mode, (3, 8, 4, 5)
    ours, theirs = pair(8, variant.device, fuse_relu=relu, torch_channels_last=form == "converted")
    x, z = (random(shape, F32, variant.device, seed=s) for s in (1, 2))
    if form == "seen":
        x = x.contiguous(memory_format=CHANNELS_LAST)
    z = z if "add" in mode else None
    check(ours, theirs, x, z, relu, nhwc=form == "nhwc")
    batch = x.double().cpu()
    same(ours.minibatch_mean, batch.mean((0, 2, 3)))
    same(ours.minibatch_riv, (batch.var((0, 2, 3), unbiased=False) + ours.eps).rsqrt())
    before = copy.deepcopy(ours.state_dict())
    check(ours.eval(), theirs.eval(), x, z, relu, nhwc=form == "nhwc")
    torch.testing.assert_close(ours.state_dict(), before, rtol=0, atol=0)
    if variant.simt:
        assert variant.kernels["groupbn_forward_last_f32"] and variant.kernels["groupbn_backward_last_f32"]


@pytest.mark.parametrize("dtype", [F16, BF16, F64], ids=str)
@pytest.mark.parametrize("channels", [5, 16, 24])
def test_dtypes(variant, dtype, channels):
    """Half inputs beside float32 parameters; any number of channels."""
    ours, theirs = pair(channels, variant.device, fuse_relu=True, torch_channels_last=True)
    x, z = (random((4, channels, 5, 6), dtype, variant.device, seed=s) for s in (1, 2))
    if dtype == F64:
        wide = ours.double()
        y = wide(x, z)
        same(y, (theirs(x.cpu()) + z.cpu()).relu(), 1e-12)
        return
    check(ours, theirs, x, z, True)


def test_the_backward_needs_neither_output_nor_residual():
    """What is kept for it: the input, a bit for each element, and numbers of channels."""
    ours = BatchNorm2d_NHWC(8, fuse_relu=True, torch_channels_last=True)
    x, z = (random((4, 8, 5, 6), F16, "cpu", seed=s).requires_grad_() for s in (1, 2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(x, z)
    large = [t for t in kept if t.numel() * t.element_size() > 32]
    assert sorted(t.numel() * t.element_size() for t in large) == [x.numel() // 8, 2 * x.numel()]


def test_momentum_none(variant):
    ours, theirs = pair(8, variant.device, torch_channels_last=True)
    ours.momentum = theirs.momentum = None
    check(ours, theirs, random((3, 8, 4, 5), F32, variant.device), None, False)


def test_frozen_parts(variant):
    """Gradients that nobody wants are not made; those that are wanted stay the same."""
    ours, _ = pair(8, variant.device, fuse_relu=True, torch_channels_last=True)
    inputs = [random((3, 8, 4, 5), F32, variant.device, seed=s).requires_grad_() for s in (1, 2)]
    leaves = [*inputs, ours.weight, ours.bias]
    gradient = random((3, 8, 4, 5), F32, variant.device, seed=3)
    everything = torch.autograd.grad(ours(*inputs), leaves, gradient)
    for kept in ([0], [1], [2], [3], [1, 2], [0, 3], [2, 3]):
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i in kept)
        found = torch.autograd.grad(ours(*inputs), [leaves[i] for i in kept], gradient)
        lists.assert_same_bits(found, [everything[i] for i in kept])


def test_empty_batch(variant):
    ours, _ = pair(8, variant.device, fuse_relu=True, torch_channels_last=True)
    x = torch.zeros(0, 8, 4, 5, device=variant.device, requires_grad=True, dtype=F32)
    y = ours(x, x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape and ours.weight.grad.eq(0).all()
    assert ours.running_mean.eq(0).all() and ours.running_var.eq(1).all()


def test_refused(variant):
    ours = BatchNorm2d_NHWC(8, fuse_relu=True).to(variant.device)

    def zeros(*shape, dtype=F32):
        return torch.zeros(shape, dtype=dtype, device=variant.device)

    with pytest.raises(ValueError, match="expected 4D input"):
        ours(zeros(2, 3, 8))
    with pytest.raises(ValueError, match=r"must be \[N, H, W, 8\], or \[N, 8, H, W\] in torch.channels_last"):
        ours(zeros(2, 8, 3, 3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        ours(zeros(1, 1, 1, 8))
    with pytest.raises(ValueError, match="z (must be as x|has shape)"):
        ours(zeros(2, 3, 3, 8), zeros(2, 3, 4, 8))
    with pytest.raises(TypeError, match="z has dtype"):
        ours(zeros(2, 3, 3, 8), zeros(2, 3, 3, 8, dtype=F16))
    with pytest.raises(TypeError, match="float64 goes with float64"):
        ours(zeros(2, 3, 3, 8, dtype=F64))
    assert ours.running_mean.eq(0).all() and ours.running_var.eq(1).all()  # nothing was counted
    with pytest.raises(ValueError, match=r"\[N, 8, H, W\], as torch_channels_last says"):
        BatchNorm2d_NHWC(8, torch_channels_last=True)(torch.zeros(2, 3, 3, 8, dtype=F32, device="cpu"))
    with pytest.raises(TypeError, match="pass max_cta_per_sm"):
        BatchNorm2d_NHWC(8, True, 1, 2)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        BatchNorm2d_NHWC(8, bn_group=2)
    with pytest.raises(ValueError, match="at least 1 rank"):
        BatchNorm2d_NHWC(8, bn_group=0)


@pytest.mark.parametrize("mode", ["relu", "add relu", ""])
def test_the_function_in_python_does_the_same(variant, mode):
    """GroupBatchNormFunction, which serves groups and torch.compile, to the last bit."""
    ours, _ = pair(8, variant.device, fuse_relu="relu" in mode, torch_channels_last=True)
    other = copy.deepcopy(ours)
    x, z = (random((3, 8, 4, 5), F16, variant.device, seed=s).requires_grad_() for s in (1, 2))
    leaves = [x, z] if "add" in mode else [x]
    gradient = random((3, 8, 4, 5), F16, variant.device, seed=3)
    for use_batch in (True, False):
        y = ours.train(use_batch)(*leaves)
        again, mean, riv = _group_batch_norm.GroupBatchNormFunction.apply(
            x, z if "add" in mode else None, other.weight, other.bias, other.running_mean, other.running_var, 0.1,
            1e-5, ours.fuse_relu, use_batch, False,
        )  # fmt: skip
        found = torch.autograd.grad(y, [*leaves, ours.weight, ours.bias], gradient)
        wanted = torch.autograd.grad(again, [*leaves, other.weight, other.bias], gradient)
        lists.assert_same_bits([y, *found], [again, *wanted])
        if use_batch:
            lists.assert_same_bits([ours.minibatch_mean, ours.minibatch_riv], [mean, riv])
    lists.assert_same_bits(ours.state_dict().values(), other.state_dict().values())


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad,
        lambda loss: lambda x: torch.func.jvp(loss, (x,), (x,)),
        torch.func.hessian,  # was zeros
        lambda loss: torch.func.jacrev(torch.func.jacrev(loss)),  # likewise
        lambda loss: lambda x: torch.func.vmap(loss)(x.unsqueeze(0)),
    ],
    ids=["grad", "jvp", "hessian", "jacrev", "vmap"],
)
def test_transforms_are_refused(transform):
    """By name: the layer that runs in C++ is no op of the dispatcher, and outer transforms would not see it."""
    ours = BatchNorm2d_NHWC(8, torch_channels_last=True).eval()
    with pytest.raises(NotImplementedError, match="torch.func"):
        transform(lambda x: ours(x).pow(3).sum())(random((3, 8, 4, 5), F32, "cpu"))


def test_shapes_alone():
    """On the meta device, which has no autocast."""
    for norm, shape in ((GroupBatchNorm2d(8, 1), (3, 8, 4, 5)), (BatchNorm2d_NHWC(8), (3, 4, 5, 8))):
        x = torch.empty(shape, device="meta", dtype=F32)
        assert norm.to("meta")(x).shape == x.shape


@pytest.mark.parametrize("trained", [True, False])
def test_double_backward_is_refused(trained):
    """Also where the input alone has a gradient."""
    ours = BatchNorm2d_NHWC(8, torch_channels_last=True).requires_grad_(trained)
    x = random((3, 8, 4, 5), F32, "cpu").requires_grad_()
    weights = random((3, 8, 4, 5), F32, "cpu")
    for loss in (
        lambda y: y.pow(3).sum(),
        lambda y: (y * weights).sum(),
    ):  # the second's gradient has no history
        (grad,) = torch.autograd.grad(loss(ours(x)), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable|double backward"):
            torch.autograd.grad(grad.pow(2).sum() + x.sum(), x)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3, padding=1, dtype=F32, device="cpu")
        self.norm = BatchNorm2d_NHWC(8, fuse_relu=True, torch_channels_last=True)
        self.plain = GroupBatchNorm2d(8, 1)

    def forward(self, x):
        y = self.convolution(x)
        return self.plain(self.norm(y, y.sin())).sin()


def test_compiled(counting_backend):
    """One graph, whose running statistics move as in eager mode."""
    torch.manual_seed(0)
    eager = Block()
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, fullgraph=True, backend=counting_backend)
    for seed in (1, 2):
        x = random((4, 3, 7, 7), F32, "cpu", seed=seed).requires_grad_()
        found = torch.autograd.grad(compiled(x).sum(), [x, *other.parameters()])
        wanted = torch.autograd.grad(eager(x).sum(), [x, *eager.parameters()])
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert counting_backend.frame_count == 1
    for (name, a), (_, b) in zip(other.named_buffers(), eager.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_state_and_copies():
    """State dicts are those of torch's batch norm; layers are copied and pickled."""
    ours, theirs = pair(8, "cpu", torch_channels_last=True)
    x = random((4, 8, 3, 3), F32, "cpu")
    ours(x)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(copied.state_dict(), ours.state_dict())
        torch.testing.assert_close(copied.eval()(x), copy.deepcopy(ours).eval()(x))


def test_signatures():
    """Public apex's, which scripts call by position."""
    module = "self num_features fuse_relu bn_group torch_channels_last max_cta_per_sm cta_launch_margin multi_stream"
    assert list(inspect.signature(groupbn.BatchNorm2d_NHWC.__init__).parameters) == module.split()
    assert list(inspect.signature(groupbn.BatchNorm2d_NHWC.forward).parameters) == ["self", "x", "z"]
    rest = (
        "bn_group my_data pair_data magic pair_data2 pair_data3 fwd_occup fwd_grid_x bwd_occup bwd_grid_x "
        "multi_stream"
    )
    plain = (
        f"ctx x s b rm riv mini_m mini_riv ret_cta mom epsilon fuse_relu is_train torch_channels_last {rest}"
    )
    assert list(inspect.signature(batch_norm.bn_NHWC_impl.forward).parameters) == plain.split()
    add = f"ctx x z s b rm riv mini_m mini_riv grid_dim_y ret_cta mom epsilon is_train torch_channels_last {rest}"
    assert list(inspect.signature(batch_norm.bn_addrelu_NHWC_impl.forward).parameters) == add.split()
    module = "self num_features group_size eps momentum affine track_running_stats"
    assert list(inspect.signature(cudnn_gbn.GroupBatchNorm2d.__init__).parameters) == module.split()


@pytest.mark.parametrize("add", [False, True], ids=["", "z"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_functions_of_public_apex(variant, add, train):
    """bn_NHWC_impl and bn_addrelu_NHWC_impl, called as public apex's module calls them, do what the module does."""
    ours, _ = pair(8, variant.device, fuse_relu=True, torch_channels_last=True)
    ours.train(train)
    other = copy.deepcopy(ours)
    x, z = (random((3, 8, 4, 5), F16, variant.device, seed=s) for s in (1, 2))
    leaves = [t.contiguous(memory_format=CHANNELS_LAST).requires_grad_() for t in ([x, z] if add else [x])]
    mini = [torch.zeros(8, device=variant.device, dtype=F32) for _ in range(2)]
    state = (other.weight, other.bias, other.running_mean, other.running_var, *mini)
    end = (1, None, None, torch.tensor([0], dtype=torch.int32, device="cpu"), None, None, 2, 16, 2, 16, False)
    if add:
        y = batch_norm.bn_addrelu_NHWC_impl.apply(*leaves, *state, 1, None, 0.1, 1e-5, train, True, *end)
    else:
        y = batch_norm.bn_NHWC_impl.apply(*leaves, *state, None, 0.1, 1e-5, True, train, True, *end)
    expected = ours(*leaves)
    lists.assert_same_bits([y], [expected])
    torch.testing.assert_close(other.state_dict(), ours.state_dict(), rtol=0, atol=0)
    if not train:
        return  # as in public apex, eval mode records nothing
    lists.assert_same_bits(mini, [ours.minibatch_mean, ours.minibatch_riv])
    gradient = random(y.shape, y.dtype, y.device, seed=5)
    found = torch.autograd.grad(y, [*leaves, other.weight, other.bias], gradient)
    wanted = torch.autograd.grad(expected, [*leaves, ours.weight, ours.bias], gradient)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-4)  # sums of the reference depend on strides


# ---- GroupBatchNorm2d ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [dict(), dict(momentum=None), dict(affine=False), dict(eps=0.1)], ids=str)
def test_group_batch_norm(variant, options):
    ours = GroupBatchNorm2d(8, 1, **options).to(variant.device)
    theirs = torch.nn.BatchNorm2d(8, dtype=F64, device="cpu", **options)
    x = random((3, 8, 4, 5), F32, variant.device)
    check(ours, theirs, x, None, False)
    assert torch.equal(ours.num_batches_tracked.cpu(), theirs.num_batches_tracked)
    assert (ours.group_id, ours.group_rank) == (0, 0)
    check(ours.eval(), theirs.eval(), x, None, False)


def test_group_batch_norm_without_running_statistics(variant):
    ours = GroupBatchNorm2d(8, 1, track_running_stats=False).to(variant.device)
    x = random((3, 8, 4, 5), F16, variant.device)
    expected = torch.nn.functional.batch_norm(x.cpu().double(), None, None, training=True)
    same(ours(x), expected, 3e-3)
    same(ours.eval()(x), expected, 3e-3)


def test_group_batch_norm_under_autocast():
    """As in public apex the input is cast."""
    ours = GroupBatchNorm2d(8, 1)
    x = random((3, 8, 4, 5), F32, "cpu").requires_grad_()
    with torch.autocast("cpu", BF16):
        y = ours(x)
    y.sum().backward()
    assert y.dtype == BF16 and x.grad.dtype == ours.weight.grad.dtype == F32


def test_group_batch_norm_refused():
    ours = GroupBatchNorm2d(8, 1)
    with pytest.raises(ValueError, match="expected 4D input"):
        ours(torch.zeros(2, 8, 3, dtype=F32, device="cpu"))
    with pytest.raises(ValueError, match="with 3 channels"):
        ours(torch.zeros(2, 3, 3, 8, dtype=F32, device="cpu"))
