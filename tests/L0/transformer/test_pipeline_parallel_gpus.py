"""apex.transformer.pipeline_parallel over two GPUs with NCCL: splits of models, and what is waited for."""

from __future__ import annotations

import pp_gpus
import pytest
import sharded_adam
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")

results, test_nccl = sharded_adam.cases_on_two_gpus(pp_gpus.run, pp_gpus.CASES)
