"""apex.distributed_testing, under the name that tests of apex.transformer import."""

from apex.distributed_testing.distributed_test_base import (
    HAS_TORCH_UCC,
    HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER,
    DistributedTestBase,
    NcclDistributedTestBase,
    UccDistributedTestBase,
)

__all__ = [
    "HAS_TORCH_UCC",
    "HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER",
    "DistributedTestBase",
    "NcclDistributedTestBase",
    "UccDistributedTestBase",
]
