"""Rotary positions and kinds of bias of apex.transformer_engine.jax.flax's attention against formulas in float64, and
the names of a layer's parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex.transformer_engine.jax import flax as layers
from apex.transformer_engine.jax.flax.rotary import rotary_pos_emb

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
WINDOWS = (1, 10000)


def drawn(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def turned(x, windows, method, first=0):
    """x [batch, sequence, heads, d] in float64, pair by pair as complex numbers."""
    x = np.asarray(x, np.float64)
    out, half = np.empty_like(x), x.shape[-1] // 2
    for i in range(half):
        scale = windows[0] * (windows[1] / windows[0]) ** (i / half)
        a, b = (2 * i, 2 * i + 1) if method == "consecutive" else (i, i + half)
        angle = np.exp(1j * (first + np.arange(x.shape[1])) / scale)[None, :, None]
        pair = (x[..., a] + 1j * x[..., b]) * angle
        out[..., a], out[..., b] = pair.real, pair.imag
    return out


def attended(q, k, v, bias=0.0, scale=1.0, scaled_bias=False, causal=True):
    """softmax(scale q k + bias) v in float64, or softmax(scale (q k + bias)) v; k and v may have fewer heads."""
    q, k, v, bias = (np.asarray(t, np.float64) for t in (q, k, v, bias))
    k, v = (np.repeat(t, q.shape[2] // t.shape[2], 2) for t in (k, v))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k)
    logits = scale * (logits + bias) if scaled_bias else scale * logits + bias
    if causal:
        logits = np.where(np.tri(*logits.shape[2:], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def close(got, wanted, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("windows", [WINDOWS, (2, 500)])
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
def test_rotary_positions(method, transposed, windows, dtype):
    x = drawn(2, 33, 3, 8, dtype=dtype)
    given = x.swapaxes(0, 1) if transposed else x
    for first in (0, 5):
        got = rotary_pos_emb(given, windows, transposed, method, first)
        assert got.dtype == dtype and got.shape == given.shape
        got = got.swapaxes(0, 1) if transposed else got
        close(got, turned(x, windows, method, first), max(float(jnp.finfo(dtype).eps), 1e-12) * 32)


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("cross", [False, True])
def test_attention_with_rotary_positions(method, transposed, groups, cross):
    layer = layers.MultiHeadAttention(
        head_dim=8, num_attention_heads=4, num_gqa_groups=groups, fuse_qkv_params=False, input_layernorm=False,
        attn_mask_type="no_mask" if cross else "causal", transpose_batch_sequence=transposed,
        enable_rotary_pos_emb=True, rotary_pos_emb_group_method=method,
    )  # fmt: skip
    x = drawn(2, 6, 16)
    other = drawn(2, 9, 16, seed=1) if cross else x
    given = x.swapaxes(0, 1) if transposed else x
    given_other = given if not cross else other.swapaxes(0, 1) if transposed else other
    v = layer.init(KEYS, given, given_other, deterministic=True)
    got, _ = layer.apply(v, given, given_other, deterministic=True)
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), v["params"])
    sources = {"query": x, "key": other, "value": other}
    parts = {n: np.asarray(t, np.float64) @ p[n]["kernel"] for n, t in sources.items()}
    parts = {n: t.reshape(*t.shape[:2], -1, 8) for n, t in parts.items()}
    q, k = (turned(parts[n], WINDOWS, method) for n in ("query", "key"))
    wanted = attended(q, k, parts["value"], causal=not cross).reshape(2, 6, 32) @ p["out"]["kernel"]
    close(got.swapaxes(0, 1) if transposed else got, wanted)


def test_rotary_positions_that_are_refused():
    with pytest.raises(ValueError, match="'consecutive' or 'alternate', not 'other'"):
        rotary_pos_emb(drawn(1, 2, 1, 4), WINDOWS, False, "other")
    with pytest.raises(ValueError, match="head_dim is 5"):
        rotary_pos_emb(drawn(1, 2, 1, 5), WINDOWS, False)


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias", None])
def test_kinds_of_bias(kind):
    q, k, v = (drawn(2, 5, 4, 8, seed=seed) for seed in range(3))
    bias = drawn(1, 4, 5, 5, seed=3)
    layer = layers.DotProductAttention(8, 4, attn_bias_type=kind, transpose_batch_sequence=False)
    got = layer.apply({}, q, k, v, None, bias, deterministic=True)
    close(got, attended(q, k, v, bias, 8**-0.5, kind == "pre_scale_bias"))


def test_a_layer_has_the_kind_of_bias_that_it_says():
    x = drawn(2, 5, 16)
    fields = {"hidden_size": 16, "mlp_hidden_size": 32, "num_attention_heads": 4}
    plain = layers.TransformerLayer(**fields, enable_relative_embedding=False)
    v = plain.init(KEYS, x, deterministic=True)
    none = layers.TransformerLayer(**fields, enable_relative_embedding=False, self_attn_bias_type="no_bias")
    assert jnp.array_equal(plain.apply(v, x, deterministic=True), none.apply(v, x, deterministic=True))
    for embedding, kind, text in (
        (True, "no_bias", "there is a bias"),
        (False, "post_scale_bias", "there is no bias"),
        (True, "what", "not 'what'"),
    ):
        layer = layers.TransformerLayer(
            **fields, enable_relative_embedding=embedding, self_attn_bias_type=kind
        )
        with pytest.raises(ValueError, match=text):
            layer.init(KEYS, x, deterministic=True)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_parameters_with_output_layernorm_have_public_names(kind):
    x = drawn(2, 4, 16)
    layer = layers.TransformerLayer(
        hidden_size=16, mlp_hidden_size=32, num_attention_heads=4, output_layernorm=True, layernorm_type="rmsnorm",
        layer_type=layers.TransformerLayerType(kind),
    )  # fmt: skip
    params = layer.init(KEYS, x, x, deterministic=True)["params"]
    got = {"/".join(k.key for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    mine = {"qkv/kernel", "out/kernel"}
    cross = {"query/scale", "query/kernel", "kv/kernel", "out/kernel"} if kind == "decoder" else set()
    name = "self_attention" if kind == "decoder" else "attention"
    wanted = {f"{name}/{part}" for part in mine} | {f"encoder_decoder_attention/{part}" for part in cross}
    wanted |= {
        "mlp/scale",
        "mlp/wi_kernel",
        "mlp/wo_kernel",
        "output_layernorm/scale",
        "relpos_bias/rel_embedding",
    }
    assert got == wanted
