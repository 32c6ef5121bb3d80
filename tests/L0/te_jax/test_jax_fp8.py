"""FP8 of apex.transformer_engine.jax: casts for every code and every bfloat16, products, histories and scales."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from apex.transformer_engine import jax as te
from apex.transformer_engine.jax import fp8

FORMATS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def values_of(dtype):
    """Every code's value, by the formats' own conversion in numpy."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 1.5e4])
def test_every_bfloat16_is_cast_to_the_nearest_code(name, scale):
    dtype = np.dtype(getattr(ml_dtypes, name))
    x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    got = np.asarray(
        jax.jit(lambda x: fp8.quantize(x, jnp.float32(scale), getattr(jnp, name)))(jnp.asarray(x))
    )
    got = got.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (x.astype(np.float32) * np.float32(scale)).astype(np.float64)
    codes = values_of(dtype)
    finite = np.unique(codes[np.isfinite(codes)].astype(np.float64))
    lost = np.isnan(scaled) | (np.isinf(scaled) & name.endswith("fnuz"))
    assert np.isnan(got[lost]).all() and not np.isnan(got[~lost]).any()
    wanted = np.clip(scaled[~lost], finite[0], finite[-1])
    above = np.clip(np.searchsorted(finite, wanted), 1, len(finite) - 1)
    low, high = finite[above - 1], finite[above]
    chosen = got[~lost].astype(np.float64)
    assert ((chosen == low) | (chosen == high)).all()
    nearest = np.minimum(wanted - low, high - wanted)
    np.testing.assert_array_equal(np.abs(chosen - wanted), nearest)
    tied = wanted - low == high - wanted
    even = np.asarray(chosen[tied], np.float32).astype(dtype).view(np.uint8) & 1
    assert (tied.any() or scale != 1) and not even.any()  # with 1, some lie halfway between two codes


SCALES = {"x": 2.0, "kernel": 4.0, "grad": 8.0}


def metas(history=3):
    """Histories of which the recipe makes SCALES; the scales before are others."""
    amax = np.asarray([[448.0 / 2], [448.0 / 4], [57344.0 / 8]], np.float32)
    amax = jnp.asarray(amax / (1 + np.arange(history, dtype=np.float32)))
    return state(amax, jnp.full((3, 1), 0.5, jnp.float32))


def state(histories, scales):
    """A layer's, of rows: input, kernel and gradient of one product after the other."""
    found = {}
    for kind, rows in ((fp8.AMAX, histories), (fp8.SCALE, scales)):
        for i, row in enumerate(rows):
            found[f"{kind}_{'iwg'[i % 3]}_{i // 3}"] = row
    return found


def rows(found, kind):
    """The arrays of a kind, as `state` was given them."""
    count = sum(name.startswith(f"{kind}_") for name in found)
    return np.stack([found[f"{kind}_{'iwg'[i % 3]}_{i // 3}"] for i in range(count)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(7, 24), (2, 3, 24), (0, 24)])
def test_products(dtype, shape):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.standard_normal(s), dtype) for s in (shape, (24, 10)))
    grad = jnp.asarray(rng.standard_normal((*shape[:-1], 10)), dtype)
    before = metas()
    output, pull = jax.vjp(jax.jit(fp8.dot), x, kernel, before)
    dx, dk, after = pull(grad)
    narrow, broad = jnp.float8_e4m3fn, jnp.float8_e5m2
    qx, qk, qg = (
        np.asarray(fp8.quantize(t, jnp.float32(s), f)).astype(np.float64) / s
        for t, s, f in ((x, 2, narrow), (kernel, 4, narrow), (grad, 8, broad))
    )
    eps = float(jnp.finfo(dtype).eps) + 1e-6
    flat = (-1, shape[-1])
    for got, wanted in (
        (output, qx @ qk),
        (dx, qg @ qk.T),
        (dk, qx.reshape(flat).T @ qg.reshape(-1, 10)),
    ):
        np.testing.assert_allclose(
            np.asarray(got, np.float64), wanted, rtol=eps, atol=eps * np.abs(wanted).max(initial=0)
        )
    largest = [float(jnp.abs(t.astype(jnp.float32)).max(initial=0)) for t in (x, kernel, grad)]
    moved = np.roll(rows(before, fp8.AMAX), -1, 1)
    moved[:, 0] = largest
    np.testing.assert_array_equal(rows(after, fp8.AMAX), moved)
    np.testing.assert_array_equal(rows(after, fp8.SCALE)[:, 0], list(SCALES.values()))


@pytest.mark.parametrize("form", [te.Format.HYBRID, te.Format.E4M3])
def test_scales_follow_the_history_without_update_fp8_metas(form):
    """As in public's newer 1.x: gradients far below the format's numbers are not lost at the second step."""
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((64, 32), (32, 16)))
    grad = jnp.asarray(rng.standard_normal((64, 16)) * 1e-5, jnp.float32)
    with te.fp8_autocast(enabled=True, fp8_recipe=te.DelayedScaling(fp8_format=form, amax_history_len=2)):
        metas = fp8.new_metas(1)
        for _ in range(2):
            _, pull = jax.vjp(fp8.dot, x, kernel, metas)
            dx, dk, metas = pull(grad)
        again = te.update_fp8_metas({te.FP8_META: metas})[te.FP8_META]
    for got, wanted in ((dx, grad @ kernel.T), (dk, x.T @ grad)):
        error = np.linalg.norm(np.asarray(got - wanted, np.float64)) / np.linalg.norm(wanted)
        assert error < 0.08
    np.testing.assert_array_equal(rows(again, fp8.SCALE), rows(metas, fp8.SCALE))


def test_nan_does_not_reach_the_history():
    x = jnp.asarray([[jnp.nan, 2.0]], jnp.float32)
    after = jax.grad(lambda m: fp8.dot(x, jnp.ones((2, 1)), m).sum())(metas())
    assert float(after["amax_i_0"][0]) == 2.0


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("form", [te.Format.HYBRID, te.Format.E4M3])
def test_scales(algorithm, margin, form):
    recipe = te.DelayedScaling(
        margin=margin, amax_compute_algo=algorithm, fp8_format=form, amax_history_len=4
    )
    history = jnp.asarray(
        [[1, 8, 2, 0], [0, 0, 0, 0], [jnp.inf] * 4, [4, 2, 1, 0], [jnp.nan] * 4, [3, 6, 0, 0]], jnp.float32
    )
    old = jnp.asarray([[5.0]] * 6, jnp.float32)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        updated = te.update_fp8_metas({"params": 1, te.FP8_META: {"a": {"b": state(history, old)}}})
    got = updated[te.FP8_META]["a"]["b"]
    newest = algorithm == "most_recent"
    gradient = 57344.0 if form is te.Format.HYBRID else 448.0
    wanted = [
        448 / (1 if newest else 8),
        5 * 2**margin,
        5 * 2**margin,
        448 / 4,
        5 * 2**margin,
        gradient / (3 if newest else 6),
    ]
    np.testing.assert_allclose(rows(got, fp8.SCALE)[:, 0], np.asarray(wanted) / 2**margin)
    np.testing.assert_array_equal(rows(got, fp8.AMAX), history)
    assert updated["params"] == 1 and te.update_fp8_metas({"params": 1}) == {"params": 1}


def test_a_layer_that_the_loss_does_not_reach_begins_anew():
    zeros = jax.tree.map(jnp.zeros_like, metas())
    got = te.update_fp8_metas({te.FP8_META: {"layer": zeros}})[te.FP8_META]["layer"]
    assert (rows(got, fp8.SCALE) == 1).all()


def test_collections():
    original = {"params": {"w": 1}, te.FP8_META: {"a": {"x": 1, "y": 2}}}
    merged = te.update_collections({te.FP8_META: {"a": {"x": 3}}, "cache": 4}, original)
    assert merged == {"params": {"w": 1}, te.FP8_META: {"a": {"x": 3, "y": 2}}, "cache": 4}
    assert original[te.FP8_META]["a"]["x"] == 1


def test_names_of_the_public_state():
    """FP8Helper says what is in force; the collection and its arrays are called as the public engine's since 1.8."""
    helper = fp8.FP8Helper
    assert not helper.INITIALIZED and not helper.is_fp8_enabled() and helper.AMAX_HISTORY_LEN == 1024
    recipe = te.DelayedScaling(
        margin=2, fp8_format=te.Format.E4M3, amax_history_len=5, amax_compute_algo="most_recent"
    )
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        assert helper.INITIALIZED and helper.is_fp8_enabled() and helper.MARGIN == 2.0
        assert helper.FP8_FORMAT is te.Format.E4M3 and helper.AMAX_HISTORY_LEN == 5
        assert helper.FWD_DTYPE == helper.BWD_DTYPE == jnp.float8_e4m3fn
        assert helper.AMAX_COMPUTE_ALGO is fp8.AmaxComputeAlgo.MOST_RECENT
        made = fp8.new_metas(2)
    assert helper.FP8_FORMAT is te.Format.HYBRID and jnp.float8_e5m2 == helper.BWD_DTYPE
    assert helper.FP8_COLLECTION_NAME == te.FP8_META == "fp8_metas" and te.is_fp8_available() == (True, "")
    names = [
        f"{kind}_{tensor}_{product}" for product in (0, 1) for kind in ("amax", "scale") for tensor in "iwg"
    ]
    assert sorted(made) == sorted(names)
    assert made["amax_w_1"].shape == (5,) and made["scale_g_0"].shape == (1,)
    assert helper.update_collections({"a": 1}, {"a": 2, "b": 3}) == {"a": 1, "b": 3}
    helper.initialize(
        margin=1.0, fp8_format=te.Format.E4M3, amax_compute_algo=fp8.AmaxComputeAlgo.MOST_RECENT
    )
    try:
        assert te.is_fp8_enabled() and te.get_delayed_scaling() == te.DelayedScaling(
            margin=1.0, fp8_format=te.Format.E4M3, amax_history_len=1, amax_compute_algo="most_recent"
        )
    finally:
        helper.finalize()
    assert not te.is_fp8_enabled() and te.get_delayed_scaling() == te.DelayedScaling()


def test_autocast():
    assert not te.is_fp8_enabled()
    outer, inner = te.DelayedScaling(amax_history_len=2), te.DelayedScaling(margin=1)
    with te.fp8_autocast(enabled=True, fp8_recipe=outer, mesh_resource=te.MeshResource("data")):
        assert te.is_fp8_enabled() and te.get_delayed_scaling() is outer
        with te.fp8_autocast(enabled=False):
            assert not te.is_fp8_enabled()
        with pytest.raises(KeyError), te.fp8_autocast(enabled=True, fp8_recipe=inner):
            assert te.get_delayed_scaling() is inner
            raise KeyError
        assert te.is_fp8_enabled() and te.get_delayed_scaling() is outer
    assert not te.is_fp8_enabled()


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (te.DelayedScaling(amax_compute_algo=lambda h: h[0]), "amax_compute_algo"),
        (te.DelayedScaling(scaling_factor_compute_algo=lambda *a: a[1]), "scaling_factor_compute_algo"),
        (te.DelayedScaling(override_linear_precision=(False, False, True)), "override_linear_precision"),
        (te.DelayedScaling(reduce_amax=False), "reduce_amax"),
        ("delayed", "DelayedScaling"),
    ],
)
def test_recipes_that_are_refused(recipe, text):
    with pytest.raises(ValueError, match=text), te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        pass
    assert not te.is_fp8_enabled()
