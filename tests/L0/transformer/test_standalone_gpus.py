"""Standalone GPT over two GPUs with NCCL, and what models have in common."""

from __future__ import annotations

import pytest
import sharded_adam
import standalone_gpus
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")

results, test_nccl = sharded_adam.cases_on_two_gpus(standalone_gpus.run, standalone_gpus.CASES)
