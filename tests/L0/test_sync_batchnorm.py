"""apex.parallel.SyncBatchNorm and convert_syncbn_model in one process, against torch's batch norms."""

from __future__ import annotations

import copy
import inspect
import pickle

import lists
import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64
from torch_defaults import float32_on_cpu

from apex import parallel
from apex.parallel import SyncBatchNorm, convert_syncbn_model, optimized_sync_batchnorm_kernel
from apex.parallel.sync_batchnorm_kernel import SyncBatchnormFunction

TORCH = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
SHAPES = [(8, 4), (3, 5, 7), (4, 3, 6, 8), (2, 16, 5, 5), (2, 3, 2, 4, 5), (6, 8, 1, 1)]


def random(shape, dtype, device, seed=1):
    return lists.random(dtype, device, (shape,), seed=seed)[0]


@float32_on_cpu()
def pair(shape, device, dtype=F32, **options):
    """(ours, torch's) with the same weights, which are not the initial ones."""
    ours = SyncBatchNorm(shape[1], **options)
    theirs = TORCH[len(shape)](shape[1], **{k: v for k, v in options.items() if k not in ("fuse_relu",)})
    for i, (a, b) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
        with torch.no_grad():
            a.copy_(random(a.shape, F32, "cpu", seed=i) + 1)
            b.copy_(a)
    return ours.to(device, dtype), theirs.to("cpu", F64)


def same(found, expected, tolerance=3e-5):
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        found.detach().cpu().double(), expected.detach(), rtol=tolerance, atol=tolerance * scale
    )


def check(ours, theirs, x, z=None, relu=False, tolerance=3e-5):
    """Two steps: outputs, gradients, running statistics. `theirs` runs in float64."""
    for step in (1, 2):
        leaves = [t.detach().requires_grad_() for t in ([x] if z is None else [x, z])]
        wide = [t.detach().to("cpu", F64).requires_grad_() for t in leaves]
        y = ours(*leaves)
        expected = theirs(wide[0])
        expected = expected if z is None else expected + wide[1]
        expected = expected.relu() if relu else expected
        assert y.dtype == x.dtype
        same(y, expected, tolerance)
        gradient = random(y.shape, y.dtype, y.device, seed=10 + step)
        found = torch.autograd.grad(y, [*leaves, *ours.parameters()], gradient)
        wanted = torch.autograd.grad(expected, [*wide, *theirs.parameters()], gradient.cpu().double())
        for a, b in zip(found, wanted, strict=True):
            same(a, b, tolerance)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        if a.dtype == torch.int64:
            assert torch.equal(a.cpu(), b)
        else:
            same(a, b, tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_like_torch(variant, shape):
    """Report: 2-D input failed."""
    check(*pair(shape, variant.device), random(shape, F32, variant.device))


@pytest.mark.parametrize(
    "options",
    [
        dict(affine=False),
        dict(track_running_stats=False),
        dict(momentum=None),
        dict(momentum=0.7, eps=0.1),
        dict(affine=False, track_running_stats=False),
    ],
    ids=str,
)
def test_options(variant, options):
    """Report: affine=False failed on (4, 100, 14, 14); half as many here."""
    for shape in [(2, 100, 14, 14), (8, 4)]:
        if variant.simt and shape[1] == 100:
            shape = (2, 10, 14, 14)
        check(*pair(shape, variant.device, **options), random(shape, F32, variant.device))


@pytest.mark.parametrize("dtype, tolerance", [(F16, 3e-3), (BF16, 2e-2), (F64, 1e-12)], ids=str)
def test_dtypes(variant, dtype, tolerance):
    """Half inputs with float32 weights, and modules in the input's dtype."""
    shape = (4, 6, 5, 8)
    x = random(shape, dtype, variant.device)
    check(*pair(shape, variant.device, dtype), x, tolerance=tolerance)
    if dtype != F64:
        ours, theirs = pair(shape, variant.device)
        y = ours(x)
        assert y.dtype == dtype and ours.running_mean.dtype == F32
        same(y, theirs(x.cpu().double()), tolerance)


@pytest.mark.parametrize("channel_last", [False, True], ids=["", "channel_last"])
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("add", [False, True], ids=["", "z"])
def test_add_and_relu(variant, channel_last, relu, add):
    """In training and in eval mode, both with gradients."""
    shape = (3, 8, 4, 5)
    ours, theirs = pair(shape, variant.device, fuse_relu=relu)
    x, z = (random(shape, F32, variant.device, seed=s) for s in (1, 2))
    move = (lambda t: t.movedim(1, -1).contiguous()) if channel_last else (lambda t: t)
    back = (lambda t: t.movedim(-1, 1)) if channel_last else (lambda t: t)
    ours._specify_channel_last(channel_last)

    def layer(*inputs):
        return back(ours(*map(move, inputs)))

    layer.parameters, layer.buffers = ours.parameters, ours.buffers
    check(layer, theirs, x, z if add else None, relu)
    ours.eval(), theirs.eval()
    check(layer, theirs, x, z if add else None, relu)


@pytest.mark.parametrize("shape", [(2, 16, 5, 6), (2, 8, 3, 4, 5)], ids=str)
def test_channels_last_is_seen(variant, shape):
    """torch.channels_last inputs give such outputs and gradients, by kernels for channels last."""
    format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    ours, theirs = pair(shape, variant.device)
    x = random(shape, F32, variant.device).contiguous(memory_format=format)
    check(ours, theirs, x)
    x.requires_grad_()
    y = ours(x)
    y.sum().backward()
    assert y.is_contiguous(memory_format=format) and x.grad.is_contiguous(memory_format=format)
    if variant.simt:
        assert (
            variant.kernels["welford_mean_var_last_f32"] and not variant.kernels["welford_mean_var_first_f32"]
        )


def test_eval(variant):
    """Report: eval without running statistics failed. It then uses its batch, as torch does."""
    x = random((4, 6, 5), F32, variant.device)
    for options in (dict(), dict(track_running_stats=False), dict(affine=False)):
        ours, theirs = pair(x.shape, variant.device, **options)
        ours(x), theirs(x.cpu().double())
        before = copy.deepcopy(ours.state_dict())
        check(ours.eval(), theirs.eval(), x)
        for name, value in ours.state_dict().items():
            assert torch.equal(value, before[name])


def test_used_twice(variant):
    """One layer at two places of a model, one backward."""
    ours, theirs = pair((4, 3, 6), variant.device)
    x = random((4, 3, 6), F32, variant.device).requires_grad_()
    wide = x.detach().cpu().double().requires_grad_()
    found = torch.autograd.grad(ours(ours(x).square()).pow(3).sum(), [x, *ours.parameters()])
    wanted = torch.autograd.grad(theirs(theirs(wide).square()).pow(3).sum(), [wide, *theirs.parameters()])
    for a, b in zip(found, wanted, strict=True):
        same(a, b, 1e-4)
    same(ours.running_var, theirs.running_var)
    assert ours.num_batches_tracked == 2


def test_frozen_parts(variant):
    """Gradients that nobody wants are not made; those that are wanted stay the same."""
    ours, _ = pair((4, 3, 6), variant.device)
    x = random((4, 3, 6), F32, variant.device)
    y = ours(x.requires_grad_())
    everything = torch.autograd.grad(y, [x, ours.weight, ours.bias], torch.ones_like(y) * x.detach())
    for kept in ([0], [1], [2], [1, 2], [0, 2]):
        leaves = [x.detach(), ours.weight, ours.bias]
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i in kept)
        y = ours(leaves[0])
        found = torch.autograd.grad(y, [leaves[i] for i in kept], torch.ones_like(y) * x.detach())
        lists.assert_same_bits(found, [everything[i] for i in kept])


def test_large_mean(variant):
    """Mean 1e4, deviation 1, float32: as far from float64 as a rounding of the mean."""
    x = random((8, 3, 40), F32, variant.device) + 1e4
    ours, theirs = pair(x.shape, variant.device)
    same(ours(x) / 10, theirs(x.cpu().double()) / 10, 2e-4)
    same(ours.running_var, theirs.running_var, 1e-5)


def test_empty_batch(variant):
    """Alone it gives what there is to give: nothing; running statistics stay."""
    ours, _ = pair((4, 3, 6), variant.device)
    x = torch.zeros(0, 3, 6, device=variant.device, requires_grad=True, dtype=F32)
    y = ours(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 3, 6) and ours.weight.grad.eq(0).all()
    assert ours.running_mean.eq(0).all() and ours.running_var.eq(1).all()


def test_refused(variant):
    ours, _ = pair((4, 3, 6), variant.device)
    for shape in [(1, 3), (1, 3, 1), (1, 3, 1, 1)]:
        with pytest.raises(
            ValueError, match="Expected more than 1 value per channel when training, got input size"
        ):
            ours(torch.zeros(shape, device=variant.device, dtype=F32))
    with pytest.raises(ValueError, match="at least 2D input"):
        ours(torch.zeros(3, device=variant.device, dtype=F32))
    with pytest.raises(
        ValueError, match=r"SyncBatchNorm\(3\) got an input of shape \[2, 4, 5\], with 4 channels"
    ):
        ours(torch.zeros(2, 4, 5, device=variant.device, dtype=F32))
    with pytest.raises(ValueError, match="z must be as the input"):
        ours(
            torch.zeros(2, 3, 5, device=variant.device, dtype=F32),
            torch.zeros(2, 3, 4, device=variant.device, dtype=F32),
        )
    with pytest.raises(TypeError, match="float64 goes with float64"):
        ours(torch.zeros(2, 3, 5, device=variant.device, dtype=F64))
    assert ours.running_mean.eq(0).all() and ours.running_var.eq(1).all()  # nothing was counted


def test_double_backward_is_refused():
    ours, _ = pair((4, 3, 6), "cpu")
    x = random((4, 3, 6), F32, "cpu").requires_grad_()
    weights = random((4, 3, 6), F32, "cpu")
    for loss in (
        lambda y: y.pow(3).sum(),
        lambda y: (y * weights).sum(),
    ):  # the second's gradient has no history
        (grad,) = torch.autograd.grad(loss(ours(x)), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable|gradient of its gradient"):
            torch.autograd.grad(grad.pow(2).sum() + x.sum(), x)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast(dtype):
    """As torch's: what a half convolution gives stays half; weights and statistics stay float32."""
    convolution = torch.nn.Conv2d(3, 8, 3, dtype=F32, device="cpu")
    ours, theirs = pair((2, 8, 4, 4), "cpu")
    x = random((2, 3, 6, 6), F32, "cpu")
    with torch.autocast("cpu", dtype):
        between = convolution(x)
        y = ours(between)
    assert between.dtype == y.dtype == dtype
    y.float().square().sum().backward()
    same(y, theirs(between.double()), 2e-2)
    assert ours.weight.grad.dtype == convolution.weight.grad.dtype == ours.running_var.dtype == F32


class Block(torch.nn.Module):
    @float32_on_cpu()
    def __init__(self, **options):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3)
        self.norm = SyncBatchNorm(8, **options)

    def forward(self, x):
        return self.norm(self.convolution(x)).sin()


@pytest.mark.parametrize("options", [dict(), dict(momentum=None, fuse_relu=True)], ids=str)
def test_compiled(counting_backend, options):
    """One graph, whose running statistics move as in eager mode."""
    torch.manual_seed(0)
    eager = Block(**options)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, fullgraph=True, backend=counting_backend)
    for seed in (1, 2):
        x = random((4, 3, 7, 7), F32, "cpu", seed=seed).requires_grad_()
        found = torch.autograd.grad(compiled(x).sum(), [x, *other.parameters()])
        wanted = torch.autograd.grad(eager(x).sum(), [x, *eager.parameters()])
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert counting_backend.frame_count == 1
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name])


def test_signatures():
    """Public apex's, which scripts call by position; what is added comes behind."""
    module = "self num_features eps momentum affine track_running_stats process_group channel_last fuse_relu"
    assert list(inspect.signature(SyncBatchNorm.__init__).parameters) == module.split()
    function = (
        "ctx input z weight bias running_mean running_variance eps track_running_stats momentum process_group "
        "channel_last fuse_relu"
    )
    assert (
        list(inspect.signature(optimized_sync_batchnorm_kernel.SyncBatchnormFunction.forward).parameters)[:13]
        == function.split()
    )
    assert list(inspect.signature(convert_syncbn_model).parameters) == [
        "module",
        "process_group",
        "channel_last",
    ]
    assert {"SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"} <= set(parallel.__all__)


def test_state_and_copies():
    """State dicts go to and from torch's batch norm; layers are copied and pickled."""
    ours, theirs = pair((4, 3, 6), "cpu")
    ours(random((4, 3, 6), F32, "cpu"))
    theirs.load_state_dict(ours.state_dict())
    fresh = float32_on_cpu()(SyncBatchNorm)(3)
    fresh.load_state_dict(theirs.state_dict())
    for copied in (fresh, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        for name, value in ours.state_dict().items():
            assert torch.equal(copied.state_dict()[name].to(value.dtype), value)
        x = random((4, 3, 6), F32, "cpu")
        torch.testing.assert_close(copied.eval()(x), copy.deepcopy(ours).eval()(x))


# ---- convert_syncbn_model -------------------------------------------------------------------------------------


def test_convert():
    """Every kind of batch norm, in place; parameters, buffers and modes stay, so optimizers go on."""
    shared = torch.nn.BatchNorm1d(5)
    model = torch.nn.ModuleDict(
        {
            "one": torch.nn.Sequential(torch.nn.Linear(5, 5), shared),
            "two": torch.nn.BatchNorm2d(3, eps=0.1, momentum=None, affine=False),
            "three": torch.nn.BatchNorm3d(3, track_running_stats=False),
            "torch": torch.nn.SyncBatchNorm(4),
            "instance": torch.nn.InstanceNorm2d(3, affine=True),
            "again": shared,
            "ours": SyncBatchNorm(3, fuse_relu=True),
        }
    )
    model["two"].eval()
    parameters, buffers = list(model.parameters()), dict(model.named_buffers())
    converted = convert_syncbn_model(model, channel_last=True)
    assert converted is model
    assert [type(m) is SyncBatchNorm for m in model.values()] == [False, True, True, True, False, True, True]
    assert model["again"] is model["one"][1] and model["ours"].fuse_relu
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(value is buffers[name] for name, value in model.named_buffers())
    two = model["two"]
    assert (two.eps, two.momentum, two.affine, two.training, two.channel_last) == (
        0.1,
        None,
        False,
        False,
        True,
    )
    assert model["three"].running_mean is None
    assert not any(type(m) is torch.nn.BatchNorm1d for m in model.modules())


def test_convert_gives_the_same():
    torch.manual_seed(0)
    with float32_on_cpu():
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    converted = convert_syncbn_model(copy.deepcopy(model))
    x = random((4, 3, 6, 6), F32, "cpu")
    torch.testing.assert_close(converted(x), model(x))
    torch.testing.assert_close(converted.state_dict(), model.state_dict())
    torch.testing.assert_close(converted.eval()(x), model.eval()(x))
    single = convert_syncbn_model(torch.nn.BatchNorm2d(4))
    assert type(single) is SyncBatchNorm


def test_convert_lazy():
    model = torch.nn.Sequential(torch.nn.LazyBatchNorm1d(dtype=F32, device="cpu"))
    with pytest.raises(ValueError, match="run one batch"):
        convert_syncbn_model(model)
    model(torch.zeros(3, 4, dtype=F32, device="cpu"))
    assert convert_syncbn_model(model)[0].num_features == 4


def test_inference_mode(variant):
    ours, theirs = pair((4, 3, 6), variant.device)
    x = random((4, 3, 6), F32, variant.device)
    with torch.inference_mode():
        same(ours(x), F.batch_norm(x.cpu().double(), None, None, theirs.weight, theirs.bias, True))


@pytest.mark.parametrize("affine", [True, False], ids=["", "no affine"])
@pytest.mark.parametrize("shape", [(8, 4), (4, 3, 6, 8)], ids=str)
def test_given_statistics(variant, shape, affine):
    """What layers of one's own that gather statistics by themselves are built of."""
    x = random(shape, F32, variant.device)
    parameters = (
        [random(shape[1:2], F32, variant.device, seed=i) + 1 for i in (2, 3)] if affine else [None, None]
    )
    others = [d for d in range(len(shape)) if d != 1]
    mean, variance = x.mean(others), x.var(others, correction=0)
    leaves = [t.detach().requires_grad_() for t in (x, *parameters) if t is not None]
    wide = [t.detach().cpu().double().requires_grad_() for t in leaves]
    weights = leaves[1:] or parameters
    y = SyncBatchnormFunction.apply(leaves[0], *weights, mean, variance, 1e-5, None, 1)
    expected = F.batch_norm(wide[0], None, None, *(wide[1:] or parameters), True, 0.1, 1e-5)
    same(y, expected)
    gradient = random(shape, F32, variant.device, seed=9)
    found = torch.autograd.grad(y, leaves, gradient)
    wanted = torch.autograd.grad(expected, wide, gradient.cpu().double())
    for a, b in zip(found, wanted, strict=True):
        same(a, b)
