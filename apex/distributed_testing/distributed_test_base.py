"""Base classes of tests whose methods run on several ranks, each in a process of its own.

They extend torch's own MultiProcessTestCase, which needs the package expecttest. Where there is no GPU, the ranks of
NcclDistributedTestBase are processes on the CPU that gloo connects.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import collect_env

from apex.parallel._waiting import CALLS, waiting
from apex.transformer._ucc_util import HAS_UCC

_frozen = torch.backends.flags_frozen()
try:
    from torch.testing._internal import common_distributed, common_utils
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: the test bases extend torch's own, which needs it; pip install {error.name}",
        name=error.name,
    ) from error
finally:
    # As torch's test classes are imported, they forbid the whole process to set torch.backends' flags.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = not _frozen

HAS_TORCH_UCC: bool = HAS_UCC
CPU_RANKS = 4  # without a GPU
_UCC_DRIVER = (470, 42, 1)  # the first NVIDIA driver with which torch_ucc works


def _driver_version() -> tuple[int, ...] | None:
    """Of NVIDIA's driver; None where there is none."""
    if not torch.cuda.is_available():
        return None
    told = collect_env.get_nvidia_driver_version(collect_env.run)
    return tuple(int(number) for number in re.findall(r"\d+", told)) if told else None


_driver = _driver_version()
HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER: bool = _driver is not None and _driver >= _UCC_DRIVER


class DistributedTestBase(common_distributed.MultiProcessTestCase):
    """Every test method runs on `world_size` ranks at once, in a process group of DISTRIBUTED_BACKEND.

    A test passes when it does on all ranks; the first rank that fails ends the others. On GPUs each rank has its own as
    the current one. Subclasses may override `world_size` and `_setup_pre_spawn`.

    Attributes:
        DISTRIBUTED_BACKEND: "nccl" (in its place "gloo", where there is no GPU), "ucc" or "gloo".
        rank: of the process; -1 in the one that started them.
    """

    DISTRIBUTED_BACKEND: str

    def setUp(self) -> None:
        super().setUp()
        self._setup_pre_spawn()
        self._spawn_processes()

    def tearDown(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        super().tearDown()
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.file_name)

    @property
    def world_size(self) -> int:
        """Ranks: one a GPU, 4 at most; 4 where there is no GPU."""
        return min(torch.cuda.device_count(), 4) if torch.cuda.is_available() else CPU_RANKS

    @property
    def init_method(self) -> str:
        """Where the ranks meet."""
        return f"{common_utils.FILE_SCHEMA}{self.file_name}"

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """_run ends the process group by itself."""
        return False

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
        """One rank, in its own process, which ends here."""
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        self._start()
        with waiting(f"the start of {test_name}", CALLS):
            dist.barrier()
        self.run_test(test_name, pipe)
        with waiting(f"the end of {test_name}", CALLS):
            dist.barrier()
        dist.destroy_process_group()
        sys.exit(0)

    def _start(self):
        """Makes the process group. Skips the test where this torch lacks the backend."""
        backend = self.DISTRIBUTED_BACKEND
        if not torch.cuda.is_available():
            torch.set_num_threads(1)
            backend = "gloo" if backend == "nccl" else backend
        elif backend != "gloo":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        if not dist.is_backend_available(backend):
            print(f"rank {self.rank}: this torch has no backend {backend}", flush=True)
            sys.exit(common_distributed.TEST_SKIPS["generic"].exit_code)
        dist.init_process_group(
            backend, init_method=self.init_method, world_size=int(self.world_size), rank=self.rank
        )

    def _setup_pre_spawn(self) -> None:
        """What is to be done before the ranks start."""


class NcclDistributedTestBase(DistributedTestBase):
    """Ranks that NCCL (RCCL) connects; gloo, where there is no GPU."""

    DISTRIBUTED_BACKEND = "nccl"


@unittest.skipUnless(HAS_UCC, "this torch speaks no UCC, and there is no torch_ucc")
@unittest.skipUnless(
    HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER,
    f"torch_ucc needs an NVIDIA driver from 470.42.01 on, found: {_driver}",
)
class UccDistributedTestBase(DistributedTestBase):
    """Ranks that UCC connects. Skipped where it does not work."""

    DISTRIBUTED_BACKEND = "ucc"

    def _setup_pre_spawn(self) -> None:
        """Names the meeting place and UCX's transports, where the environment does not."""
        wanted = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(_free_port()),
            "UCX_TLS": "tcp,cuda",
        }
        self._added = [name for name in wanted if name not in os.environ]
        for name in self._added:
            os.environ[name] = wanted[name]

    def tearDown(self) -> None:
        super().tearDown()
        for name in self._added:
            del os.environ[name]

    @property
    def init_method(self) -> str:
        """Where the ranks meet."""
        return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
