"""Tests of apex.transformer_engine.jax: skipped where JAX is not installed. Arrays may be float64 here."""

import gc

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed: pip install jax flax")
pytest.importorskip("flax", reason="flax is not installed: pip install jax flax")
jax.config.update("jax_enable_x64", True)
# JAX collects garbage of its own at every collection of Python's, where a Ctrl-C that a test of something else in this
# process sends would be swallowed.
gc.callbacks[:] = [callback for callback in gc.callbacks if not callback.__module__.startswith("jax")]
