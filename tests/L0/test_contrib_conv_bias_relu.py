"""apex.contrib.conv_bias_relu and fused_conv_bias_relu: public apex's functions, by torch's own layers."""

from __future__ import annotations

import inspect

import lists
import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64

from apex import amp
from apex._legacy import fused_conv_bias_relu as raw
from apex.contrib.conv_bias_relu import ConvBias, ConvBiasMaskReLU, ConvBiasReLU, ConvFrozenScaleBiasReLU

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.usefixtures("exact_convolutions")
LAST = torch.channels_last
SHAPES = ((2, 8, 9, 7), (16, 8, 3, 3), (1, 16, 1, 1), (1, 16, 1, 1), (2, 16, 5, 4))
PADDING, STRIDE = 1, 2


def tensors(dtype, device, seed=1):
    """x, weight, scale and bias that require gradients, and what the output's gradient is."""
    found = lists.random(dtype, device, SHAPES, scale=0.5, seed=seed)
    return [t.contiguous(memory_format=LAST) if t.shape[-1] > 1 else t for t in found]


def leaves(tensors):
    return [t.detach().requires_grad_() for t in tensors]


def conv(x, w):
    return F.conv2d(x, w, None, STRIDE, PADDING)


# name -> (function of apex, the same in torch, of x, weight, scale, bias and the mask)
FUNCTIONS = {
    "ConvBiasReLU": (
        lambda x, w, s, b, m: ConvBiasReLU(x, w, b, PADDING, STRIDE),
        lambda x, w, s, b, m: torch.relu(conv(x, w) + b),
    ),
    "ConvBias": (
        lambda x, w, s, b, m: ConvBias(x, w, b, PADDING, STRIDE),
        lambda x, w, s, b, m: conv(x, w) + b,
    ),
    "ConvBiasMaskReLU": (
        lambda x, w, s, b, m: ConvBiasMaskReLU(x, w, b, m, PADDING, STRIDE),
        lambda x, w, s, b, m: torch.relu((conv(x, w) + b) * m),
    ),
    "ConvFrozenScaleBiasReLU": (
        lambda x, w, s, b, m: ConvFrozenScaleBiasReLU(x, w, s, b, PADDING, STRIDE),
        lambda x, w, s, b, m: torch.relu(conv(x, w) * s.detach() + b.detach()),
    ),
}


def near(found, wanted, loose=8):
    unit = loose * lists.ROUNDING[found.dtype]
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted.double(), rtol=unit, atol=unit * scale)


def both(name, dtype, device):
    """(outputs and gradients of apex, of torch in float64 by the signs of apex's output)"""
    *given, g = tensors(dtype, device)
    mask = (lists.random(F32, device, SHAPES[4:], seed=9)[0] > 0).to(torch.int8)
    ours, theirs = FUNCTIONS[name]
    mine, wide = leaves(given), leaves([t.double() for t in given])
    y, wanted = ours(*mine, mask), theirs(*wide, mask)
    torch.autograd.backward(y, g)
    torch.autograd.backward(wanted, g.double())
    return [y, *(t.grad for t in mine)], [wanted, *(t.grad for t in wide)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(device, dtype, name):
    found, wanted = both(name, dtype, device)
    assert found[0].is_contiguous(memory_format=LAST)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)  # what is frozen gets none
        if a is not None:
            assert a.dtype == dtype and a.shape == b.shape
            near(a, b, 16)


def test_bias_of_any_shape_or_none():
    x, w, _, b, _ = tensors(F32, "cpu")
    flat = b.reshape(-1).requires_grad_()
    y = ConvBiasReLU(x, w, flat, PADDING, STRIDE)
    lists.assert_same_bits([y], [ConvBiasReLU(x, w, b, PADDING, STRIDE)])
    assert torch.autograd.grad(y.sum(), flat)[0].shape == (16,)
    near(ConvBias(x, w, None, PADDING, STRIDE), conv(x, w))
    with pytest.raises(ValueError, match="the weight 16 outputs"):
        ConvBiasReLU(x, w, b[:, :8], PADDING, STRIDE)
    with pytest.raises(ValueError, match="no groups"):
        ConvBiasReLU(x, w[:, :4], b, PADDING, STRIDE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_raw_functions(device, dtype):
    """They take lists, return lists (but for one), record nothing, and give what the differentiable ones do."""
    x, w, s, b, g = tensors(dtype, device)
    mask = (g > 0).to(torch.int8)
    x, w, b = leaves([x, w, b])
    more = PADDING, STRIDE

    def same(output, found, inputs, backward):
        assert isinstance(found, list) and not found[0].requires_grad
        lists.assert_same_bits(found, [output])
        wanted = torch.autograd.grad(output, inputs, g)
        for one, other in zip(backward(found[0]), wanted, strict=True):
            assert other.shape == one.shape
            near(one.to(other.dtype), other, 2)

    of_relu = lambda y: raw.backward([x, w, y, g], *more)  # noqa: E731
    same(ConvBiasReLU(x, w, b, *more), raw.forward([x, w, b], *more), (x, w, b), of_relu)
    found = raw.forward_mask([x, w, b, mask], *more)
    same(ConvBiasMaskReLU(x, w, b, mask, *more), found, (x, w, b), of_relu)
    plain = ConvBias(x, w, b, *more)
    of_plain = lambda y: raw.backward_no_relu([x, w, g], *more)  # noqa: E731
    same(plain, raw.forward_no_relu([x, w, b], *more), (x, w, b), of_plain)
    assert (
        raw.backward([x, w, plain, g], *more)[2].dtype == F32
    )  # as public apex's: sums are not rounded to half
    found = raw.forward_cscale_cbias_relu([x, w, s, b], *more)
    assert isinstance(found, torch.Tensor)
    backward = lambda y: raw.backward_cscale_cbias_relu([x, w, s, y, g], *more)  # noqa: E731
    same(ConvFrozenScaleBiasReLU(x, w, s, b, *more), [found], (x, w), backward)


def test_both_spellings_of_forward_no_relu():
    """Public trees have it of a list, and of tensors with `use_relu`."""
    x, w, _, b, _ = tensors(F32, "cpu")
    (wanted,) = raw.forward_no_relu([x, w, b], PADDING, STRIDE)
    lists.assert_same_bits(raw.forward_no_relu(x, w, b, PADDING, STRIDE, False), [wanted])
    lists.assert_same_bits(
        raw.forward_no_relu(x, w, b, PADDING, STRIDE, use_relu=True), raw.forward([x, w, b], PADDING, STRIDE)
    )
    for arguments in (
        (x, w, b, PADDING, STRIDE),
        ([x, w, b], PADDING, STRIDE, True),
        ([x, w], PADDING, STRIDE),
    ):
        with pytest.raises((TypeError, ValueError)):
            raw.forward_no_relu(*arguments)


def test_names():
    assert raw.__all__ == sorted(n for n, f in vars(raw).items() if inspect.isfunction(f) and n[0] != "_")


def test_amp_casts():
    """torch.autocast and amp's O1 cast to half, whatever the dtype of the bias; gradients are float32."""
    for name in FUNCTIONS:
        *given, g = tensors(F32, "cpu")
        mask, mine = (g > 0).to(torch.int8), leaves(given)
        with torch.autocast("cpu", BF16):
            y = FUNCTIONS[name][0](*mine, mask)
        assert y.dtype == BF16
        y.sum().backward()
        assert all(t.grad is None or t.grad.dtype == F32 for t in mine)
    module = torch.nn.Conv2d(8, 16, 3, device="cpu", dtype=F32)
    model, optimizer = amp.initialize(
        module, torch.optim.SGD(module.parameters(), lr=0.1), opt_level="O1", verbosity=0
    )
    try:
        y = ConvBiasReLU(given[0], model.weight, model.bias, 1, 1)
        assert y.dtype == F16
        with amp.scale_loss(y.float().mean(), optimizer) as loss:
            loss.backward()
        assert all(p.grad.dtype == F32 and p.grad.isfinite().all() for p in model.parameters())
    finally:
        amp._amp_state.handle._deactivate()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled(name, counting_backend):
    """One graph, with the bits of eager."""
    *given, g = tensors(F32, "cpu")
    mask = (g > 0).to(torch.int8)
    function = FUNCTIONS[name][0]
    graph = torch.compile(function, fullgraph=True, backend=counting_backend)
    found = []
    for run in (function, graph):
        mine = leaves(given)
        y = run(*mine, mask)
        y.backward(g)
        found.append([y, *(t.grad for t in mine if t.grad is not None)])
    lists.assert_same_bits(*found)
    assert counting_backend.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_captured(name):
    """Captured forward and backward give new values for new inputs."""
    *given, g = tensors(F16, "cuda")
    mask = (g > 0).to(torch.int8)
    mine = leaves(given)

    def step():
        y = FUNCTIONS[name][0](*mine, mask)
        return [y, *torch.autograd.grad(y, [t for t in mine[:2]], g)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (2, 3):
        with torch.no_grad():
            for t, new in zip(mine, tensors(F16, "cuda", seed), strict=False):
                t.copy_(new)
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            near(a, b, 4)


@pytest.mark.gpu
def test_beside_torch_on_a_gpu():
    """Errors against float64 are no larger than those of torch's own layers in half."""
    x, w = (
        t.to("cuda", F16).contiguous(memory_format=LAST)
        for t in lists.random(F64, "cpu", ((8, 64, 28, 28), (64, 64, 3, 3)), scale=0.2)
    )
    b, g = (t.to("cuda", F16) for t in lists.random(F64, "cpu", ((64,), (8, 64, 28, 28)), seed=5))
    errors = []
    for run in (
        lambda x, w, b: ConvBiasReLU(x, w, b, 1, 1),
        lambda x, w, b: torch.relu(F.conv2d(x, w, b, padding=1)),
    ):
        mine, wide = leaves([x, w, b]), leaves([t.double() for t in (x, w, b)])
        y = run(*mine)
        u = F.conv2d(*wide, padding=1)
        exact = [torch.relu(u), *torch.autograd.grad(u, wide, g.double() * (y > 0))]
        found = [y, *torch.autograd.grad(y, mine, g)]
        errors.append([(a.double() - e).norm() / e.norm() for a, e in zip(found, exact, strict=True)])
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 1.05 * theirs + 1e-7
