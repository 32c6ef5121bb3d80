"""The fixture `variant`: a test that takes it runs once on everything that can serve the ops.

The reference; the CPU variant at each x86-64 level; the kernels themselves on the SIMT executor, at both warp
sizes and both orders of their threads; a GPU where there is one. See variants.py.
"""

from __future__ import annotations

import pytest
import variants
from rings import NO_GPU

variants.count_references()


@pytest.fixture(params=variants.PARAMETERS)
def variant(request):
    """The Variant that serves every op while the test runs; skipped, with the reason, where it cannot."""
    reason = variants.why_not(request.param)
    if reason:
        pytest.skip(reason if reason == NO_GPU else f"variant {request.param}: {reason}")
    with variants.served_by(request.param) as served:
        yield served


@pytest.fixture
def device(variant):
    """Where the variant's tensors go."""
    return variant.device


@pytest.fixture
def exact_convolutions():
    """cuDNN's convolutions of float32 are of float32, and the same input gives the same bits."""
    import torch

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


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


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """What is marked gpu has nothing to do on other variants."""
    of_a_gpu = any(metafunc.definition.get_closest_marker(name) for name in ("gpu", "two_gpus"))
    if of_a_gpu and "variant" in metafunc.fixturenames:
        metafunc.definition.add_marker(pytest.mark.parametrize("variant", ["cuda"], indirect=True))


@pytest.fixture
def asp_forgotten():
    """ASP holds one model, and the search's settings: none remain from test to test."""
    from apex.contrib.sparsity import ASP

    ASP.reset()
    yield
    ASP.reset()
    ASP.set_permutation_saving_params()
