"""The raw functions of every extension module that public apex compiles: no autocast and no autograd reaches them."""

from __future__ import annotations

import pytest
import raw_calls_engine  # noqa: F401  which enters its calls
import torch
from raw_calls import CALLS, functions, results_of

from apex._legacy import _raw
from apex._loader import registry

# Between ranks, or to files: bytes are moved, and nothing is computed that a dtype could change.
MOVE_BYTES = ("peer_memory_cuda", "nccl_p2p_cuda", "_apex_nccl_allocator", "_apex_gpu_direct_storage")
COMPLETE = [
    name
    for name, extension in registry.extensions().items()
    if extension.state == "complete" and name not in MOVE_BYTES
]
# Over lists, in place: their ops have no rule for autocast. The rest take no tensor, or none that has numbers.
IN_PLACE = ("amp_C", "apex_C")
NO_NUMBERS = ("get_", "close_", "_occupancy", "_available")
OF_AMP_C = "multi_tensor_"  # which transformer_engine_extensions has, too


def test_every_module_has_calls():
    assert sorted(CALLS) == sorted(COMPLETE)


@pytest.mark.parametrize("name", COMPLETE)
def test_every_function_is_raw(name):
    """Those of which no call stands here, too."""
    if name in IN_PLACE:
        assert not any(op.autocast for op in registry.schemas().values() if op.lists)
        return
    bare = [
        n
        for n, f in functions(name).items()
        if not _raw.is_raw(f) and not any(w in n for w in NO_NUMBERS) and not n.startswith(OF_AMP_C)
    ]
    assert bare == []


@pytest.mark.parametrize("name", COMPLETE)
def test_autocast_does_not_reach_them(name):
    """Dtypes and bits are those without it; nothing is recorded for what requires a gradient."""
    wanted = results_of(name)
    with torch.autocast("cpu", torch.bfloat16):
        found = results_of(name)
    assert list(found) == list(wanted)
    for function, results in wanted.items():
        assert [t.dtype for t in found[function]] == [t.dtype for t in results], function
        assert all(map(torch.equal, found[function], results)), function
        assert not any(t.requires_grad for t in results)
