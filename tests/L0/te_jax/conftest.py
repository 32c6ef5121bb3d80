"""Tests of apex.transformer_engine.jax: skipped where JAX is not installed. Arrays may be float64 here."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed: pip install jax flax")
pytest.importorskip("flax", reason="flax is not installed: pip install jax flax")
jax.config.update("jax_enable_x64", True)
