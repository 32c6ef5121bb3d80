"""Every test of amp begins, and leaves the process, as if amp had never been used."""

from __future__ import annotations

import pytest
import torch
from amp_runs import forget


@pytest.fixture(autouse=True)
def clean():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    torch.manual_seed(0)
    forget()
    yield
    forget()
    torch.set_num_threads(threads)
