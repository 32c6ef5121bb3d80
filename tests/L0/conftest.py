"""The fixture `variant`: a test that takes it runs once on everything that can serve the ops.

The reference; the CPU variant at each x86-64 level; the kernels themselves on the SIMT executor, at both warp
sizes and both orders of their threads; a GPU where there is one. See variants.py.
"""

from __future__ import annotations

import pytest
import variants

variants.count_references()


@pytest.fixture(params=variants.NAMES)
def variant(request):
    """The Variant that serves every op while the test runs; skipped, with the reason, where it cannot."""
    reason = variants.why_not(request.param)
    if reason:
        pytest.skip(f"variant {request.param}: {reason}")
    with variants.served_by(request.param) as served:
        yield served


@pytest.fixture
def device(variant):
    """Where the variant's tensors go."""
    return variant.device


_compiled = {}


@pytest.fixture
def compiled():
    """function -> (it, compiled as one graph; how often that was compiled so far). One for all tests."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    def compile_once(function):
        if function not in _compiled:
            counter = CompileCounterWithBackend("aot_eager")
            graph = torch.compile(function, fullgraph=True, dynamic=False, backend=counter)
            _compiled[function] = graph, lambda: counter.frame_count
        return _compiled[function]

    return compile_once


@pytest.fixture
def counting_backend():
    """A backend for torch.compile that counts, with nothing compiled before."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    _compiled.clear()
    return CompileCounterWithBackend("aot_eager")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU (and says so when it is skipped)")
