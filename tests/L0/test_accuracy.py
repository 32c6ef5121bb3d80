"""Errors of the fused ops against float64, beside those of torch's own ops in the same dtype, on everything that can
serve them. `python tests/L0/test_accuracy.py` prints them all. Torch has no
loss of transducers: that is made of its ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lists
import pytest
import torch
import torch.nn.functional as F
import variants
from lists import BF16, F16, F32
from torch_defaults import float32_on_cpu

from apex.contrib.conv_bias_relu import ConvBiasReLU, ConvFrozenScaleBiasReLU
from apex.contrib.focal_loss.focal_loss import focal_loss
from apex.contrib.group_norm import GroupNorm
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.transducer import TransducerJoint, TransducerLoss
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.normalization import fused_add_rms_norm, fused_layer_norm
from apex.transformer import functional
from apex.transformer.functional import fused_softmax

EPS = 1e-5
DTYPES = [F32, BF16, F16]
# Of torch's own errors. The largest is the luck of one number, often of one or two roundings; that of all is not, but
# of n numbers the root mean squares of two like samples differ by about a sqrt(n)-th.
LARGEST, ROOT_MEAN_SQUARE = 2.5, 1.05
# Beside another device's ops: without the fused multiply-add that torch's have here, and with sums in a GPU's order.
UNLIKE = {"cpu-v1": 1.3, "cpu-v2": 1.3} | dict.fromkeys(variants.EXECUTORS, 1.8)


@dataclass
class Case:
    """shapes: of the inputs, which are normal values times scale plus offset, and have gradients. ours, theirs: of
    (inputs, others); theirs serves float64 too. others: of (device), what has no gradient. statistics: elements share
    the roundings of so many numbers, and no more of their errors are independent."""

    shapes: tuple
    ours: Callable
    theirs: Callable
    others: Callable = lambda device: ()
    scale: float = 1.0
    offset: float = 0.0
    last: bool = False  # channels last
    statistics: int = 0


def as_inputs(case, dtype, device):
    inputs = lists.random(torch.float64, "cpu", case.shapes, seed=5)
    inputs = [(case.scale * x + (case.offset if i == 0 else 0)).to(dtype) for i, x in enumerate(inputs)]
    if case.last:
        inputs = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs]
    return [x.to(device).requires_grad_() for x in inputs]


def results(function, inputs, others, gradient):
    output = function(*inputs, *others)
    if gradient is None:
        generator = torch.Generator().manual_seed(7)
        gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64, device="cpu")
    dy = gradient.to(inputs[0].dtype).to(output.device)
    return [output, *torch.autograd.grad(output, inputs, dy.to(output.dtype))], dy


def errors(case, dtype, device):
    """[(name of the tensor, how many numbers, (largest, root mean square) of ours, of torch's)]"""
    inputs, others = as_inputs(case, dtype, device), case.others(device)
    wide = [x.detach().cpu().double().requires_grad_() for x in inputs]
    if case.last:
        wide = [x.detach().requires_grad_() for x in wide]
    theirs, dy = results(case.theirs, inputs, others, None)
    exact, _ = results(case.theirs, wide, case.others("cpu"), dy.cpu().double())
    ours, _ = results(case.ours, inputs, others, dy.cpu().double())

    def both(found, wanted):
        error = (found.detach().cpu().double() - wanted.detach()).abs()
        return error.max().item(), error.square().mean().sqrt().item()

    def at_least(wanted, pair):
        """One number's error is a matter of luck: a unit in its last place counts as none."""
        unit = 2 * lists.ROUNDING[F32] * wanted.abs().item() if wanted.dim() == 0 else 0.0
        return tuple(max(e, unit) for e in pair)

    names = ["output", *(f"gradient {i}" for i in range(len(inputs)))]
    return [
        (n, min(e.numel(), case.statistics or e.numel()), both(a, e), at_least(e, both(b, e)))
        for n, a, b, e in zip(names, ours, theirs, exact, strict=True)
    ]


# ---- the cases ---------------------------------------------------------------------------------------------


def layer_norm(x, w, b):
    return fused_layer_norm.fused_layer_norm_affine(x, w, b, w.shape, EPS)


def torch_layer_norm(x, w, b):
    return F.layer_norm(x, w.shape, w, b, EPS)


def rms_norm(x, w):
    return fused_layer_norm.fused_rms_norm_affine(x, w, w.shape, EPS)


def torch_rms_norm(x, w):
    return F.rms_norm(x, w.shape, w, EPS)


def add_rms_norm(x, r, w):
    return fused_add_rms_norm(x, r, w)[0]


def torch_add_rms_norm(x, r, w):
    return F.rms_norm(x + r, w.shape, w, EPS)


def causal(x):
    return fused_softmax.scaled_upper_triang_masked_softmax(x, None, 0.5)


def torch_causal(x):
    later = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return torch.softmax((x * 0.5).masked_fill(later, -torch.inf), -1)


def mask_of(device):
    generator = torch.Generator().manual_seed(3)
    return ((torch.rand(8, 1, 32, 100, generator=generator, dtype=F32, device="cpu") < 0.2).to(device),)


def masked(x, mask):
    return fused_softmax.scaled_masked_softmax(x, mask, 0.5)


def torch_masked(x, mask):
    return torch.softmax((x * 0.5).masked_fill(mask, -torch.inf), -1)


def attention_softmax(x, mask):
    return torch.ops.apex.masked_softmax_dropout_forward(x, mask)[0]


def gated(activation):
    def theirs(x, b):
        first, second = (x + b).chunk(2, -1)
        return activation(first) * second

    return theirs


def gelu(x):
    return F.gelu(x, approximate="tanh")


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def activation(name, theirs):
    return Case(((64, 1024), (1024,)), getattr(functional, f"fused_bias_{name}"), theirs)


def conv_bias_relu(x, w, b):
    return ConvBiasReLU(x, w, b, 1, 1)


def torch_conv_bias_relu(x, w, b):
    return F.relu(F.conv2d(x, w, b, padding=1))


def scale_and_bias(device):
    return tuple(t.to(device) for t in lists.random(F32, "cpu", ((64, 1, 1),) * 2, seed=4))


def conv_scale_bias_relu(x, w, s, b):
    return ConvFrozenScaleBiasReLU(x, w, s, b, 0, 1)


def torch_conv_scale_bias_relu(x, w, s, b):
    return F.relu(F.conv2d(x, w) * s.to(x.dtype) + b.to(x.dtype))


def angles(device):
    """Up to 2048 radians, as float32: exact with these."""
    half = (
        torch.arange(256.0, dtype=F32, device="cpu")[:, None]
        * 8
        / 10000 ** (torch.arange(32, dtype=torch.int64, device="cpu") / 32)
    )
    return (torch.cat((half, half), -1)[:, None, None].to(device),)


def cosines(device):
    (freqs,) = angles("cpu")
    return freqs.cos().to(device), freqs.sin().to(device)


def turn(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def torch_rope(x, freqs):
    freqs = freqs.to(torch.promote_types(x.dtype, F32))
    return turn(x, freqs.cos().to(x.dtype), freqs.sin().to(x.dtype))


def classes_of(count, classes):
    def others(device):
        generator = torch.Generator().manual_seed(2)
        return (
            torch.randint(0, classes, (count,), generator=generator, dtype=torch.int64, device="cpu").to(
                device
            ),
        )

    return others


def xentropy(x, labels):
    return SoftmaxCrossEntropyLoss.apply(x, labels, 0.1, -100)


def torch_xentropy(x, labels):
    return F.cross_entropy(x, labels, reduction="none", label_smoothing=0.1)


def detections(device):
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(-2, 80, (512,), generator=generator, dtype=torch.int64, device="cpu")
    return targets.to(device), torch.tensor(100.0, device=device, dtype=F32)


def focal(x, targets, positives):
    return focal_loss(x, targets, positives, 80, 0.25, 2.0)


def torch_focal(x, targets, positives):
    x = x[:, :80].to(torch.promote_types(x.dtype, F32))
    positive = targets[:, None] == torch.arange(80, device=x.device, dtype=torch.int64)
    p = torch.sigmoid(x)
    entropy = F.binary_cross_entropy_with_logits(x, positive.to(x.dtype), reduction="none")
    factor = torch.where(positive, 0.25 * (1 - p) ** 2, 0.75 * p**2)
    return (factor * entropy).masked_fill(targets[:, None] == -2, 0).sum() / positives


def rows_of(device):
    generator = torch.Generator().manual_seed(2)
    return (torch.randint(0, 50, (2000,), generator=generator, dtype=torch.int64, device="cpu").to(device),)


def group_norm(groups, silu):
    def ours(x, w, b):
        module = GroupNorm(groups, w.numel(), EPS, act="silu" if silu else None)
        del module.weight, module.bias
        module.weight, module.bias = w, b
        return module(x)

    def theirs(x, w, b):
        y = F.group_norm(x, groups, w, b, EPS)
        return F.silu(y) if silu else y

    return ours, theirs


def of_groups(silu, offset=0.0, last=True, shape=(2, 64, 24, 24)):
    channels = (shape[1],)
    return Case((shape, channels, channels), *group_norm(16, silu), offset=offset, last=last)


def batch_norm(x, z, w, b):
    with float32_on_cpu():
        module = BatchNorm2d_NHWC(w.numel(), fuse_relu=True, torch_channels_last=True).to(x.device)
    del module.weight, module.bias
    module.weight, module.bias = w, b
    return module(x, z)


def torch_batch_norm(x, z, w, b):
    return torch.relu(F.batch_norm(x, None, None, w, b, True, 0.1, EPS) + z)


def lengths(frames, labels):
    def others(device):
        return tuple(torch.tensor(n, dtype=torch.int32, device=device) for n in (frames, labels))

    return others


def joint(f, g, f_len, g_len):
    return TransducerJoint(relu=True)(f, g, f_len, g_len)


def torch_joint(f, g, f_len, g_len):
    return torch.relu(f[:, :, None] + g[:, None])


def words(batch, frames, labels, classes):
    """(label, f_len, y_len): as many as there are."""

    def others(device):
        generator = torch.Generator().manual_seed(2)
        label = torch.randint(
            1, classes, (batch, labels), generator=generator, dtype=torch.int32, device="cpu"
        )
        return label.to(device), *lengths((frames,) * batch, (labels,) * batch)(device)

    return others


def transducer_loss(x, label, f_len, y_len):
    return TransducerLoss()(x, label, f_len, y_len, 0)


def torch_transducer_loss(x, label, f_len, y_len):
    """In float32 at least, by diagonals t + u, of which [batch, labels + 1] are the nodes: -inf where none is."""
    none = -1e30  # of two infinities logaddexp's derivative is nan
    p = x.to(torch.promote_types(x.dtype, F32)).log_softmax(-1)
    _, frames, labels, _ = p.shape
    ends = F.pad(label.long(), (0, 1))[:, None, :, None].expand(-1, frames, -1, -1)
    u = torch.arange(labels, device=x.device, dtype=torch.int64)
    t = torch.arange(frames + labels - 2, device=x.device, dtype=torch.int64)[:, None] - u
    at, outside = t.clamp(0, frames - 1), (t < 0) | (t >= frames)
    blanks = p[..., 0][:, at, u].masked_fill(outside | (t == frames - 1), none)
    words = p.gather(-1, ends)[..., 0][:, at, u].masked_fill(outside, none)
    nodes = torch.where(u == 0, 0.0, none).to(p.dtype).expand(len(x), -1)
    for blank, word in zip(blanks.unbind(1), words.unbind(1), strict=True):
        nodes = torch.logaddexp(nodes + blank, F.pad((nodes + word)[:, :-1], (1, 0), value=none))
    return -(nodes[:, -1] + p[:, -1, -1, 0]).to(x.dtype)


def of_words(*shape, **options):
    batch, frames, labels, classes = shape
    x = (batch, frames, labels + 1, classes)
    return Case((x,), transducer_loss, torch_transducer_loss, words(*shape), **options)


norm_weights = ((1000,), (1000,))
CASES = {
    "layer norm": Case(((64, 1000), *norm_weights), layer_norm, torch_layer_norm),
    "layer norm, mean 100": Case(((64, 1000), *norm_weights), layer_norm, torch_layer_norm, offset=100.0),
    "layer norm, long": Case(((4, 16392), (16392,), (16392,)), layer_norm, torch_layer_norm),
    "conv bias relu": Case(
        ((4, 32, 14, 14), (64, 32, 3, 3), (64,)), conv_bias_relu, torch_conv_bias_relu, last=True, scale=0.3
    ),
    "conv scale bias relu": Case(
        ((4, 32, 14, 14), (64, 32, 1, 1)), conv_scale_bias_relu, torch_conv_scale_bias_relu, scale_and_bias, last=True
    ),
    "rms norm": Case(((64, 1000), (1000,)), rms_norm, torch_rms_norm),
    "rms norm, long": Case(((4, 16392), (16392,)), rms_norm, torch_rms_norm),
    "add rms norm": Case(((64, 1000), (64, 1000), (1000,)), add_rms_norm, torch_add_rms_norm),
    # A few numbers of each row are large, and their errors are the row's: equally exact ones differ by 3 % here.
    "causal softmax": Case(((8, 100, 100),), causal, torch_causal, scale=4.0, statistics=800),
    "masked softmax": Case(((8, 4, 32, 100),), masked, torch_masked, mask_of, scale=4.0, statistics=1024),
    "attention's softmax": Case(
        ((8, 4, 32, 100),), attention_softmax, lambda x, m: torch.softmax(x.masked_fill(m, -torch.inf), -1), mask_of,
        scale=4.0, statistics=1024,
    ),
    "plain softmax": Case(
        ((1, 2, 16, 3000),), lambda x: fused_softmax.ScaledSoftmax.apply(x, 1.0), lambda x: x.softmax(-1)
    ),
    "bias swiglu": activation("swiglu", gated(F.silu)),
    "bias geglu": activation("geglu", gated(gelu)),
    "bias quick_geglu": activation("quick_geglu", gated(quick_gelu)),
    "bias gelu": activation("gelu", lambda x, b: gelu(x + b)),
    "bias quick_gelu": activation("quick_gelu", lambda x, b: quick_gelu(x + b)),
    "bias squared_relu": activation("squared_relu", lambda x, b: F.relu(x + b).square()),
    "rotary": Case(((256, 2, 4, 64),), functional.fused_apply_rotary_pos_emb, torch_rope, angles),
    "rotary cached": Case(
        ((256, 2, 4, 64),), functional.fused_apply_rotary_pos_emb_cached,
        lambda x, cos, sin: turn(x, cos.to(x.dtype), sin.to(x.dtype)), cosines,
    ),
    "cross entropy": Case(((64, 1000),), xentropy, torch_xentropy, classes_of(64, 1000), scale=2.0),
    "cross entropy, long": Case(((4, 50257),), xentropy, torch_xentropy, classes_of(4, 50257), scale=2.0),
    "focal loss": Case(((512, 88),), focal, torch_focal, detections, offset=-3.0),
    "index_mul_2d": Case(
        ((50, 64), (2000, 64)), index_mul_2d, lambda a, b, index: a[index] * b, rows_of
    ),
    "group norm": of_groups(False),
    "group norm, SiLU": of_groups(True),
    "group norm, SiLU, mean 0.7": of_groups(True, 0.7),
    "group norm, mean 100": of_groups(False, 100.0),
    "group norm, channels first": of_groups(False, last=False),
    "group norm, SiLU, channels first, mean 3": of_groups(True, 3.0, last=False),
    "batch norm, addition, ReLU": Case(
        ((2, 256, 14, 7), (2, 256, 14, 7), (256,), (256,)), batch_norm, torch_batch_norm, last=True,
        statistics=256,
    ),
    "transducer joint": Case(
        ((2, 200, 64), (2, 20, 64)), joint, torch_joint, lengths((200, 200), (20, 20))
    ),
    "transducer loss": of_words(2, 30, 9, 64),
    "transducer loss, few nodes": of_words(16, 3, 2, 1000),
    "transducer loss, mean 100": of_words(2, 10, 4, 200, offset=100.0),
    "transducer loss, long": of_words(1, 500, 100, 8),
}  # fmt: skip


@pytest.fixture
def one_thread():
    """How exact torch's sums are depends on how many threads share them: here, not on the machine's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_no_less_accurate_than_torch(variant, name, dtype):
    if variant.name == "reference":
        pytest.skip("the reference is torch's ops")
    found = errors(CASES[name], dtype, variant.device)
    for tensor, count, (largest, rms), (torch_largest, torch_rms) in found:
        most = UNLIKE.get(variant.name, ROOT_MEAN_SQUARE) + count**-0.5
        assert largest <= LARGEST * torch_largest and rms <= most * torch_rms, (
            f"{tensor}: largest error {largest:.3g}, torch's {torch_largest:.3g};"
            f" root mean square {rms:.3g}, torch's {torch_rms:.3g}"
        )


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("case, dtype, tensor: largest error, torch's, ratio; root mean square, torch's, ratio")
    for name, case in CASES.items():
        for dtype in DTYPES:
            for tensor, _, ours, theirs in errors(case, dtype, device):
                cells = (
                    f"{a:9.3g} {b:9.3g} {a / b if b else 1:6.3f}" for a, b in zip(ours, theirs, strict=True)
                )
                print(f"{name:42s} {str(dtype)[6:]:9s} {tensor:11s} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
