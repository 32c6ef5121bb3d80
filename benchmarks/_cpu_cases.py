"""What benchmarks/cpu.py compares: every op that has a CPU variant beside what torch has for the same work, its own
fused op where there is one. A case makes its tensors when it is asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from apex import optimizers
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.focal_loss.focal_loss import focal_loss
from apex.contrib.group_norm import GroupNorm
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.normalization.fused_add_norm import fused_add_layer_norm, fused_add_rms_norm
from apex.normalization.fused_layer_norm import (
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm_affine,
)
from apex.parallel import SyncBatchNorm
from apex.transformer import functional
from apex.transformer.functional import fused_softmax

Function = Callable[[], torch.Tensor]


@dataclass
class Case:
    """Two ways to the same numbers: functions without arguments, of which `inputs` want gradients (none: there is no
    backward)."""

    ours: Function
    torchs: Function
    inputs: list[torch.Tensor] = field(default_factory=list)


def numbers(*shape, dtype, grad=True):
    return torch.randn(shape, dtype=torch.float32, device="cpu").to(dtype).requires_grad_(grad)


# ---- norms ---------------------------------------------------------------------------------------------------------


def norm(kind, rows, width, dtype):
    x, r = (numbers(rows, width, dtype=dtype) for _ in range(2))
    w, b = (numbers(width, dtype=dtype) for _ in range(2))
    shape = (width,)
    if kind == "layer norm":
        return Case(
            lambda: fused_layer_norm_affine(x, w, b, shape), lambda: F.layer_norm(x, shape, w, b), [x, w, b]
        )
    if kind == "layer norm without weights":
        return Case(lambda: fused_layer_norm(x, shape), lambda: F.layer_norm(x, shape), [x])
    if kind == "rms norm":
        return Case(
            lambda: fused_rms_norm_affine(x, w, shape, 1e-5), lambda: F.rms_norm(x, shape, w, 1e-5), [x, w]
        )
    if kind == "add layer norm":
        return Case(
            lambda: fused_add_layer_norm(x, r, w, b)[0],
            lambda: F.layer_norm(x + r, shape, w, b, 1e-5),
            [x, r, w, b],
        )
    return Case(
        lambda: fused_add_rms_norm(x, r, w)[0],
        lambda: F.rms_norm(x + r, shape, w, 1e-5),
        [x, r, w],
    )


# ---- softmax and losses --------------------------------------------------------------------------------------------


def softmax(kind, b, h, q, k, dtype):
    x = numbers(b, h, q, k, dtype=dtype)
    if kind == "softmax":
        return Case(lambda: fused_softmax.ScaledSoftmax.apply(x, 1.0), lambda: torch.softmax(x, -1), [x])
    if kind == "scaled softmax":
        return Case(
            lambda: fused_softmax.ScaledSoftmax.apply(x, 0.125), lambda: torch.softmax(x * 0.125, -1), [x]
        )
    if kind == "causal softmax":
        later = torch.ones(q, k, dtype=torch.bool, device="cpu").triu(1)
        ours = partial(fused_softmax.scaled_upper_triang_masked_softmax, x, None, 0.125)
    else:
        later = torch.rand(b, 1, q, k, device="cpu", dtype=torch.float32) < 0.2
        ours = partial(fused_softmax.scaled_masked_softmax, x, later, 0.125)
    return Case(ours, lambda: torch.softmax((x * 0.125).masked_fill(later, -torch.inf), -1), [x])


def cross_entropy(smoothing, rows, classes, dtype):
    x, labels = numbers(rows, classes, dtype=dtype), torch.randint(1, classes, (rows,), device="cpu")
    return Case(
        lambda: SoftmaxCrossEntropyLoss.apply(x, labels, smoothing),
        lambda: F.cross_entropy(x, labels, reduction="none", label_smoothing=smoothing),
        [x],
    )


def focal(rows, classes, dtype, alpha=0.25, gamma=2.0):
    x, real = numbers(rows, classes, dtype=dtype), classes - 6
    targets = torch.randint(-2, real, (rows,), device="cpu")
    positives = torch.tensor(1000.0, dtype=torch.float32, device="cpu")

    def torchs():
        z = x[:, :real].float()
        positive = targets.unsqueeze(1) == torch.arange(real, device="cpu")
        p = torch.sigmoid(z)
        entropy = F.binary_cross_entropy_with_logits(z, positive.float(), reduction="none")
        factor = torch.where(positive, alpha * (1 - p) ** gamma, (1 - alpha) * p**gamma)
        return (factor * entropy).masked_fill(targets.unsqueeze(1) == -2, 0).sum() / positives

    return Case(lambda: focal_loss(x, targets, positives, real, alpha, gamma), torchs, [x])


# ---- activations and products --------------------------------------------------------------------------------------


def gated(function, first, second):
    return function(first) * second


ACTIVATIONS = {
    "swiglu": (functional.fused_bias_swiglu, lambda u: gated(F.silu, *u.chunk(2, -1))),
    "geglu": (
        functional.fused_bias_geglu,
        lambda u: gated(partial(F.gelu, approximate="tanh"), *u.chunk(2, -1)),
    ),
    "gelu": (functional.fused_bias_gelu, lambda u: F.gelu(u, approximate="tanh")),
    "quick gelu": (functional.fused_bias_quick_gelu, lambda u: u * torch.sigmoid(1.702 * u)),
    "squared relu": (functional.fused_bias_squared_relu, lambda u: F.relu(u).square()),
}


def activation(name, biased, rows, width, dtype):
    ours, torchs = ACTIVATIONS[name]
    x = numbers(rows, width * (2 if name.endswith("glu") else 1), dtype=dtype)
    if not biased:
        return Case(lambda: ours(x), lambda: torchs(x), [x])
    b = numbers(x.shape[-1], dtype=dtype)
    return Case(lambda: ours(x, b), lambda: torchs(x + b), [x, b])


def products(rows, width, dtype):
    x, y = numbers(rows, width, dtype=dtype), numbers(2 * rows, width, dtype=dtype)
    index = torch.randint(0, rows, (2 * rows,), device="cpu")
    return Case(lambda: index_mul_2d(x, y, index), lambda: x[index] * y, [x, y])


# ---- rotary embeddings ---------------------------------------------------------------------------------------------


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotary(form, s, b, h, d, dtype):
    angles = torch.rand(s, 1, 1, d // 2, dtype=torch.float32, device="cpu") * 100
    freqs = torch.cat((angles, angles), -1)
    cos, sin = freqs.cos().to(dtype), freqs.sin().to(dtype)
    if form == "rotary packed":
        x = numbers(s * b, h, d, dtype=dtype)
        ends = torch.arange(0, s * b + 1, s, dtype=torch.int32, device="cpu")
        rows = torch.arange(s * b, device="cpu") % s
        return Case(
            lambda: functional.fused_apply_rotary_pos_emb_thd(x, ends, freqs),
            lambda: rotate(x, freqs[rows, 0].cos().to(dtype), freqs[rows, 0].sin().to(dtype)),
            [x],
        )
    x = numbers(s, b, h, d, dtype=dtype)
    if form == "rotary cached":
        ours = partial(functional.fused_apply_rotary_pos_emb_cached, x, cos, sin)
        return Case(ours, lambda: rotate(x, cos, sin), [x])
    return Case(
        lambda: functional.fused_apply_rotary_pos_emb(x, freqs),
        lambda: rotate(x, freqs.cos().to(dtype), freqs.sin().to(dtype)),
        [x],
    )


def rotary_2d(b, height, width, h, d, dtype):
    x = numbers(b, height * width, h, d, dtype=dtype)
    angles = [torch.rand(1, n, 1, d // 2, dtype=torch.float32, device="cpu") for n in (height, width)]
    tables = [f(a).to(dtype) for a in angles for f in (torch.cos, torch.sin)]

    def torchs():
        first, second = x.unflatten(1, (height, width)).chunk(2, -1)
        turned = rotate(first, tables[0][:, :, None], tables[1][:, :, None])
        return torch.cat((turned, rotate(second, tables[2][:, None], tables[3][:, None])), -1).flatten(1, 2)

    return Case(lambda: functional.fused_apply_rotary_pos_emb_2d(x, height, width, *tables), torchs, [x])


# ---- norms of channels ---------------------------------------------------------------------------------------------


def images(n, c, size, last, dtype):
    x = numbers(n, c, size, size, dtype=dtype, grad=False)
    return (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()


def batch_norm(training, last, n, c, size, dtype):
    x = images(n, c, size, last, dtype)
    ours, torchs = SyncBatchNorm(c).train(training), torch.nn.BatchNorm2d(c).train(training)
    parameters = [m.weight for m in (ours, torchs)], [m.bias for m in (ours, torchs)]
    return Case(lambda: ours(x), lambda: torchs(x), [x, *parameters[0], *parameters[1]])


def group_norm(act, last, n, c, size, dtype):
    x = images(n, c, size, last, dtype)
    layer = GroupNorm(32, c, act=act, dtype=dtype)
    of_torch = torch.nn.GroupNorm(32, c, dtype=dtype)
    parameters = layer.weight, of_torch.weight, layer.bias, of_torch.bias

    def torchs():
        y = of_torch(x)
        return F.silu(y) if act else y

    return Case(lambda: layer(x), torchs, [x, *parameters])


# ---- optimizers ----------------------------------------------------------------------------------------------------

ADAM, SGD = dict(lr=1e-4, weight_decay=0.1), dict(lr=1e-3, momentum=0.9, weight_decay=1e-4)
OPTIMIZERS = {
    "AdamW": (optimizers.FusedAdam, partial(torch.optim.AdamW, fused=True), ADAM),
    "SGD momentum": (optimizers.FusedSGD, partial(torch.optim.SGD, fused=True), SGD),
    "Adagrad": (optimizers.FusedAdagrad, partial(torch.optim.Adagrad, fused=True), dict(lr=1e-3)),
}


def optimizer(name, tensors, elements, dtype):
    ours, torchs, options = OPTIMIZERS[name]
    steps = []
    for make in (ours, torchs):
        params = [torch.nn.Parameter(numbers(elements, dtype=dtype, grad=False)) for _ in range(tensors)]
        for p in params:
            p.grad = torch.randn_like(p)
        steps.append(make(params, **options).step)
    return Case(*steps)


def clipping(tensors, elements, dtype):
    params = [torch.nn.Parameter(numbers(elements, dtype=dtype, grad=False)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.randn_like(p)
    return Case(
        lambda: clip_grad_norm_(params, 1e-3),
        lambda: torch.nn.utils.clip_grad_norm_(params, 1e-3),
    )


def _each(title: str, make: Callable[..., Case], *shapes) -> Iterator[tuple[str, Callable[..., Case]]]:
    for shape in shapes:
        yield f"{title} {'x'.join(map(str, shape))}", partial(make, *shape)


def cases() -> Iterator[tuple[str, Callable[..., Case]]]:
    """(name, what makes the case of a dtype), small, medium and large."""
    rows = (64, 256), (1024, 1024), (4096, 2048)
    for kind in ("layer norm", "layer norm without weights", "rms norm", "add layer norm", "add rms norm"):
        yield from _each(kind, partial(norm, kind), *rows)
    scores = (1, 8, 128, 128), (1, 4, 512, 512), (1, 8, 1024, 1024)
    yield from _each("softmax", partial(softmax, "softmax"), *scores, (1, 1, 128, 32768), (4, 8, 64, 63))
    for kind in ("scaled softmax", "causal softmax", "masked softmax"):
        yield from _each(kind, partial(softmax, kind), *scores)
    for smoothing, name in ((0.0, "cross entropy"), (0.1, "smoothed cross entropy")):
        yield from _each(name, partial(cross_entropy, smoothing), (64, 1000), (1024, 1024), (64, 50304))
    yield from _each("focal loss", focal, (256, 96), (20000, 96), (50000, 96))
    for name in ACTIVATIONS:
        for biased in (False, True):
            title = f"bias {name}" if biased else name
            yield from _each(title, partial(activation, name, biased), (64, 256), (1024, 1024), (1024, 4096))
    yield from _each("index_mul_2d", products, (64, 64), (4096, 64), (32768, 256))
    for form in ("rotary", "rotary cached", "rotary packed"):
        yield from _each(form, partial(rotary, form), (128, 1, 8, 64), (1024, 1, 16, 64), (2048, 1, 16, 128))
    yield from _each("rotary 2d", rotary_2d, (1, 16, 16, 8, 64), (1, 64, 64, 8, 128))
    pictures = (4, 32, 8), (16, 64, 32), (32, 256, 28)
    for last in (False, True):
        layout = "channels last" if last else "channels first"
        for training, kind in ((True, "batch norm"), (False, "batch norm in eval")):
            yield from _each(f"{kind} {layout}", partial(batch_norm, training, last), *pictures)
        for act in (None, "silu"):
            kind = "group norm silu" if act else "group norm"
            yield from _each(
                f"{kind} {layout}", partial(group_norm, act, last), (2, 32, 8), (4, 320, 32), (4, 320, 64)
            )
    for name in OPTIMIZERS:
        yield from _each(name, partial(optimizer, name), (161, 1024), (20, 65536), (8, 1 << 20))
    yield from _each("clip of gradients", clipping, (161, 1024), (20, 65536), (8, 1 << 20))
