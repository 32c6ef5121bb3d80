"""apex.contrib.bottleneck and fast_bottleneck: the block of frozen batch norms by torch's own layers."""

from __future__ import annotations

import copy
import functools
import inspect

import lists
import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64
from torch.utils._python_dispatch import TorchDispatchMode
from torch_defaults import float32_on_cpu

from apex._legacy import fast_bottleneck as raw
from apex.contrib.bottleneck import Bottleneck, _block
from apex.contrib.bottleneck.bottleneck import (
    FrozenBatchNorm2d,
    bottleneck_function,
    drelu_dscale1,
    drelu_dscale2,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.usefixtures("exact_convolutions")
LAST, FIRST = torch.channels_last, torch.contiguous_format
# in, between, out, stride: the shortcut is x; has other channels; has a stride.
BLOCKS = [(16, 8, 16, 1), (16, 8, 24, 1), (16, 8, 16, 2)]
NHWC = (0, 2, 3, 1)


@pytest.fixture(params=[False, True], ids=["composed", "forked"])
def forked(request, monkeypatch):
    """Whether the gradients of x are added by a product, as those of large images are."""
    if request.param:
        monkeypatch.setattr(_block, "SMALLEST", 0)
        monkeypatch.setattr(_block, "_is_recorded", lambda x: True)
    return request.param


def block(sizes, dtype=F32, device="cpu", nhwc=False, **how):
    """A block whose norms do something."""
    torch.manual_seed(1)
    *channels, stride = sizes
    with float32_on_cpu():
        made = Bottleneck(*channels, stride=stride, use_cudnn=True, explicit_nhwc=nhwc, **how)
    for i, (name, buffer) in enumerate(made.named_buffers()):
        values = lists.random(F64, "cpu", (buffer.shape,), scale=0.2, seed=i)[0]
        buffer.copy_(values + (0.0 if name.endswith(("bias", "mean")) else 1.0))
    return made.to(device, dtype)


def image(sizes, dtype=F32, device="cpu", format=LAST, shape=(2, 7, 6)):
    n, *size = shape
    x = lists.random(dtype, device, ((n, sizes[0], *size),), seed=20)[0]
    return x.contiguous(memory_format=format).requires_grad_()


def near(found, wanted, loose=16):
    unit = loose * lists.ROUNDING[found.dtype]
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted.double(), rtol=unit, atol=unit * scale)


def run(module, x, g):
    """[output, gradient of x, of the weights]"""
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, *module.w_conv], g)]


def gradient_of(module, x):
    return lists.random(x.dtype, x.device, (module(x).shape,), seed=21)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", [LAST, FIRST], ids=["last", "first"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_values(device, dtype, format, forked):
    """One pass behind each convolution is torch's layers one by one; by error against float64 no worse than these."""
    for sizes in BLOCKS:
        module = block(sizes, dtype, device)
        x = image(sizes, dtype, device, format)
        g = gradient_of(module, x)
        wide = copy.deepcopy(module).double()
        wide.use_cudnn = False
        exact = run(wide, x.detach().double().requires_grad_(), g.double())
        found = run(module, x, g)
        module.use_cudnn = False
        plain = run(module, x, g)
        assert found[0].is_contiguous(memory_format=format)
        for i, (a, b, e) in enumerate(zip(found, plain, exact, strict=True)):
            assert a.dtype == dtype and a.shape == b.shape
            error, theirs = ((t.detach().double() - e).norm() / e.norm() for t in (a, b))
            # Halves near 0 lie on either side of a ReLU by luck: one that differs shows in every gradient.
            luck = 0.15 if i and dtype in (F16, BF16) else 0.0
            assert error <= 1.1 * theirs + 4 * lists.ROUNDING[dtype] + luck, (sizes, i, error, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_explicit_nhwc(device, forked):
    """Images and weights with channels last in their shape give the same."""
    for sizes in BLOCKS:
        module = block(sizes, F32, device)
        other = block(sizes, F32, device, nhwc=True)
        assert [w.shape[-1] for w in other.w_conv] == [w.shape[1] for w in module.w_conv]
        other.load_state_dict(
            {n: t.permute(NHWC) if t.dim() == 4 else t for n, t in module.state_dict().items()}
        )
        x = image(sizes, F32, device)
        g = gradient_of(module, x)
        wanted = run(module, x, g)
        y = x.detach().permute(NHWC).requires_grad_()
        found = run(other, y, g.permute(NHWC))
        for a, b in zip(found, wanted, strict=True):
            near(a, b.permute(NHWC))
        assert found[0].is_contiguous()
        other.use_cudnn = False
        with pytest.raises(RuntimeError, match="use_cudnn=True"):
            other(y)


def test_state_dict_and_options():
    """Keys are public apex's; what the block has not is refused by name."""
    norm = ["weight", "bias", "running_mean", "running_var"]
    keys = [f"downsample.{k}" for k in ("0.weight", *(f"1.{n}" for n in norm))]
    keys += [f"conv{i}.weight" for i in (1, 2, 3)] + [f"bn{i}.{n}" for i in (1, 2, 3) for n in norm]
    assert list(block(BLOCKS[2]).state_dict()) == keys
    assert list(block(BLOCKS[0]).state_dict()) == keys[5:]
    for option, value in (("dilation", 2), ("groups", 2), ("norm_func", torch.nn.BatchNorm2d)):
        with pytest.raises(RuntimeError, match=f"{option} must be"):
            block(BLOCKS[0], **{option: value})


def test_weights_that_are_replaced():
    """The forward takes the parameters that the module has now: after a copy, a load with assign, a cast."""
    module = block(BLOCKS[1])
    x = image(BLOCKS[1])
    before = module(x)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.conv1.weight.zero_()
    lists.assert_same_bits([module(x)], [before])
    assert not torch.equal(twin(x), before)
    twin.load_state_dict({n: t.clone() for n, t in module.state_dict().items()}, assign=True)
    lists.assert_same_bits([twin(x)], [before])


def test_scales_computed_once():
    """get_scale_bias_callable: the forward takes what the function computed last."""
    for nhwc in (False, True):
        module = block(BLOCKS[1], nhwc=nhwc)
        x = image(BLOCKS[1]).detach()
        x = x.permute(NHWC) if nhwc else x
        wanted = module(x)
        compute = module.get_scale_bias_callable()
        compute()
        near(module(x), wanted)
        module.bn1.running_var.fill_(4.0)
        near(module(x), wanted)
        compute()
        assert not torch.allclose(module(x), wanted)


def test_frozen_batch_norm():
    norm = block(BLOCKS[1]).bn3
    x = lists.random(F32, "cpu", ((2, 24, 5, 3),))[0]
    wanted = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=0.0)
    near(norm(x), wanted)
    for nhwc, shape in ((False, (1, 24, 1, 1)), (True, (1, 1, 1, 24))):
        assert [t.shape for t in norm.get_scale_bias(nhwc)] == [shape, shape]
    assert not list(FrozenBatchNorm2d(3).parameters())
    g, y, s = (lists.random(F32, "cpu", ((2, 3, 2, 2),), seed=i)[0] for i in range(3))
    lists.assert_same_bits(drelu_dscale1(g, y, s), [(y > 0) * g * s, (y > 0) * g])
    lists.assert_same_bits(drelu_dscale2(g, y, s, 2 * s), [(y > 0) * g * s, (y > 0) * g * 2 * s])


@pytest.mark.parametrize(
    "sizes", [(4, 2, 4, 1), (4, 2, 6, 1), (4, 2, 4, 2)], ids=["same", "wider", "strided"]
)
def test_gradients_of_gradients(sizes, forked):
    module = block(sizes, F64)
    x = image(sizes, F64, shape=(1, 2, 3))
    assert torch.autograd.gradcheck(module, x)
    assert torch.autograd.gradgradcheck(module, x)


class Seen(TorchDispatchMode):
    """Names of torch's ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, arguments=(), keywords=None):
        self.names.append(op._schema.name)
        return op(*arguments, **(keywords or {}))


@pytest.mark.parametrize("sizes", BLOCKS, ids=["same", "wider", "strided"])
def test_both_gradients_of_the_input_are_one(sizes, forked):
    """No pass over x adds them."""
    module, x = block(sizes), image(sizes)
    y = module(x)
    with Seen() as seen:
        torch.autograd.grad(y, x, torch.ones_like(y))
    added = [name for name in seen.names if name in ("aten::add", "aten::add_", "aten::addmm_")]
    assert added == (["aten::addmm_"] if forked else ["aten::add"])


@pytest.mark.parametrize("recorded", [False, True])
def test_images_that_only_a_graph_adds_by_a_product(recorded, monkeypatch):
    monkeypatch.setattr(_block, "SMALLEST", 0)
    monkeypatch.setattr(_block, "_is_recorded", lambda x: recorded)
    y = block(BLOCKS[0])(image(BLOCKS[0]))
    names, nodes = set(), [y.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [before for before, _ in node.next_functions if before is not None]
    assert ("ForkBackward" in names) == recorded


@pytest.mark.parametrize("wanted", range(5), ids=["x", "1", "2", "3", "shortcut"])
def test_one_gradient_alone(wanted, forked):
    """What requires no gradient gets none, and the others get what they get otherwise."""
    module = block(BLOCKS[1])
    x = image(BLOCKS[1])
    g = gradient_of(module, x)
    all_of_them = run(module, x, g)[1:]
    leaves = [x, *module.w_conv]
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i == wanted)
    module(x).backward(g)
    near(leaves[wanted].grad, all_of_them[wanted])
    assert [leaf.grad is not None for leaf in leaves] == [i == wanted for i in range(5)]


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


def test_weights_that_are_made_and_norms_that_are_parameters(forked):
    """What nn.Module finds elsewhere than among its own tensors counts, and the norms' numbers get no gradients."""
    module = block(BLOCKS[1])
    torch.nn.utils.parametrize.register_parametrization(module.conv2, "weight", Doubled())
    for norm in (module.bn1, module.downsample[1]):
        weight = norm.weight.mul(3)
        del norm.weight
        norm.weight = torch.nn.Parameter(weight)
    module.bn3.running_mean.requires_grad_()
    plain = copy.deepcopy(module)
    plain.use_cudnn = False
    x = image(BLOCKS[1])
    g = gradient_of(module, x)
    found, wanted = (torch.autograd.grad(m(x), (x, *m.w_conv[::2]), g) for m in (module, plain))
    for a, b in zip((module(x), *found), (plain(x), *wanted), strict=True):
        near(a, b)
    module(x).backward(g)
    assert module.conv2.parametrizations.weight.original.grad is not None
    assert module.bn1.weight.grad is None and module.bn3.running_mean.grad is None


def test_an_image_of_one_pixel(forked):
    """It is contiguous in both formats."""
    module, plain = block(BLOCKS[1]), block(BLOCKS[1])
    plain.use_cudnn = False
    x = image(BLOCKS[1], shape=(3, 1, 1))
    g = gradient_of(module, x)
    for a, b in zip(run(module, x, g), run(plain, x, g), strict=True):
        near(a, b)


@pytest.mark.parametrize("sizes", BLOCKS[::2], ids=["same", "strided"])
def test_compiled(sizes, counting_backend, forked):
    module = block(sizes)
    x = image(sizes)
    g = gradient_of(module, x)
    wanted = run(module, x, g)
    module_in_graph = copy.deepcopy(module)
    graph = torch.compile(module_in_graph, fullgraph=True, backend=counting_backend)
    y = graph(x)
    found = [y, *torch.autograd.grad(y, [x, *module_in_graph.w_conv], g)]
    lists.assert_same_bits(found, wanted)
    assert counting_backend.frame_count == 1


def test_autocast(forked):
    module, x = block(BLOCKS[2]), image(BLOCKS[2])
    with torch.autocast("cpu", BF16):
        y = module(x)
    assert y.dtype == BF16
    y.float().sum().backward()
    assert all(w.grad.dtype == F32 for w in module.w_conv)


@pytest.mark.gpu
def test_captured(forked):
    module, x = block(BLOCKS[2], F16, "cuda"), image(BLOCKS[2], F16, "cuda")
    g = gradient_of(module, x)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(module), (x,))
    for a, b in zip(run(graphed, x, g), run(module, x, g), strict=True):
        near(a, b, 4)


# ---- fast_bottleneck -------------------------------------------------------------------------------------------------


class Raw:
    """The lists that public apex's Python gives the raw functions, and what autograd makes of the same block."""

    def __init__(self, sizes, nhwc, dtype=F64, rows=7):
        module = block(sizes, dtype)
        self.nhwc, self.stride, self.dtype = nhwc, module.stride, dtype
        norms = module._norms()
        scales, biases = zip(*(n.get_scale_bias(nhwc) for n in norms), strict=True)
        x = image(sizes, dtype, shape=(2, rows, 6))
        self.y = module(x)
        g = gradient_of(module, x)
        self.wanted = [self.shown(t) for t in torch.autograd.grad(self.y, [x, *module.w_conv], g)]
        weights = [self.shown(w.detach()) for w in module.w_conv]
        self.inputs = [self.shown(x.detach()), *weights[:3], *scales[:3], *biases[:3]]
        if len(weights) > 3:
            self.inputs += [weights[3], scales[3], biases[3]]
        self.g = self.shown(g)

    def shown(self, t):
        return t.permute(NHWC).contiguous() if self.nhwc else t

    def rows(self, t, begin, end):
        return t[:, begin:end] if self.nhwc else t[:, :, begin:end]

    def of_backward(self, outputs):
        """The list of the backward."""
        scales = [self.inputs[6], *self.inputs[11:12]]
        grads = (drelu_dscale2 if len(scales) > 1 else drelu_dscale1)(self.g, outputs[2], *scales)
        return [*self.inputs[:10], *grads, *outputs[:2], *self.inputs[10:11]]


@pytest.mark.parametrize("nhwc", [True, False], ids=["nhwc", "channels_last"])
@pytest.mark.parametrize("sizes", BLOCKS, ids=["same", "wider", "strided"])
def test_raw_functions(sizes, nhwc):
    """The whole, and step by step."""
    case = Raw(sizes, nhwc)
    outputs = raw.forward(nhwc, case.stride, case.inputs)
    near(outputs[2], case.shown(case.y))
    steps = raw.forward_init(nhwc, case.stride, case.inputs)
    assert [t.shape for t in steps] == [t.shape for t in outputs]
    for step in (raw.forward_out1, raw.forward_out2, raw.forward_rest):
        step(nhwc, case.stride, case.inputs, steps)
    lists.assert_same_bits(steps, outputs)
    found = raw.backward(nhwc, case.stride, case.of_backward(outputs))
    assert len(found) == len(case.wanted)
    for a, b in zip(found, case.wanted, strict=True):
        assert not a.requires_grad
        near(a, b, 64)


def strips(case, outputs):
    """The upper half of the image and the lower, as two ranks have them: [(inputs, rows of it)]"""
    height = outputs[0].shape[1 if case.nhwc else 2]
    found = []
    for begin, end in ((0, height // 2), (height // 2, height)):
        x = case.rows(case.inputs[0], begin, end).contiguous()
        found.append(([x, *case.inputs[1:]], (begin, end)))
    return found


def three_rows(case, upper, at, t, other):
    """The strip's two rows at its edge, and the neighbour's."""
    rows = (case.rows(t, at - 1, at + 1), other) if upper else (other, case.rows(t, 0, 2))
    return torch.cat(rows, 1 if case.nhwc else 2)


def weight_row(case, row):
    """A row of the second weight."""
    w = case.inputs[2]
    return w[:, row : row + 1] if case.nhwc else w[:, :, row : row + 1]


@pytest.mark.parametrize("nhwc", [True, False], ids=["nhwc", "channels_last"])
def test_raw_halos_of_the_forward(nhwc):
    """Each way in which two ranks can compute out2 of their strips gives what one has of the whole image."""
    case = Raw(BLOCKS[1], nhwc, rows=8)
    whole = raw.forward(nhwc, 1, case.inputs)
    for inputs, (begin, end) in strips(case, whole):
        mine = case.rows(whole[0], begin, end)
        wanted = case.rows(whole[1], begin, end)
        upper = begin == 0
        beyond = case.rows(whole[0], end, end + 1) if upper else case.rows(whole[0], begin - 1, begin)
        at = (end - begin - 1) if upper else 0
        # The neighbour's row is part of the image that is convolved.
        border = torch.zeros_like(beyond)
        axis = 1 if nhwc else 2
        padded = torch.cat((border, mine, beyond) if upper else (beyond, mine, border), axis)
        outputs = [mine, torch.empty_like(wanted), None]
        raw.forward_out2_pad(nhwc, 1, inputs, outputs, padded)
        near(outputs[1], wanted)
        # Its row is computed from three rows.
        fat = three_rows(case, upper, at, mine, beyond)
        near(raw.forward_out2_halo(nhwc, fat, inputs), case.rows(wanted, at, at + 1))
        # The row is left without scale, bias and ReLU, and completed.
        top, bottom = (
            torch.tensor([n], dtype=torch.int32, device="cpu")
            for n in ((0, at - 1) if upper else (1, end - begin))
        )
        raw.forward_out2_mask(nhwc, 1, inputs, outputs, top, bottom)
        part = case.rows(outputs[1], at, at + 1).clone()
        row = raw.forward_out2_halo_corr(nhwc, beyond, inputs, weight_row(case, 2 if upper else 0), part)
        near(row, case.rows(wanted, at, at + 1))
        rest = (0, at) if upper else (1, end - begin)
        near(case.rows(outputs[1], *rest), case.rows(wanted, *rest))


@pytest.mark.parametrize("nhwc", [True, False], ids=["nhwc", "channels_last"])
def test_raw_halos_of_the_backward(nhwc):
    """Likewise the gradient of out1, and that of the second weight, which ranks add up."""
    case = Raw(BLOCKS[1], nhwc, rows=8)
    whole = raw.forward(nhwc, 1, case.inputs)
    t_list = case.of_backward(whole)
    grads = raw.backward_init(nhwc, 1, t_list)
    grad2 = raw.backward_grad_out2(nhwc, 1, t_list, grads)
    grad1 = raw.backward_grad_out1(nhwc, 1, t_list, grads, grad2)
    raw.backward_wgrad2(nhwc, 1, t_list, grads, grad2)
    axis, sums, padded_sums = (1 if nhwc else 2), torch.zeros_like(grads[2]), torch.zeros_like(grads[2])
    for inputs, (begin, end) in strips(case, whole):
        upper, at = begin == 0, (end - begin - 1) if begin == 0 else 0
        own = [*inputs[:10], *(case.rows(t, begin, end) for t in t_list[10:14]), *t_list[14:]]
        mine, out1, wanted = (case.rows(t, begin, end) for t in (grad2, whole[0], grad1))
        neighbour = (end, end + 1) if upper else (begin - 1, begin)
        beyond, out1_beyond = (case.rows(t, *neighbour) for t in (grad2, whole[0]))
        middle = functools.partial(three_rows, case, upper, at)
        fat = raw.backward_grad_out1_halo(
            nhwc, 1, own, grads, middle(mine, beyond), middle(out1, torch.zeros_like(out1_beyond))
        )
        near(case.rows(fat, 1, 2), case.rows(wanted, at, at + 1))
        top, bottom = (
            torch.tensor([n], dtype=torch.int32, device="cpu")
            for n in ((0, at - 1) if upper else (1, end - begin))
        )
        masked = raw.backward_grad_out1_mask(nhwc, 1, own, grads, mine, top, bottom)
        row = raw.backward_grad_out1_halo_corr(
            nhwc, 1, own, weight_row(case, 0 if upper else 2), grads, beyond, case.rows(out1, at, at + 1),
            case.rows(masked, at, at + 1),
        )  # fmt: skip
        near(row, case.rows(wanted, at, at + 1))
        rest = (0, at) if upper else (1, end - begin)
        near(case.rows(masked, *rest), case.rows(wanted, *rest))
        # The second weight's gradient: of the strip, and of the row that its edge has from the neighbour.
        made = [torch.empty_like(t) for t in grads]
        raw.backward_wgrad2(nhwc, 1, own, made, mine)
        sums += made[2]
        edge = raw.backward_wgrad2_halo(nhwc, 1, own, made, out1_beyond, case.rows(mine, at, at + 1))
        row = 2 if upper else 0
        into = sums[:, row : row + 1] if nhwc else sums[:, :, row : row + 1]
        into += edge
        border = torch.zeros_like(out1_beyond)
        padded = torch.cat((border, out1, out1_beyond) if upper else (out1_beyond, out1, border), axis)
        raw.backward_wgrad2_pad(nhwc, 1, own, made, padded, mine)
        padded_sums += made[2]
    near(sums, grads[2], 64)
    near(padded_sums, grads[2], 64)


def test_raw_names():
    own = (n for n, f in vars(raw).items() if inspect.isfunction(f) and f.__module__ == raw.__name__)
    names = sorted(n for n in own if n[0] != "_")
    assert raw.__all__ == names and len(names) == 22


def test_the_function_of_public_apex():
    """bottleneck_function(nhwc, stride, scales, biases, x, *weights), whose scales and biases get no gradients."""
    module, x = block(BLOCKS[2]), image(BLOCKS[2])
    scales, biases = zip(*(n.get_scale_bias(False) for n in module._norms()), strict=True)
    scales = [s.requires_grad_() for s in scales]
    y = bottleneck_function(False, 2, scales, biases, x, *module.w_conv)
    near(y, module(x))
    y.sum().backward()
    assert scales[0].grad is None and x.grad is not None
