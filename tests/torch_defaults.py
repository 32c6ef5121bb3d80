"""Tests under another default dtype and device of torch's: APEX_TESTS_DEFAULT_DTYPE=bfloat16,
APEX_TESTS_DEFAULT_DEVICE=meta. What depends on neither passes all the same; tensors of the tests name both.

Everything of tests/L0 that is not LEFT_OUT is marked `defaults` and must pass under each of the settings that
build_matrix/check/release_check.py lists.
"""

import contextlib
import os

import pytest

DTYPE, DEVICE = (os.environ.get(f"APEX_TESTS_DEFAULT_{name}") for name in ("DTYPE", "DEVICE"))
# Paths in tests/L0 that begin so are not marked.
LEFT_OUT = (
    *("host/", "loader/"),  # the library and what is loaded, not what computes
    # In processes of their own, which this does not reach.
    *("npu_", "test_npu", "test_cpu_threads", "test_groupbn_ranks", "test_sync_batchnorm_ranks"),
    *("amp/test_amp_combined_ddp", "parallel/ddp_", "parallel/zero_", "parallel/gpu_streams"),
    *("parallel/stream_races", "parallel/test_distributed", "parallel/test_multiproc"),
    "parallel/test_several_streams",
    *("transformer/tp_", "transformer/pp_", "transformer/test_tensor_parallel_"),
    *(
        "transformer/test_pipeline_parallel_",
        "transformer/test_pipeline_failures_",
        "transformer/test_test_bases",
    ),
    *("transformer/standalone_", "transformer/test_standalone_"),
    *("te_ranks", "test_te_ranks"),
    "test_graphs",  # captured on a card, and through inductor, as the tests of each op are not
)


@contextlib.contextmanager
def set_to(dtype, device):
    """torch's defaults within, the device if it is not None; also decorates a function, or a class whose parameters
    follow them."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device) if device else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


def float32_on_cpu():
    """What torch begins with. Parameters of modules follow the defaults, as those of torch.nn do."""
    import torch

    return set_to(torch.float32, "cpu")


def skip_compiled(what: str) -> None:
    """Skips what torch.compile cannot trace through a default device, which is a mode around every function."""
    if DEVICE:
        pytest.skip(f"torch.compile traces {what} under no default device")


def marked(path: str) -> bool:
    """Whether a file, relative to the checkout, is marked `defaults`."""
    _, l0, rest = path.partition("tests/L0/")
    return bool(l0) and not rest.startswith(LEFT_OUT)


def pytest_itemcollected(item):
    if marked(item.nodeid.partition("::")[0]):
        item.add_marker("defaults")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Around each test with its fixtures."""
    if not (DTYPE or DEVICE):
        return (yield)
    import torch

    with set_to(getattr(torch, DTYPE or "float32"), DEVICE):
        return (yield)
