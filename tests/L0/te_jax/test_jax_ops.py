"""layer_norm, rms_norm, softmax and cross_entropy of apex.transformer_engine.jax against float64 in numpy.

Tolerances: outputs are rounded once from float32 sums, so eps of the dtype times the largest magnitude; gradients of
weights are sums over rows, in float32 here, too.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex.transformer_engine import jax as te
from apex.transformer_engine.jax import _library

DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float64]
SHAPES = [(5, 24), (2, 3, 1), (0, 8), (1, 4099), (7, 513), (2000, 64)]


def drawn(*shape, seed=0, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def wide(x):
    return np.asarray(x.astype(jnp.float64))


def close(got, expected, dtype, rows=1):
    eps = float(jnp.finfo(dtype).eps)
    sums = 1e-6 if dtype != jnp.float64 else 1e-14
    np.testing.assert_allclose(
        wide(got), expected, rtol=2 * eps, atol=(2 * eps + sums * max(rows, 8)) * scale_of(expected)
    )


def scale_of(x):
    return float(np.abs(x).max(initial=0.0)) or 1.0


def norm_oracle(x, gamma, beta, grad, eps):
    """Output and gradients in float64; beta None: RMS norm."""
    shifted = x - x.mean(-1, keepdims=True) if beta is not None else x
    rstd = 1 / np.sqrt((shifted**2).mean(-1, keepdims=True) + eps)
    hat = shifted * rstd
    g = grad * gamma
    dx = g - hat * (g * hat).mean(-1, keepdims=True)
    if beta is not None:
        dx = dx - g.mean(-1, keepdims=True)
    over = tuple(range(x.ndim - 1))
    sums = [(grad * hat).sum(over)] + ([grad.sum(over)] if beta is not None else [])
    return hat * gamma + (0 if beta is None else beta), [dx * rstd, *sums]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centered", [True, False])
def test_norms(dtype, shape, centered):
    x, grad = drawn(*shape, dtype=dtype), drawn(*shape, seed=1, dtype=dtype)
    weights = [drawn(shape[-1], seed=2 + i, dtype=dtype) for i in range(1 + centered)]
    norm = te.layer_norm if centered else te.rms_norm
    output, pull = jax.vjp(jax.jit(lambda x, *w: norm(x, *w, epsilon=1e-3)), x, *weights)
    gradients = pull(grad)
    beta = wide(weights[1]) if centered else None
    expected, of = norm_oracle(wide(x), wide(weights[0]), beta, wide(grad), 1e-3)
    assert output.dtype == dtype and [g.dtype for g in gradients] == [dtype] * (2 + centered)
    close(output, expected, dtype)
    for got, wanted in zip(gradients, of, strict=True):
        close(got, wanted, dtype, x.size // max(x.shape[-1], 1))


def test_a_zero_centered_gamma_keeps_small_values():
    x, gamma = drawn(4, 64, dtype=jnp.bfloat16), jnp.full(64, 2.0**-12, jnp.bfloat16)
    expected, _ = norm_oracle(wide(x), 1 + wide(gamma), None, wide(x), 1e-6)
    got = te.rms_norm(x, gamma, zero_centered_gamma=True, dtype=jnp.float32)
    close(got, expected, jnp.float32)


def test_mixed_dtypes():
    x, gamma, beta = drawn(3, 40, dtype=jnp.bfloat16), drawn(40, seed=1), drawn(40, seed=2)
    expected, _ = norm_oracle(wide(x), wide(gamma), wide(beta), wide(x), 1e-6)
    got = te.layer_norm(x, gamma, beta, dtype=jnp.float32)
    assert got.dtype == jnp.float32
    close(got, expected, jnp.float32)


def softmax_oracle(x, kept, scale):
    scaled = np.where(kept, x * scale, -np.inf)
    largest = np.where(kept.any(-1, keepdims=True), scaled.max(-1, keepdims=True), 0)
    powers = np.exp(scaled - largest)
    total = powers.sum(-1, keepdims=True)
    return np.where(total == 0, 0, powers / np.where(total == 0, 1, total))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 6, 7), (1, 1, 5, 513), (2, 2, 0, 4), (1, 2, 3, 3)])
@pytest.mark.parametrize("mask_shape", [None, (1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax(dtype, shape, mask_shape, causal):
    x, grad = drawn(*shape, dtype=dtype, scale=3), drawn(*shape, seed=1, dtype=dtype)
    kept, mask = np.ones(shape, bool), None
    if mask_shape is not None:
        sizes = (min(mask_shape[0], shape[0]), min(mask_shape[1], shape[1]) if mask_shape[1] > 1 else 1)
        sizes = (sizes[0], shape[1] if sizes[1] > 1 else 1)
        left_out = np.random.default_rng(3).random((*sizes, shape[2], shape[3])) < 0.4
        left_out[:, :, :1] = True  # a row that keeps nothing
        mask, kept = jnp.asarray(left_out), kept & ~left_out
    if causal:
        kept = kept & np.tril(np.ones(shape[2:], bool), shape[3] - shape[2])
    output, pull = jax.vjp(jax.jit(lambda x: te.softmax(x, mask, scale=0.7, causal=causal)), x)
    y = softmax_oracle(wide(x), kept, 0.7)
    close(output, y, dtype)
    dy = wide(grad)
    expected = 0.7 * y * (dy - (y * dy).sum(-1, keepdims=True))
    eps = float(jnp.finfo(dtype).eps)  # the backward starts from the rounded output
    np.testing.assert_allclose(wide(pull(grad)[0]), expected, atol=6 * eps * scale_of(dy) + 1e-13)


def test_softmax_takes_uint8_masks_and_broadcast_keys():
    x = drawn(2, 2, 3, 5)
    column = jnp.asarray(np.array([0, 1, 0], np.uint8).reshape(1, 1, 3, 1))
    expected = te.softmax(x, jnp.broadcast_to(column != 0, x.shape))
    assert jnp.array_equal(te.softmax(x, column), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("labels_dtype", [jnp.int32, jnp.int64])
def test_cross_entropy(dtype, smoothing, labels_dtype):
    logits = drawn(3, 5, 37, dtype=dtype, scale=4)
    labels = np.random.default_rng(1).integers(0, 37, (3, 5))
    labels[0, 0] = -100
    grad = drawn(3, 5, seed=2, dtype=jnp.float64 if dtype == jnp.float64 else jnp.float32)
    given = jnp.asarray(labels, labels_dtype)
    losses, pull = jax.vjp(jax.jit(lambda x: te.cross_entropy(x, given, smoothing=smoothing)), logits)
    x = wide(logits)
    log_p = x - x.max(-1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(-1, keepdims=True))
    target = np.full(x.shape, smoothing / 37)
    np.put_along_axis(target, np.clip(labels, 0, 36)[..., None], 1 - smoothing + smoothing / 37, -1)
    there = labels != -100
    close(losses, np.where(there, -(target * log_p).sum(-1), 0), losses.dtype)
    close(pull(grad)[0], np.where(there, wide(grad), 0)[..., None] * (np.exp(log_p) - target), dtype)


def test_a_wrong_label_is_nan():
    losses = te.cross_entropy(drawn(3, 4), jnp.asarray([0, 4, -1], jnp.int32))
    assert np.isnan(losses).tolist() == [False, True, True]


def formulas():
    """(a function of one float64 array by the library, the same in jax.numpy)."""
    gamma, beta = drawn(12, seed=5, dtype=jnp.float64), drawn(12, seed=6, dtype=jnp.float64)
    labels = jnp.asarray([[3, 0, 11], [-100, 2, 5]], jnp.int32)

    def plain_norm(x):
        shifted = x - x.mean(-1, keepdims=True)
        return shifted / jnp.sqrt((shifted**2).mean(-1, keepdims=True) + 1e-6) * gamma + beta

    def plain_losses(x):
        of = jnp.take_along_axis(jax.nn.log_softmax(x), jnp.clip(labels, 0)[..., None], -1)[..., 0]
        return jnp.where(labels == -100, 0, -of)

    return {
        "layer_norm": (lambda x: te.layer_norm(x, gamma, beta), plain_norm),
        "rms_norm": (
            lambda x: te.rms_norm(x, gamma),
            lambda x: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gamma,
        ),
        "softmax": (
            lambda x: te.softmax(x[None], scale=0.5)[0],
            lambda x: jax.nn.softmax(0.5 * x),
        ),
        "cross_entropy": (lambda x: te.cross_entropy(x, labels), plain_losses),
    }


NAMES = ["layer_norm", "rms_norm", "softmax", "cross_entropy"]


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives(name):
    function, plain = formulas()[name]
    x = drawn(2, 3, 12, dtype=jnp.float64)

    def penalty(f):
        return jax.grad(lambda x: (jax.grad(lambda x: (f(x) ** 3).sum())(x) ** 2).sum())(x)

    np.testing.assert_allclose(penalty(function), penalty(plain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_vmap(name):
    function, plain = formulas()[name]
    x = drawn(4, 2, 3, 12, dtype=jnp.float64)
    np.testing.assert_allclose(jax.vmap(function)(x), jax.vmap(plain)(x), rtol=1e-12, atol=1e-12)
    moved = jnp.moveaxis(x, 0, 2)
    np.testing.assert_allclose(jax.vmap(function, 2)(moved), jax.vmap(plain)(x), rtol=1e-12, atol=1e-12)

    def gradient(f):
        return jax.vmap(jax.grad(lambda x: (f(x) ** 2).sum()))(x)

    np.testing.assert_allclose(gradient(function), gradient(plain), rtol=1e-11, atol=1e-11)


def test_vmap_over_weights():
    x, gammas = drawn(2, 12), drawn(3, 12, seed=1)
    got = jax.vmap(lambda g: te.rms_norm(x, g))(gammas)
    assert jnp.array_equal(got, jnp.stack([te.rms_norm(x, g) for g in gammas]))
    grads = jax.vmap(jax.grad(lambda g: te.rms_norm(x, g).sum()))(gammas)
    assert jnp.allclose(grads, jnp.stack([jax.grad(lambda g: te.rms_norm(x, g).sum())(g) for g in gammas]))


@pytest.mark.parametrize("name", NAMES)
def test_the_library_serves(name):
    function, _ = formulas()[name]
    text = jax.jit(function).lower(drawn(2, 3, 12, dtype=jnp.float64)).as_text()
    unit = {"softmax": "scaled_masked_softmax", "cross_entropy": "xentropy"}.get(name, name)
    assert f"apex_{unit}_forward" in text


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(lambda x: te.softmax(x), (drawn(1, 1, 2, 3),), (drawn(1, 1, 2, 3),))


BAD = {
    "gamma's shape": (ValueError, "gamma has shape", lambda: te.rms_norm(drawn(2, 8), drawn(7))),
    "integers": (TypeError, "x must be", lambda: te.rms_norm(jnp.ones((2, 8), jnp.int32), drawn(8))),
    "no last dimension": (ValueError, "last dimension", lambda: te.rms_norm(drawn(2, 0), drawn(0))),
    "three dimensions": (ValueError, "batch, heads", lambda: te.softmax(drawn(2, 3, 4))),
    "mask's shape": (
        ValueError,
        "broadcast",
        lambda: te.softmax(drawn(2, 3, 4, 4), jnp.ones((2, 2, 4, 4), bool)),
    ),
    "mask's dtype": (TypeError, "bool or uint8", lambda: te.softmax(drawn(1, 1, 2, 2), drawn(1, 1, 2, 2))),
    "labels' shape": (
        ValueError,
        "labels of the same shape",
        lambda: te.cross_entropy(drawn(2, 3), jnp.zeros(3, jnp.int32)),
    ),
    "labels' dtype": (TypeError, "int32 or int64", lambda: te.cross_entropy(drawn(2, 3), drawn(2))),
    "smoothing": (
        ValueError,
        "between 0 and 1",
        lambda: te.cross_entropy(drawn(2, 3), jnp.zeros(2, jnp.int32), smoothing=1.5),
    ),
    "no classes": (ValueError, "no classes", lambda: te.cross_entropy(drawn(2, 0), jnp.zeros(2, jnp.int32))),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    kind, text, call = BAD[case]
    with pytest.raises(kind, match=text):
        call()


def test_the_library_checks_what_it_is_handed():
    """Whoever calls a handler past the functions here gets an error of XLA's, not memory that is not the op's."""
    _library.serves("rms_norm", "cpu")
    x = drawn(4, 8)
    short = [jax.ShapeDtypeStruct((4, 8), x.dtype), jax.ShapeDtypeStruct((3,), jnp.float32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="rstd has 3 elements, not 4"):
        jax.block_until_ready(_library.call("rms_norm_forward", short, x, drawn(8), eps=1e-6))
    whole = [jax.ShapeDtypeStruct((4, 8), x.dtype), jax.ShapeDtypeStruct((4,), jnp.float32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="there is no number eps"):
        jax.block_until_ready(_library.call("rms_norm_forward", whole, x, drawn(8)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a result is missing"):
        jax.block_until_ready(_library.call("rms_norm_forward", whole[:1], x, drawn(8), eps=1e-6))
    with pytest.raises(jax.errors.JaxRuntimeError, match="dtype"):
        jax.block_until_ready(
            _library.call(
                "rms_norm_forward",
                [whole[0], whole[0].update(shape=(4,), dtype=jnp.float16)],
                x,
                drawn(8),
                eps=1e-6,
            )
        )


def run(code, platform, **environment):
    only = {"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {}
    whole = {**os.environ, **only, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=whole, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SAME = """
import numpy as np, jax, jax.numpy as jnp
from apex.transformer_engine import jax as te
x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 24)), jnp.float32)
f = lambda x: (te.layer_norm(x, x[0], x[1]) ** 2).sum() + te.softmax(x.reshape(1, 1, 4, 24), causal=True)[..., 0].sum()
value, grad = jax.value_and_grad(f)(x)
print("custom_call" in jax.jit(f).lower(x).as_text(), float(value), float(jnp.abs(grad).sum()))
"""


def test_the_formulas_serve_where_the_library_does_not(platform):
    served, by_formula = run(SAME, platform).split(), run(SAME, platform, APEX_VARIANT="reference").split()
    assert (served[0], by_formula[0]) == ("True", "False")
    np.testing.assert_allclose([float(v) for v in served[1:]], [float(v) for v in by_formula[1:]], rtol=1e-5)


def test_torch_is_not_imported(platform):
    """Nor looked for, from any thread: an import that is broken off leaves a torch that cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; " + SAME.strip()
    assert run(code, platform).startswith("True")
    threads = "from concurrent.futures import ThreadPoolExecutor as Threads\n"
    asked = "Threads().submit(jax.jit(jax.grad(f)), x).result()\nimport sys\nprint('torch' in sys.modules)"
    assert run(threads + SAME + asked, platform).endswith("False\n")


TORCH_LATER = (
    SAME
    + """
from apex._loader import probe
assert probe.here().torch is None
import torch
from apex.normalization import FusedLayerNorm
made = torch.tensor(np.asarray(x))
assert torch.allclose(FusedLayerNorm(24)(made), torch.nn.functional.layer_norm(made, (24,)), atol=1e-6)
assert probe.here().torch.version == torch.__version__
print(float(jax.value_and_grad(f)(x)[0]) == float(value))
"""
)


def test_torch_that_comes_later(platform):
    assert run(TORCH_LATER, platform).endswith("True\n")


SHARDED = """
import numpy as np, jax, jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from apex.transformer_engine import jax as te
mesh = Mesh(np.array(jax.devices()), ("data",))
x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 6, 24)), jnp.float32)
gamma, beta = x[0, 0], x[0, 1]

def loss(x, gamma, beta):
    return jax.lax.psum((te.layer_norm(x, gamma, beta) ** 3).sum() + te.softmax(x[:, None])[..., 0].sum(), "data")

split = jax.shard_map(loss, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P(), check_vma=False)
whole = lambda x, g, b: (te.layer_norm(x, g, b) ** 3).sum() + te.softmax(x[:, None])[..., 0].sum()
assert len(jax.devices()) == 4
np.testing.assert_allclose(jax.jit(split)(x, gamma, beta), whole(x, gamma, beta), rtol=1e-5)
by_split = jax.jit(jax.grad(split, (0, 1, 2)))(x, gamma, beta)
for a, b in zip(by_split, jax.grad(whole, (0, 1, 2))(x, gamma, beta)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
print("same")
"""


def test_shard_map(platform):
    if platform != "cpu":
        pytest.skip("XLA makes four devices of a CPU alone")
    assert run(SHARDED, platform, XLA_FLAGS="--xla_force_host_platform_device_count=4") == "same\n"
