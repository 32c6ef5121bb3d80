"""te.DotProductAttention and te.MultiheadAttention against attention in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch_defaults
from te_common import (
    DEVICES,
    RECIPES,
    clean,  # noqa: F401  a fixture
    near,
    random,
)

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.pytorch.attention import _core, _masks, rope

pytestmark = pytest.mark.usefixtures("clean")
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def attention(q, k, v, seen, bias=0.0, scale=None):
    """[b, h, sq, d] in float64. seen: true where a query looks at a key, broadcast to [b, h, sq, skv]."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1])) + bias
    scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num()  # a row that sees nothing
    return weights @ v


def everything(b, sq, skv):
    return torch.ones(b, 1, sq, skv, dtype=torch.bool, device="cpu")


def diagonal(sq, skv, shift, left=None, right=0):
    """Keys from `left` before (None: all) to `right` behind a query's place plus shift."""
    away = torch.arange(skv, dtype=torch.int64, device="cpu") - torch.arange(
        sq, dtype=torch.int64, device="cpu"
    ).unsqueeze(1)
    seen = away - shift <= right
    return seen if left is None else seen & (away - shift >= -left)


def short(b, n):
    """Padding [b, 1, 1, n]: the first sequence is whole."""
    lengths = torch.tensor([n, n - 2, 1][:b], dtype=torch.int64, device="cpu")
    return (torch.arange(n, dtype=torch.int64, device="cpu") >= lengths.unsqueeze(1))[
        :, None, None, :
    ], lengths


def cases():
    """(kind, window, mask, what is seen) of b=3, sq=5, skv=7."""
    b, sq, skv = 3, 5, 7
    keys, lk = short(b, skv)
    queries, lq = short(b, sq)
    pair = ~keys & ~queries.transpose(-1, -2)
    drawn = random(b, 1, sq, skv, seed=9) > 0.7
    shift = (lk - lq).view(-1, 1, 1, 1)
    away = diagonal(sq, skv, 0, 99, 99)
    del away
    end = torch.stack([diagonal(sq, skv, int(s)) for s in shift.flatten()]).unsqueeze(1)
    near_end = torch.stack([diagonal(sq, skv, int(s), 1, 2) for s in shift.flatten()]).unsqueeze(1)
    return [
        ("no_mask", None, None, everything(b, sq, skv)),
        ("causal", None, None, diagonal(sq, skv, 0)),
        ("causal", (2, 0), None, diagonal(sq, skv, 0, 2)),
        ("causal_bottom_right", None, None, diagonal(sq, skv, 2)),
        ("no_mask", (1, 1), None, diagonal(sq, skv, 2, 1, 1)),
        ("padding", None, keys, ~keys),
        ("padding", None, (queries, keys), pair),
        ("padding", (1, 2), (queries, keys), pair & near_end),
        ("padding_causal", None, (queries, keys), pair & diagonal(sq, skv, 0)),
        ("padding,causal", None, (queries, keys), pair & diagonal(sq, skv, 0)),
        ("padding_causal_bottom_right", None, (queries, keys), pair & end),
        ("arbitrary", None, drawn, ~drawn),
        ("arbitrary", (-1, 1), drawn, ~drawn & diagonal(sq, skv, 2, None, 1)),
    ]


def laid(t, form):
    """[b, h, s, d] as a format has it."""
    return t.permute(2, 0, 1, 3).contiguous() if form == "sbhd" else t.transpose(1, 2).contiguous()


@pytest.fixture(params=["sdpa", "unfused"])
def core(request, monkeypatch):
    if request.param == "unfused":
        monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
        monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    return request.param


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.parametrize("groups", [4, 2])
def test_values_and_gradients(case, form, groups, device, core):
    kind, window, mask, seen = case
    shapes = (3, 4, 5, 8), (3, groups, 7, 8), (3, groups, 7, 8)
    tensors = [random(*shape, seed=i, device=device).requires_grad_() for i, shape in enumerate(shapes)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    made = te.DotProductAttention(4, 8, num_gqa_groups=groups, qkv_format=form, attn_mask_type=kind)
    moved = (
        tuple(m.to(device) for m in mask)
        if isinstance(mask, tuple)
        else mask
        if mask is None
        else mask.to(device)
    )
    found = made(*(laid(t, form) for t in tensors), attention_mask=moved, window_size=window)
    expected = laid(attention(*wide, seen.to(device)), form).flatten(-2)
    near(found, expected.detach(), F32, units=32)
    grad = random(*found.shape, seed=5, device=device)
    found.backward(grad)
    expected.backward(grad.double())
    for t, w in zip(tensors, wide, strict=True):
        near(t.grad, w.grad, F32, units=64)


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias", "alibi"])
def test_biases(kind, core):
    q, k, v = (random(2, 4, s, 8, seed=s) for s in (5, 7, 7))
    bias, scale = random(1, 4, 5, 7, seed=3).requires_grad_(), 0.3
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=F32, device="cpu")
    made = te.DotProductAttention(4, 8, attn_mask_type="no_mask", softmax_scale=scale)
    given = dict(core_attention_bias=bias) if kind != "alibi" else {}
    found = made(*(laid(t, "sbhd") for t in (q, k, v)), core_attention_bias_type=kind, **given)
    if kind == "alibi":
        away = (
            torch.arange(7, dtype=F64, device="cpu")
            - torch.arange(5, dtype=F64, device="cpu").unsqueeze(1)
            - 2
        )
        added = -(
            torch.tensor([0.25, 1 / 16, 1 / 64, 1 / 256], dtype=F64, device="cpu").view(1, 4, 1, 1)
            * away.abs()
        )
        other = made(
            *(laid(t, "sbhd") for t in (q, k, v)), core_attention_bias_type="alibi", alibi_slopes=slopes
        )
        wide = attention(
            q, k, v, everything(2, 5, 7), -(slopes.double().view(1, 4, 1, 1) * away.abs()), scale
        )
        near(other, laid(wide, "sbhd").flatten(-2), F32, units=32)
    else:
        added = bias.detach().double() * (scale if kind == "pre_scale_bias" else 1.0)
        found.sum().backward(retain_graph=True)
        assert bias.grad.abs().sum() > 0
    expected = attention(q, k, v, everything(2, 5, 7), added, scale)
    near(found, laid(expected, "sbhd").flatten(-2), F32, units=32)


def test_slopes_of_heads_that_are_no_power_of_two():
    found = _masks.alibi_slopes(6, torch.device("cpu")).tolist()
    assert found == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("longest", [None, 6])
def test_packed_sequences(kind, longest, core):
    """Each as if it were alone; tokens behind the last sequence give zeros."""
    lengths, heads = ([3, 1, 4], [5, 2, 4]), 2
    cu = [torch.tensor([0, *itertools_sum(n)], dtype=torch.int32, device="cpu") for n in lengths]
    q, k, v = (random(total, heads, 8, seed=total).requires_grad_() for total in (10, 11, 11))
    made = te.DotProductAttention(heads, 8, qkv_format="thd", attn_mask_type=kind)
    found = made(
        q, k, v, cu_seqlens_q=cu[0], cu_seqlens_kv=cu[1], max_seqlen_q=longest, max_seqlen_kv=longest
    )
    assert found.shape == (10, heads * 8) and not found[8:].any()
    for i in range(3):
        part = [
            t[c[i] : c[i + 1]].transpose(0, 1).unsqueeze(0) for t, c in ((q, cu[0]), (k, cu[1]), (v, cu[1]))
        ]
        sq, skv = lengths[0][i], lengths[1][i]
        seen = everything(1, sq, skv)
        if "causal" in kind:
            seen = seen & diagonal(sq, skv, skv - sq if kind.endswith("right") else 0)
        expected = attention(*(t.detach() for t in part), seen)[0].transpose(0, 1).flatten(-2)
        near(found[cu[0][i] : cu[0][i + 1]], expected, F32, units=32)
    found.sum().backward()
    assert v.grad[:11].abs().sum() > 0 and q.grad.isfinite().all()


def itertools_sum(numbers):
    total = 0
    for number in numbers:
        total += number
        yield total


def test_dropout_and_the_checkpoint_of_the_core():
    tensors = [random(6, 2, 2, 8, seed=i).requires_grad_() for i in range(3)]
    made = te.DotProductAttention(2, 8, attention_dropout=0.5)
    results = []
    for again in (False, True):
        torch.manual_seed(4)
        found = made(*tensors, checkpoint_core_attention=again)
        results.append((found, *torch.autograd.grad(found.square().sum(), tensors)))
    assert all(map(torch.equal, *results))
    torch.manual_seed(5)
    assert not torch.equal(made(*tensors), results[0][0])
    made.eval()
    assert torch.equal(made(*tensors), made(*tensors))


@pytest.mark.parametrize(
    "call",
    [
        lambda made, t: made(*t, attn_mask_type="padding"),
        lambda made, t: made(*t, attn_mask_type="diagonal"),
        lambda made, t: made(*t, core_attention_bias_type="post_scale_bias"),
        lambda made, t: made(*t, core_attention_bias_type="other"),
        lambda made, t: made(*t, qkv_format="thd"),
        lambda made, t: made(t[0], t[1][:, :, :1], t[2]),
        lambda made, t: made(*t[:2], t[2][:5], attn_mask_type="no_mask"),
        lambda made, t: made(*t[:2], t[2][:, :1], attn_mask_type="no_mask"),
        lambda made, t: made(t[0], t[1][..., :6], t[2], attn_mask_type="no_mask"),
        lambda made, t: made(*t, window_size=(-2, 0)),
        lambda made, t: te.DotProductAttention(3, 8, num_gqa_groups=2),
        lambda made, t: te.DotProductAttention(2, 8, qkv_format="hsbd"),
    ],
)
def test_what_is_refused(call):
    with pytest.raises(ValueError):
        call(te.DotProductAttention(2, 8), [random(6, 2, 2, 8, seed=i) for i in range(3)])


def test_the_switches_of_the_engine(monkeypatch):
    assert not _core.is_unfused()
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert not _core.is_unfused()
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert _core.is_unfused()


# ---- the layer -------------------------------------------------------------------------------------------------------


def multihead(**options):
    torch.manual_seed(2)
    made = te.MultiheadAttention(32, 4, attention_dropout=0.0, device="cpu", **options)
    for parameter in made.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def norm(x, weight, bias, eps=1e-5):
    mean = x.mean(-1, keepdim=True) if bias is not None else 0.0
    x = x - mean
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return x if bias is None else x + bias


def heads_of(made, x, memory=None):
    """Queries, keys and values [s, b, heads, d] in float64, of one weight each."""
    p = {name: value.detach().double() for name, value in made.named_parameters()}
    first = next(
        name for name in ("layernorm_qkv", "qkv", "layernorm_query", "query_layer") if hasattr(made, name)
    )
    if first.startswith("layernorm"):
        x = norm(x, p[f"{first}.layer_norm_weight"], p.get(f"{first}.layer_norm_bias"))
    if "qkv" in first:
        parts = [(x, f"{first}.{n}_") for n in ("query", "key", "value")]
    else:
        parts = [(x, f"{first}."), (memory, "key_value.key_"), (memory, "key_value.value_")]
    return [(t @ p[n + "weight"].t() + p[n + "bias"]).unflatten(-1, (-1, 8)) for t, n in parts]


def expected_of(made, x, seen, memory=None, turn=lambda t: t):
    q, k, v = heads_of(made, x.double(), None if memory is None else memory.double())
    found = (
        attention(*(t.permute(1, 2, 0, 3) for t in (turn(q), turn(k), v)), seen)
        .permute(2, 0, 1, 3)
        .flatten(-2)
    )
    return found @ made.proj.weight.detach().double().t() + made.proj.bias.detach().double()


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize(
    "options", [{}, dict(input_layernorm=True), dict(input_layernorm=True, normalization="RMSNorm")], ids=str
)
def test_self_attention(options, groups):
    made, x = multihead(num_gqa_groups=groups, **options), random(5, 3, 32)
    near(made(x), expected_of(made, x, diagonal(5, 5, 0)), F32, units=64)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("options", [{}, dict(input_layernorm=True)], ids=str)
def test_cross_attention(options, groups):
    made = multihead(attention_type="cross", attn_mask_type="no_mask", num_gqa_groups=groups, **options)
    x, memory = random(5, 3, 32), random(7, 3, 32, seed=1)
    near(made(x, encoder_output=memory), expected_of(made, x, everything(3, 5, 7), memory), F32, units=64)
    with pytest.raises(ValueError):
        made(x)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_one_weight_for_all(groups, interleaved, kind):
    """Its rows are those of three weights, one behind the other, or by groups."""
    three, g = multihead(num_gqa_groups=groups, attention_type=kind), groups or 4
    one = multihead(
        num_gqa_groups=groups, attention_type=kind, fuse_qkv_params=True, qkv_weight_interleaved=interleaved
    )
    source, target = (three.qkv, one.qkv) if kind == "self" else (three.key_value, one.key_value)
    names = ("query_", "key_", "value_")[kind == "cross" :]
    for end in ("weight", "bias"):
        parts = [getattr(source, name + end).detach() for name in names]
        if interleaved:
            parts = [torch.cat([part.unflatten(0, (g, -1)) for part in parts], 1).flatten(0, 1)]
        getattr(target, end).data.copy_(torch.cat(parts))
    rest = {n: v for n, v in three.state_dict().items() if not n.startswith(("qkv", "key_value"))}
    one.load_state_dict(rest, strict=False)
    x, memory = random(5, 3, 32), None if kind == "self" else random(7, 3, 32, seed=1)
    near(one(x, encoder_output=memory), three(x, encoder_output=memory).detach().double(), F32, units=16)


def test_outputs_that_are_asked_for():
    made = multihead(return_bias=True, input_layernorm=True, return_layernorm_output=True)
    other, x = multihead(input_layernorm=True), random(5, 3, 32)
    output, bias, normed = made(x)
    assert bias is made.proj.bias
    near(output + bias, other(x).detach().double(), F32, units=16)
    first = made.layernorm_qkv
    near(
        normed,
        norm(x.double(), first.layer_norm_weight.double(), first.layer_norm_bias.double()).detach(),
        F32,
        16,
    )


def test_batches_first():
    one, other, x = multihead(), multihead(qkv_format="bshd"), random(5, 3, 32)
    freqs = te.RotaryPositionEmbedding(8).to("cpu")(5)
    assert torch.equal(
        other(x.transpose(0, 1), rotary_pos_emb=freqs).transpose(0, 1), one(x, rotary_pos_emb=freqs)
    )


def test_angles_are_made_where_layers_are(monkeypatch):
    monkeypatch.setattr(rope, "device_of", lambda device: torch.device("meta"))
    assert te.RotaryPositionEmbedding(8)(5).is_meta


def turned(t, angles):
    """t [s, b, h, d] by angles [s, 1, 1, d]: pairs k and k + d / 2."""
    first, second = t.chunk(2, -1)
    return t * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def test_rotary_embedding():
    made, x = multihead(), random(5, 3, 32)
    freqs = te.RotaryPositionEmbedding(8).to("cpu")(9)
    places = torch.arange(9, dtype=F64, device="cpu").view(-1, 1, 1, 1)
    waves = torch.tensor([10000.0 ** (-i / 4) for i in range(4)] * 2, dtype=F64, device="cpu")
    near(freqs, places * waves, F32)
    angles = (places * waves)[:5]
    expected = expected_of(made, x, diagonal(5, 5, 0), turn=lambda t: turned(t, angles))
    near(made(x, rotary_pos_emb=freqs), expected, F32, units=64)
    near(made(x, rotary_pos_emb=(freqs, freqs)), expected, F32, units=64)
    with pytest.raises(ValueError, match="places"):
        made(x, rotary_pos_emb=freqs[:4])
    assert te.RotaryPositionEmbedding(8, 0.5, 2).to("cpu")(3, 4).flatten()[:4].tolist() == pytest.approx(
        [2, 0.02, 2, 0.02]
    )
    assert te.RotaryPositionEmbedding(8, 1.0, 2, 2).to("cpu")(8)[7, 0, 0, 0] == 7 * 2 / 8


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_the_cache_of_a_generation(form):
    """Token by token, or some at once, as all at once."""
    made, x = multihead(num_gqa_groups=2, layer_number=3, qkv_format=form).eval(), random(6, 2, 32)
    freqs = te.RotaryPositionEmbedding(8).to("cpu")(8)
    lay = (lambda t: t) if form == "sbhd" else (lambda t: t.transpose(0, 1))
    with torch.no_grad():
        expected = made(lay(x), rotary_pos_emb=freqs)
        cache, found = te.InferenceParams(3, 7), []
        for begin, end in ((0, 3), (3, 4), (4, 6)):
            found.append(lay(made(lay(x[begin:end]), inference_params=cache, rotary_pos_emb=freqs)))
            cache.sequence_len_offset = end
        near(torch.cat(found), lay(expected).double(), F32, units=16)
        assert list(cache.key_value_memory_dict) == [3]
        cache.swap_key_value_dict(torch.tensor([1, 0, 2], dtype=torch.int64, device="cpu"))
        other = lay(made(lay(x[5:6].flip(1)), inference_params=cache, rotary_pos_emb=freqs))
        assert other.isfinite().all()
        cache.sequence_len_offset = 7
        with pytest.raises(ValueError, match="cache"):
            made(lay(x[:1]), inference_params=cache)
    with pytest.raises(ValueError):
        te.InferenceParams(1, 1).swap_key_value_dict(torch.zeros(1, dtype=torch.int64, device="cpu"))


@pytest.mark.parametrize(
    "options", [dict(layer_number=0), dict(attention_type="both"), dict(qkv_format="thd")], ids=str
)
def test_layers_that_are_refused(options):
    with pytest.raises(ValueError):
        multihead(**options)


def test_compiled_without_breaks_and_in_fp8():
    torch_defaults.skip_compiled("layers of apex.transformer_engine")
    made = multihead(input_layernorm=True)
    other, x = copy.deepcopy(made), random(5, 3, 32)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    for of in (None, RECIPES["current"]):
        results = []
        for module, run in ((made, compiled), (other, other)):
            with te.fp8_autocast(enabled=of is not None, fp8_recipe=of):
                y = run(x)
            y.square().sum().backward()
            results.append(y)
            assert all(p.grad is not None for p in module.parameters())
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    wide = made(x)
    assert 0 < (results[0] - wide).norm() < 0.1 * wide.norm()
