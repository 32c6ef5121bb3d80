"""Base classes of tests whose methods run on several ranks, each in a process of its own."""

from apex.distributed_testing.distributed_test_base import (
    DistributedTestBase,
    NcclDistributedTestBase,
    UccDistributedTestBase,
)

__all__ = ["DistributedTestBase", "NcclDistributedTestBase", "UccDistributedTestBase"]
