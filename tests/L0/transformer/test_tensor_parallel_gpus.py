"""apex.transformer over two GPUs with NCCL, and on one, where nothing is said."""

from __future__ import annotations

import pytest
import sharded_adam
import torch
import tp_gpus

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")

results, test_nccl = sharded_adam.cases_on_two_gpus(tp_gpus.run, tp_gpus.CASES)
