"""The Flax layers of apex.transformer_engine.jax against compositions of jax.numpy, of the same parameters."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.linen import partitioning

from apex.transformer_engine import jax as te
from apex.transformer_engine.jax import flax as layers

KEY = jax.random.key(0)
EPS = 1e-6


def drawn(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def randomized(variables, seed=7):
    """The same variables with other parameters: none is 0 or 1, as initial biases and scales are."""
    leaves, tree = jax.tree.flatten(variables["params"])
    rng = np.random.default_rng(seed)
    drawn_leaves = [jnp.asarray(rng.standard_normal(leaf.shape) * 0.3, leaf.dtype) for leaf in leaves]
    return {**variables, "params": jax.tree.unflatten(tree, drawn_leaves)}


def made(layer, *arguments, **keywords):
    return randomized(layer.init({"params": KEY, "dropout": KEY}, *arguments, **keywords))


def shapes(variables):
    return jax.tree.map(lambda leaf: leaf.shape, variables["params"])


def norm(x, p, kind="layernorm", centered=False):
    gamma = p["scale"] + 1 if centered else p["scale"]
    if kind == "rmsnorm":
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gamma
    shifted = x - x.mean(-1, keepdims=True)
    return shifted / jnp.sqrt((shifted**2).mean(-1, keepdims=True) + EPS) * gamma + p["ln_bias"]


def close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(
        np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("axis", [-1, (1, 2), (-1, 0)])
@pytest.mark.parametrize("features", [5, (3, 4)])
def test_dense_general(axis, features):
    layer, x = layers.DenseGeneral(features=features, axis=axis), drawn(2, 6, 7)
    v = made(layer, x)
    axes = (axis,) if isinstance(axis, int) else axis
    p = v["params"]
    wanted = jnp.tensordot(x, p["kernel"], (axes, tuple(range(len(axes))))) + p["bias"]
    close(layer.apply(v, x), wanted)


def test_dense_has_the_fans_of_its_product():
    layer = layers.DenseGeneral(features=(4, 64), axis=(-2, -1))
    kernel = layer.init(KEY, drawn(1, 8, 128))["params"]["kernel"]
    assert kernel.shape == (8, 128, 4, 64)
    assert abs(float(kernel.std()) * math.sqrt(8 * 128) - 1) < 0.02


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("centered", [False, True])
def test_norm_layers(kind, centered):
    x = drawn(2, 3, 16)
    layer = layers.LayerNorm(layernorm_type=kind, zero_centered_gamma=centered)
    first = layer.init(KEY, x)["params"]
    assert float(first["scale"][0]) == (0.0 if centered else 1.0) and ("ln_bias" in first) == (
        kind == "layernorm"
    )
    v = made(layer, x)
    close(layer.apply(v, x), norm(x, v["params"], kind, centered))
    dense = layers.LayerNormDenseGeneral(
        features=(2, 5), layernorm_type=kind, zero_centered_gamma=centered, use_bias=True, depth_scaling=3.0
    )
    v = made(dense, x)
    p = v["params"]
    output, normalized = dense.apply(v, x)
    close(normalized, norm(x, p, kind, centered))
    close(output, (jnp.einsum("abi,ijk->abjk", normalized, p["kernel"]) + p["bias"]) / 3)


def test_without_its_norm_or_its_output():
    x = drawn(2, 3, 16)
    layer = layers.LayerNormDenseGeneral(features=4, enable_layernorm=False, return_layernorm_output=False)
    v = made(layer, x)
    output, nothing = layer.apply(v, x)
    assert set(v["params"]) == {"kernel"} and nothing is None
    close(output, x @ v["params"]["kernel"])


@pytest.mark.parametrize(
    "activations", [("relu",), ("gelu", "linear"), ("silu", "linear"), ("quick_gelu",), ("squared_relu",)]
)
@pytest.mark.parametrize("use_bias", [False, True])
def test_mlp(activations, use_bias):
    plain = {
        "relu": lambda x: jnp.maximum(x, 0),
        "gelu": lambda x: 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "silu": lambda x: x / (1 + jnp.exp(-x)),
        "quick_gelu": lambda x: x / (1 + jnp.exp(-1.702 * x)),
        "squared_relu": lambda x: jnp.maximum(x, 0) ** 2,
        "linear": lambda x: x,
    }
    x, layer = (
        drawn(2, 3, 16),
        layers.LayerNormMLP(intermediate_dim=24, activations=activations, use_bias=use_bias),
    )
    v = made(layer, x, deterministic=True)
    p = v["params"]
    assert p["wi_kernel"].shape == (16, len(activations), 24) and p["wo_kernel"].shape == (24, 16)

    def composed(p, x):
        normalized = norm(x, p)
        z = jnp.einsum("abi,ijk->abjk", normalized, p["wi_kernel"])
        z = z + p["wi_bias"] if use_bias else z
        parts = [plain[name](z[..., i, :]) for i, name in enumerate(activations)]
        out = math.prod(parts[1:], start=parts[0]) @ p["wo_kernel"]
        return out + p["wo_bias"] if use_bias else out

    output, normalized = layer.apply(v, x, deterministic=True)
    close(normalized, norm(x, p))
    close(output, composed(p, x))
    got = jax.grad(lambda p: (layer.apply({"params": p}, x, deterministic=True)[0] ** 2).sum())(p)
    wanted = jax.grad(lambda p: (composed(p, x) ** 2).sum())(p)
    for name in p:
        scale = float(jnp.abs(wanted[name]).max())
        close(got[name] / scale, wanted[name] / scale)


def attend(q, k, v, mask=None, causal=False, bias=None, scale=1.0):
    """[batch, sequence, heads, d] each, one by one."""
    out = np.zeros(q.shape, np.float64)
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            of = h // (q.shape[2] // k.shape[2])
            for i in range(q.shape[1]):
                kept = np.ones(k.shape[1], bool)
                if causal:
                    kept &= np.arange(k.shape[1]) <= i + k.shape[1] - q.shape[1]
                if mask is not None:
                    kept &= ~np.broadcast_to(
                        np.asarray(mask), (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
                    )[b, h, i]
                if not kept.any():
                    continue
                logits = k[b, kept, of] @ q[b, i, h] * scale
                if bias is not None:
                    logits = (
                        logits
                        + np.broadcast_to(np.asarray(bias), (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))[
                            b, h, i, kept
                        ]
                    )
                weights = np.exp(logits - logits.max())
                out[b, i, h] = weights @ v[b, kept, of] / weights.sum()
    return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["causal", "padding_causal", "padding", "no_mask"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_attention_core(transposed, kind, groups):
    q, k, v = drawn(2, 5, 4, 8), drawn(2, 5, groups, 8, seed=1), drawn(2, 5, groups, 8, seed=2)
    mask = jnp.asarray(np.random.default_rng(3).random((2, 1, 5, 5)) < 0.3) if kind != "no_mask" else None
    bias = drawn(1, 4, 5, 5, seed=4)
    layer = layers.DotProductAttention(
        head_dim=8,
        num_attention_heads=4,
        num_gqa_groups=groups,
        attn_mask_type=kind,
        transpose_batch_sequence=transposed,
    )
    turn = (lambda t: t.swapaxes(0, 1)) if transposed else (lambda t: t)
    got = layer.apply({}, turn(q), turn(k), turn(v), mask, bias, deterministic=True)
    counted = None if kind == "causal" else mask  # which "causal" does not look at
    close(turn(got), attend(q, k, v, counted, "causal" in kind, bias, 1 / math.sqrt(8)))
    if groups == 4 and kind == "causal":
        packed = layer.clone(qkv_layout="bs3hd").apply(
            {}, jnp.stack([turn(q), turn(k), turn(v)], 2), None, None, mask, bias, deterministic=True
        )
        assert jnp.array_equal(packed, got)
    both = jnp.stack([turn(k), turn(v)], 2)
    packed = layer.clone(qkv_layout="bshd_bs2hd", scale_factor=8**-0.5)
    assert jnp.array_equal(packed.apply({}, turn(q), both, None, mask, bias, deterministic=True), got)


def test_attention_weights_are_dropped_one_by_one():
    """By the module's own stream: equal queries lose different weights, a part of them as large as is said."""
    q = jnp.broadcast_to(drawn(1, 1, 1, 8), (2, 64, 1, 8))
    k, v = drawn(2, 64, 1, 8, seed=1), jnp.broadcast_to(jnp.eye(64)[None, :, None], (2, 64, 1, 64))
    layer = layers.DotProductAttention(8, 1, None, 0.25, "no_mask", transpose_batch_sequence=False)
    whole = layer.apply(
        {}, q, k, v, deterministic=True
    )  # the weights themselves, as values are a unit matrix
    dropped = layer.apply({}, q, k, v, rngs={"dropout": KEY})
    left = dropped != 0
    close(dropped, jnp.where(left, whole / 0.75, 0.0))
    assert abs(float(left.mean()) - 0.75) < 0.03 and not (left == left[:, :1]).all(axis=1).any()
    assert jnp.array_equal(dropped, layer.apply({}, q, k, v, rngs={"dropout": KEY}))


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("groups", [None, 2])
def test_multi_head_attention(fuse, cross, groups):
    x, y = drawn(2, 5, 16), drawn(2, 7, 16, seed=1)
    layer = layers.MultiHeadAttention(
        head_dim=4, num_attention_heads=4, num_gqa_groups=groups, fuse_qkv_params=fuse, transpose_batch_sequence=False,
        use_bias=True, attn_mask_type="no_mask", return_layernorm_output=True,
    )  # fmt: skip
    other = y if cross else x
    v = made(layer, x, other, deterministic=True)
    p = v["params"]
    first = p["qkv" if "qkv" in p else "query"]
    normalized = norm(x, first)
    source = y if cross else normalized
    if "qkv" in p:
        assert fuse and not cross and groups is None
        joined = jnp.einsum("bsi,ijk->bsjk", normalized, first["kernel"]) + first["bias"]
        parts = [joined[..., i, :] for i in range(3)]
    else:
        parts = [normalized @ first["kernel"] + first["bias"]]
        if fuse:
            joined = jnp.einsum("bsi,ijk->bsjk", source, p["kv"]["kernel"]) + p["kv"]["bias"]
            parts += [joined[..., 0, :], joined[..., 1, :]]
        else:
            parts += [source @ p[n]["kernel"] + p[n]["bias"] for n in ("key", "value")]
    heads = [t.reshape(*t.shape[:2], -1, 4) for t in parts]
    context = attend(*heads).reshape(2, 5, 16)
    output, residual = layer.apply(v, x, other, deterministic=True)
    close(residual, normalized)
    close(output, context @ np.asarray(p["out"]["kernel"]) + np.asarray(p["out"]["bias"]), 5e-5)


def test_fields_of_earlier_releases():
    """They warn, and what comes beside the output is the residual."""
    x = drawn(2, 5, 16)
    fields = {"head_dim": 4, "transpose_batch_sequence": False}
    now = layers.MultiHeadAttention(
        num_attention_heads=4,
        attention_dropout=0.5,
        fuse_qkv_params=False,
        return_layernorm_output=True,
        **fields,
    )
    with pytest.warns(DeprecationWarning, match="num_attention_heads") as told:
        old = layers.MultiHeadAttention(
            num_heads=4,
            dropout_rate=0.5,
            fuse_qkv=False,
            apply_residual_connection_post_layernorm=True,
            **fields,
        )
    assert len(told) == 4
    v = made(now, x, x, deterministic=True)
    for drop in (True, False):
        found = [layer.apply(v, x, x, deterministic=drop, rngs={"dropout": KEY}) for layer in (now, old)]
        assert all(map(jnp.array_equal, *found))
    assert now.clone(return_layernorm_output=False).apply(v, x, x, deterministic=True)[1] is None
    with pytest.warns(DeprecationWarning):
        plain = layers.MultiHeadAttention(
            num_heads=4, apply_residual_connection_post_layernorm=False, **fields
        )
        without = layers.MultiHeadAttention(num_attention_heads=4, output_layernorm=True, **fields)
    assert plain.apply(made(plain, x, x, deterministic=True), x, x, deterministic=True)[1] is x
    assert (
        not without.input_layernorm
        and "scale" not in made(without, x, x, deterministic=True)["params"]["qkv"]
    )


def test_the_query_begins_scaled():
    layer = layers.MultiHeadAttention(head_dim=64, num_attention_heads=4, transpose_batch_sequence=False)
    x = drawn(1, 4, 256)
    kernel = layer.init({"params": KEY, "dropout": KEY}, x, x)["params"]["qkv"]["kernel"]
    query, key, value = (float(kernel[:, i].std()) * 16 for i in range(3))
    assert abs(query * 8 - 1) < 0.05 and abs(key - 1) < 0.05 and abs(value - 1) < 0.05


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_decoding_gives_what_the_whole_sequence_gives(transposed, rotary):
    x = drawn(2, 6, 16)
    turned = x.swapaxes(0, 1) if transposed else x
    layer = layers.TransformerLayer(
        hidden_size=16, mlp_hidden_size=32, num_attention_heads=4, transpose_batch_sequence=transposed,
        layer_type=layers.TransformerLayerType.DECODER, enable_rotary_pos_emb=rotary,
    )  # fmt: skip
    encoded = turned * 0.5
    v = made(layer, turned, encoded, deterministic=True, decode=True)
    whole = layer.apply({"params": v["params"]}, turned, encoded, deterministic=True)
    cache, axis = v["cache"], 0 if transposed else 1
    for i in range(6):
        one = jax.lax.slice_in_dim(turned, i, i + 1, axis=axis)
        got, changed = layer.apply(
            {"params": v["params"], "cache": cache}, one, encoded, deterministic=True, decode=True, max_decode_length=6,
            mutable=["cache"],
        )  # fmt: skip
        cache = changed["cache"]
        close(got, jax.lax.slice_in_dim(whole, i, i + 1, axis=axis))
    with pytest.raises(ValueError, match="one position a call"):
        layer.apply(
            {"params": v["params"], "cache": cache},
            turned,
            encoded,
            deterministic=True,
            decode=True,
            mutable=["cache"],
        )


def bucket(distance, bidirectional, buckets, far):
    """T5's bucket of one key - query."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    grown = exact + int(math.log(distance / exact) / math.log(far / exact) * (buckets - exact))
    return first + min(grown, buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_position_biases(bidirectional):
    layer = layers.RelativePositionBiases(num_buckets=32, max_distance=128, num_attention_heads=3)
    v = layer.init(KEY, 200, 300, bidirectional)
    table = v["params"]["rel_embedding"]
    got = layer.apply(v, 200, 300, bidirectional)
    assert table.shape == (3, 32) and got.shape == (1, 3, 200, 300)
    wanted = [[bucket(k - q, bidirectional, 32, 128) for k in range(300)] for q in range(200)]
    np.testing.assert_array_equal(got[0], table[:, np.asarray(wanted)])


def transformer(x, p, kind, post, encoded, heads=4):
    """The layer by plain arithmetic: relu, no bias, RMS norms, self attention causal."""

    def part(x, name, other, causal, bias=None):
        q = p[name]
        last = post and other is None  # the norm before self attention alone moves behind the layer
        n = x if last else norm(x, q["qkv" if "qkv" in q else "query"], "rmsnorm")
        if other is None:
            joined = jnp.einsum("bsi,ijk->bsjk", n, q["qkv"]["kernel"])
            three = [joined[..., i, :] for i in range(3)]
        else:
            joined = jnp.einsum("bsi,ijk->bsjk", other, q["kv"]["kernel"])
            three = [n @ q["query"]["kernel"], joined[..., 0, :], joined[..., 1, :]]
        c = attend(*(t.reshape(*t.shape[:2], heads, -1) for t in three), None, causal, bias)
        return x + jnp.asarray(c, jnp.float32).reshape(x.shape) @ q["out"]["kernel"]

    distances = [
        [bucket(k - q, kind == "encoder", 32, 128) for k in range(x.shape[1])] for q in range(x.shape[1])
    ]
    bias = p["relpos_bias"]["rel_embedding"][:, np.asarray(distances)][None]
    x = part(x, "self_attention" if kind == "decoder" else "attention", None, True, bias)
    if kind == "decoder":
        x = part(x, "encoder_decoder_attention", encoded, False)
    n = norm(x, p["mlp"], "rmsnorm")
    x = x + jnp.maximum(n @ p["mlp"]["wi_kernel"][:, 0], 0) @ p["mlp"]["wo_kernel"]
    return norm(x, p["output_layernorm"], "rmsnorm") if post else x


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("post", [False, True])
def test_transformer_layer(kind, post):
    x, encoded = drawn(2, 6, 16), drawn(2, 4, 16, seed=1) if kind == "decoder" else None
    layer = layers.TransformerLayer(
        hidden_size=16, mlp_hidden_size=32, num_attention_heads=4, layernorm_type="rmsnorm", output_layernorm=post,
        layer_type=layers.TransformerLayerType(kind),
    )  # fmt: skip
    v = made(layer, x, encoded, deterministic=True)
    got = layer.apply(v, x, encoded, deterministic=True)
    close(got, transformer(x, v["params"], kind, post, encoded), 2e-4)


def test_heads_may_be_together_of_another_width_than_the_input():
    x = drawn(2, 6, 24)
    layer = layers.TransformerLayer(
        hidden_size=16, mlp_hidden_size=32, num_attention_heads=4, layernorm_type="rmsnorm"
    )
    v = made(layer, x, deterministic=True)
    attention = v["params"]["attention"]
    assert attention["qkv"]["kernel"].shape == (24, 3, 16) and attention["out"]["kernel"].shape == (16, 24)
    got = layer.apply(v, x, deterministic=True)
    assert got.shape == x.shape
    # Heads that give nothing leave the MLP and the residual, which know the input's width alone.
    v["params"]["attention"]["out"]["kernel"] = jnp.zeros((16, 24))
    mlp = layers.LayerNormMLP(
        intermediate_dim=32,
        layernorm_type="rmsnorm",
        intermediate_dropout_rate=0.0,
        return_layernorm_output=False,
    )
    close(
        layer.apply(v, x, deterministic=True), x + mlp.apply({"params": v["params"]["mlp"]}, x, True)[0], 1e-5
    )


def test_dropout():
    x = drawn(4, 64, 32)
    layer = layers.TransformerLayer(hidden_size=32, mlp_hidden_size=64, num_attention_heads=4, drop_path=0.5)
    v = layer.init({"params": KEY, "dropout": KEY}, x)
    same, again = (layer.apply(v, x, rngs={"dropout": KEY}) for _ in range(2))
    other = layer.apply(v, x, rngs={"dropout": jax.random.key(5)})
    assert jnp.array_equal(same, again) and not jnp.array_equal(same, other)
    still = layer.apply(v, x, deterministic=True)
    assert jnp.array_equal(still, layer.apply(v, x, deterministic=True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fp8_layers_train(dtype):
    """A layer learns in FP8 what it learns without: the last losses differ by less than 10 percent, and scales follow
    the values."""
    x = drawn(4, 8, 32)
    target = jnp.tanh(x[..., ::-1])

    def losses(enabled):
        with te.fp8_autocast(enabled=enabled, fp8_recipe=te.DelayedScaling(amax_history_len=4)):
            layer = layers.TransformerLayer(
                hidden_size=32,
                mlp_hidden_size=64,
                num_attention_heads=4,
                mlp_activations=("gelu", "linear"),
                dtype=dtype,
            )
            v = layer.init({"params": KEY, "dropout": KEY}, x)
            state = {name: v[name] for name in ("params", te.FP8_META) if name in v}

            @jax.jit
            def step(state):
                def loss_of(state):
                    return (
                        (layer.apply(state, x, deterministic=True).astype(jnp.float32) - target) ** 2
                    ).mean()

                loss, grads = jax.value_and_grad(loss_of)(state)
                params = jax.tree.map(lambda p, g: p - 0.2 * g, state["params"], grads["params"])
                metas = {te.FP8_META: grads[te.FP8_META]} if enabled else {}
                return loss, {"params": params, **te.update_fp8_metas(metas)}

            seen = []
            for _ in range(40):
                loss, state = step(state)
                seen.append(float(loss))
            return seen, state

    exact, _ = losses(False)
    rough, state = losses(True)
    assert exact[-1] < 0.5 * exact[0] and abs(rough[-1] / exact[-1] - 1) < 0.1
    of_mlp = {
        f"{kind}_{tensor}_{product}" for kind in ("amax", "scale") for tensor in "iwg" for product in (0, 1)
    }
    assert {k: set(v) for k, v in state[te.FP8_META].items()} == {"attention": {"qkv", "out"}, "mlp": of_mlp}
    assert all(state[te.FP8_META]["mlp"][name][0] != 1 for name in of_mlp if "scale" in name)


def test_a_decoder_s_cross_attention_has_no_drop_path():
    """As in the public engine: with all other paths dropped it is left."""
    x, encoded = drawn(2, 5, 16), drawn(2, 7, 16, seed=1)
    layer = layers.TransformerLayer(
        hidden_size=16, mlp_hidden_size=32, num_attention_heads=4, drop_path=1.0, hidden_dropout=0.0,
        attention_dropout=0.0, intermediate_dropout=0.0, layer_type=layers.TransformerLayerType.DECODER,
    )  # fmt: skip
    v = made(layer, x, encoded, deterministic=True)
    cross = layers.MultiHeadAttention(4, 4, attn_mask_type="padding", transpose_batch_sequence=False)
    own = {"params": v["params"]["encoder_decoder_attention"]}
    wanted = x + cross.apply(own, x, encoded, deterministic=True)[0]
    close(layer.apply(v, x, encoded, rngs={"dropout": KEY}), wanted)


def test_without_fp8_there_is_no_collection():
    layer = layers.DenseGeneral(features=4)
    assert set(layer.init(KEY, drawn(2, 8))) == {"params"}


def test_logical_axes():
    layer = layers.LayerNormMLP(intermediate_dim=8)
    axes = partitioning.get_axis_names(
        layer.init({"params": KEY, "dropout": KEY}, drawn(1, 2, 4))["params_axes"]
    )
    assert tuple(axes["wi_kernel"]) == ("embed", "act", "mlp") and tuple(axes["scale"]) == ("embed",)
    with te.global_shard_guard(te.MeshResource("data", "model")):
        rules = layers.extend_logical_axis_rules([("embed", None), ("mine", "data")])
        assert ("mlp", "model") in rules and rules[:2] == (("embed", None), ("mine", "data"))
        for same in ("data", ("data",)):
            assert layers.extend_logical_axis_rules([("batch", same)])[0] == ("batch", same)
        for name, other in (("mlp", "data"), ("batch", "model"), ("batch", ("data", "model"))):
            with pytest.raises(ValueError, match=repr(name)):
                layers.extend_logical_axis_rules([(name, other)])


KEYS = {"params": KEY, "dropout": KEY}
DECODER = layers.TransformerLayerType.DECODER
BAD = {  # what is said, the layer, the shapes of its arguments
    "heads": ("no multiple of 3 heads", layers.TransformerLayer(16, num_attention_heads=3), [(1, 2, 16)]),
    "no encoder": ("needs `encoded`", layers.TransformerLayer(16, layer_type=DECODER), [(1, 2, 16)]),
    "norm": ("'layernorm' or 'rmsnorm'", layers.LayerNorm(layernorm_type="batch"), [(2, 4)]),
    "activation": ("no activation 'what'", layers.LayerNormMLP(activations=("what",)), [(2, 4)]),
    "mask type": (
        "attn_mask_type must be",
        layers.DotProductAttention(4, 1, attn_mask_type="what"),
        [(1, 2, 1, 4)] * 3,
    ),
    "groups": (
        "share 3 heads of keys",
        layers.DotProductAttention(4, 4, 3),
        [(1, 2, 4, 4), (1, 2, 3, 4), (1, 2, 3, 4)],
    ),
    "heads of keys": (
        "the key must have 4 dimensions and 4 heads",
        layers.DotProductAttention(4, 4),
        [(1, 2, 4, 4), (1, 2, 2, 4), (1, 2, 2, 4)],
    ),
    "layout": ("qkv_layout must be", layers.DotProductAttention(4, 4, qkv_layout="thd"), [(1, 2, 4, 4)] * 3),
    "axes": ("has 2 dimensions", layers.DenseGeneral(features=3, kernel_axes=("embed",)), [(2, 4)]),
    "axis": ("contracts the last dimension", layers.LayerNormMLP(axis=0), [(2, 4)]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    text, layer, sizes = BAD[case]
    with pytest.raises(ValueError, match=text):
        layer.init(KEYS, *(drawn(*size) for size in sizes))


def test_layers_nest_in_modules():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = layers.LayerNormDenseGeneral(features=16, name="first")(x)[0]
            return layers.DenseGeneral(features=4, name="second")(x)

    v = Model().init(KEY, drawn(2, 8))
    assert shapes(v)["first"]["kernel"] == (8, 16) and shapes(v)["second"]["kernel"] == (16, 4)
