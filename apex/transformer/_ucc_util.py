"""Whether this torch speaks UCC."""

from __future__ import annotations

import importlib.util

import torch.distributed as dist

HAS_UCC: bool = (dist.is_available() and dist.is_ucc_available()) or (
    importlib.util.find_spec("torch_ucc") is not None
)
