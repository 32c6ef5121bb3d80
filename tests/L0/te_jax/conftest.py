"""Tests of apex.transformer_engine.jax, on the CPU and on a GPU: skipped where JAX is not installed. Arrays may be
float64 here."""

import gc

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed: pip install jax flax")
pytest.importorskip("flax", reason="flax is not installed: pip install jax flax")
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_matmul_precision", "highest")  # else products of float32 are TF32's on a card
# JAX collects garbage of its own at every collection of Python's, where a Ctrl-C that a test of something else in this
# process sends would be swallowed.
gc.callbacks[:] = [callback for callback in gc.callbacks if not callback.__module__.startswith("jax")]


@pytest.fixture(autouse=True, params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request):
    """Where JAX puts what the test makes."""
    try:
        device = jax.devices(request.param)[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no {request.param}: {error}")
    with jax.default_device(device):
        yield request.param
