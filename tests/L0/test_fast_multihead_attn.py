"""The raw functions of fast_multihead_attn: what they return, and their backward passes against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from lists import BF16, F16, F32, F64
from torch.nn import functional

import apex._legacy.fast_multihead_attn as raw
from apex._legacy import fused_conv_bias_relu, fused_dense_cuda, mlp_cuda

T, S, B, C, H = 5, 7, 3, 24, 4
D, BH = C // H, B * H
U8 = torch.uint8


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


def normal(*shape, dtype=F64):
    return torch.randn(shape, dtype=F64, device="cpu").to(dtype)


def padding(keys=T):
    mask = torch.zeros(B, keys, dtype=U8, device="cpu")
    mask[1, 3:] = 1
    mask[2, 1] = 1
    return mask


def weights(*rows):
    return [normal(r * C, C) / 4 for r in rows]


def attend(q, k, v, mask, is_time, kept, dropout):
    """By its formula, from projections [T, B, C] with a head's parts apart: [T, B, C]."""
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * D**-0.5
    if mask is not None:
        wide = mask[None, None] if is_time else mask[:, None, None]
        scores = scores + wide if wide.is_floating_point() else scores.masked_fill(wide.bool(), -torch.inf)
    p = torch.softmax(scores, -1) * kept.view(scores.shape) / (1 - dropout)
    return torch.einsum("bhqk,kbhd->qbhd", p, v).flatten(2)


def gradients(output, leaves, dy):
    return torch.autograd.grad(output, leaves, dy)


def agree(found, wanted):
    torch.testing.assert_close(
        [t.double() for t in found], [t.double() for t in wanted], rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("kind", ["none", "padding", "time", "additive"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_self_attention(kind, bias, dropout):
    if kind == "additive" and not bias:
        pytest.skip("public has no such function")
    x, dy, (w_in, w_out) = normal(T, B, C), normal(T, B, C), weights(3, 1)
    biases = [normal(3 * C), normal(C)] if bias else []
    mask = {
        "none": torch.empty(0, dtype=U8, device="cpu"), "padding": padding(), "additive": normal(B, T),
        "time": torch.ones(T, T, dtype=U8, device="cpu").triu(1),
    }[kind]  # fmt: skip
    name = "self_attn" + "_bias" * bias + "_additive_mask" * (kind == "additive")
    forward, backward = getattr(raw, f"{name}_forward"), getattr(raw, f"{name}_backward")
    made = forward(kind != "none", kind == "time", True, H, x, w_in, w_out, *biases, mask, dropout)
    projected, softmax, dropped, kept, context, output = made
    shapes = [(T, B, 3 * C), (BH, T, T), (BH, T, T), (BH, T, T), (T, BH, D), (T, B, C)]
    assert isinstance(made, list) and [tuple(t.shape) for t in made] == shapes and kept.dtype == U8
    leaves = [t.requires_grad_() for t in (x, w_in, w_out, *biases)]
    q, k, v = functional.linear(x, w_in, *biases[:1]).unflatten(2, (H, 3, D)).unbind(3)
    right = functional.linear(
        attend(q, k, v, None if kind == "none" else mask, kind == "time", kept, dropout), w_out, *biases[1:]
    )
    agree([output], [right])
    if kind == "additive":
        agree([softmax], [(torch.einsum("qbhd,kbhd->bhqk", q, k) * D**-0.5).reshape(BH, T, T)])
    else:
        agree([dropped], [softmax * kept / (1 - dropout)])
        agree([softmax.sum(-1)], [torch.ones(BH, T, dtype=softmax.dtype, device="cpu")])
    between = [softmax, mask] if kind == "additive" else [softmax]
    found = backward(
        torch.tensor(H, dtype=torch.int64, device="cpu"),
        dy, context, dropped, *between, projected, x, w_in, w_out, kept,
        torch.tensor(dropout, dtype=F64, device="cpu"),
    )  # fmt: skip
    assert isinstance(found, list)
    agree(found, gradients(right, leaves, dy))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_self_attention_norm_add(dropout):
    x, dy, (w_in, w_out) = normal(T, B, C), normal(T, B, C), weights(3, 1)
    gamma, beta = normal(C), normal(C)
    made = raw.self_attn_norm_add_forward(
        True, False, True, H, x, gamma, beta, w_in, w_out, padding(), dropout
    )
    assert [tuple(t.shape) for t in made] == [
        (T, B, C), (T * B,), (T * B,), (T, B, 3 * C), (BH, T, T), (BH, T, T), (BH, T, T), (T, BH, D), (T, B, C),
        (T, B, C),
    ]  # fmt: skip
    normalized, mean, invvar, projected, softmax, dropped, kept, context, added, output = made
    assert kept.dtype == added.dtype == U8
    leaves = [t.requires_grad_() for t in (x, gamma, beta, w_in, w_out)]
    n = functional.layer_norm(x, (C,), gamma, beta, 1e-5)
    q, k, v = functional.linear(n, w_in).unflatten(2, (H, 3, D)).unbind(3)
    right = functional.linear(attend(q, k, v, padding(), False, kept, dropout), w_out)
    right = x + right * added / (1 - dropout)
    agree([output, normalized], [right, n])
    found = raw.self_attn_norm_add_backward(
        H, dy, context, dropped, softmax, projected, normalized, mean, invvar, x, gamma, beta, w_in, w_out, kept, added,
        dropout,
    )  # fmt: skip
    agree(found, gradients(right, leaves, dy))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_to_other_keys(norm, dropout):
    x, y, dy, (w_q, w_kv, w_out) = normal(T, B, C), normal(S, B, C), normal(T, B, C), weights(1, 2, 1)
    affine = [normal(C), normal(C)] if norm else []
    name = "encdec_multihead_attn" + "_norm_add" * norm
    made = getattr(raw, f"{name}_forward")(
        True, False, True, H, x, y, *affine, w_q, w_kv, w_out, padding(S), dropout
    )
    before, made = (made[:3], made[3:]) if norm else ([], made)
    of_q, of_kv, softmax, dropped, kept, context = made[:6]
    output, added = made[-1], made[6] if norm else None
    assert len(made) == 7 + norm and softmax.shape == (BH, T, S) and of_kv.shape == (S, B, 2 * C)
    leaves = [t.requires_grad_() for t in (x, y, *affine, w_q, w_kv, w_out)]
    n = functional.layer_norm(x, (C,), *affine, 1e-5) if norm else x
    q = functional.linear(n, w_q).unflatten(2, (H, D))
    k, v = functional.linear(y, w_kv).unflatten(2, (H, 2, D)).unbind(3)
    right = functional.linear(attend(q, k, v, padding(S), False, kept, dropout), w_out)
    right = x + right * added / (1 - dropout) if norm else right
    agree([output], [right])
    found = getattr(raw, f"{name}_backward")(
        H, dy, context, dropped, softmax, of_q, of_kv, *before, x, y, *affine, w_q, w_kv, w_out, kept,
        *([added] if norm else []), dropout,
    )  # fmt: skip
    agree(found, gradients(right, leaves, dy))


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("use_mask", [False, True])
def test_the_softmax_alone(additive, use_mask):
    name = "additive_mask_softmax_dropout" if additive else "mask_softmax_dropout"
    x, dy = normal(BH, T, S), normal(BH, T, S)
    mask = normal(B, S) if additive else padding(S)
    dropped, kept, softmax = getattr(raw, f"{name}_forward")(use_mask, True, H, x, mask, 0.3)
    leaf = x.requires_grad_()
    scores, wide = leaf.view(B, H, T, S), mask[:, None, None]
    if use_mask:
        scores = scores + wide if additive else scores.masked_fill(wide.bool(), -torch.inf)
    right = torch.softmax(scores, -1).view(x.shape)
    agree([softmax, dropped], [right, right * kept / 0.7])
    between = [] if additive else [mask]
    given = dy.clone()
    found = getattr(raw, f"{name}_backward")(use_mask, H, dy, softmax, kept, *between, 0.3)
    agree([found], gradients(right * kept / 0.7, [leaf], dy))
    assert torch.equal(dy, given)


def test_without_training():
    """Nothing is dropped, and what the backward is given says so."""
    x = normal(BH, T, T)
    dropped, kept, softmax = raw.mask_softmax_dropout_forward(False, False, H, x, x, 0.3)
    assert torch.equal(dropped, softmax) and kept.eq(1).all()
    x, (w_in, w_out) = normal(T, B, C), weights(3, 1)
    gamma, beta = normal(C), normal(C)
    made = raw.self_attn_norm_add_forward(False, False, False, H, x, gamma, beta, w_in, w_out, None, 0.3)
    assert made[-2].eq(1).all() and torch.equal(made[4], made[5])


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_dtypes(dtype):
    """Public takes float16 alone."""
    x, (w_in, w_out) = normal(T, B, C).to(dtype), [w.to(dtype) for w in weights(3, 1)]
    made = raw.self_attn_forward(True, False, True, H, x, w_in, w_out, padding(), 0.1)
    assert [t.dtype for t in made] == [dtype] * 3 + [U8] + [dtype] * 2
    projected, softmax, dropped, kept, context, _ = made
    found = raw.self_attn_backward(H, x, context, dropped, softmax, projected, x, w_in, w_out, kept, 0.1)
    assert all(t.dtype == dtype and t.isfinite().all() for t in found)


def test_they_record_nothing():
    x, (w_in, w_out) = normal(T, B, C).requires_grad_(), weights(3, 1)
    assert not any(
        t.requires_grad for t in raw.self_attn_forward(False, False, True, H, x, w_in, w_out, None, 0.0)
    )


def test_refusals():
    x, (w_in, w_out) = normal(T, B, C), weights(3, 1)
    for bad, error, words in (
        ((5, x, w_in, w_out), ValueError, "a multiple of 5 heads"),
        ((H, x[0], w_in, w_out), ValueError, r"inputs are \[T, B, C\]"),
        ((H, x, w_in[:C], w_out), ValueError, r"input_weights is \[72, 24\]"),
        ((H, x, w_in.float(), w_out), TypeError, "all are of one floating dtype"),
    ):
        with pytest.raises(error, match=words):
            raw.self_attn_forward(False, False, True, *bad, None, 0.0)
    with pytest.raises(ValueError, match="does not broadcast"):
        raw.self_attn_forward(True, False, True, H, x, w_in, w_out, padding(S), 0.0)


def test_all_functions_of_public_are_here():
    """Eight pairs, and the registry says that the import name is complete."""
    from apex._loader import registry

    assert len(raw.__all__) == 16 and all(callable(getattr(raw, name)) for name in raw.__all__)
    assert registry.extensions()["fast_multihead_attn"].state == "complete"


def test_no_autocast_reaches_them():
    """As public apex's: the dtypes are those of the arguments, in the backward, too."""
    x, dy = (normal(T, B, C, dtype=F32) for _ in range(2))
    w, out = (weight.to(F32) for weight in weights(3, 1))
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", BF16, enabled=enabled):
            lin, softmax, dropped, kept, context, y = raw.self_attn_forward(
                False, False, False, H, x, w, out, None, 0.0
            )
            back = raw.self_attn_backward(H, dy, context, dropped, softmax, lin, x, w, out, kept, 0.0)
        found.append([lin, softmax, dropped, context, y, *back])
    assert all(t.dtype == F32 for t in found[1])
    assert all(map(torch.equal, *found))


def test_no_autocast_reaches_raw_functions():
    """Of products and convolutions: as public apex's, they give what they are given."""
    x, weight, bias = (normal(*shape, dtype=F32) for shape in ((5, 3), (4, 3), (4,)))
    dy, image, kernel = normal(5, 4, dtype=F32), normal(2, 5, 7, 6, dtype=F32), normal(4, 5, 3, 3, dtype=F32)
    calls = [
        lambda: [fused_dense_cuda.linear_bias_forward(x, weight, bias)],
        lambda: fused_dense_cuda.linear_bias_backward(x, weight, dy),
        lambda: mlp_cuda.forward(True, 1, [x, weight, bias]),
        lambda: fused_conv_bias_relu.forward([image, kernel, bias.view(1, 4, 1, 1)], 1, 1),
    ]
    for call in calls:
        wanted = call()
        with torch.autocast("cpu", BF16):
            found = call()
        assert [t.dtype for t in found] == [t.dtype for t in wanted] and all(map(torch.equal, found, wanted))
