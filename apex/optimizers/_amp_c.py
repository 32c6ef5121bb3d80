"""What subclasses that drive the kernels themselves (fairseq's, NeMo's) find on public apex's optimizers: functions of
amp_C, and the flag that these take."""

from __future__ import annotations

import torch

from apex._legacy import amp_C

_NAME = "_dummy_overflow_buf"


class AmpCFunction:
    """amp_C's function of the attribute's name, or of `name`. An optimizer may have another in its place."""

    def __init__(self, name=None):
        self.name = name

    def __set_name__(self, owner, name):
        self.name = self.name or name

    def __get__(self, optimizer, owner=None):
        return getattr(amp_C, self.name)


class OverflowFlag:
    """int32 of one element, 0 at first, on the device of the first parameter; made when it is first asked for.

    Neither copied nor saved with its optimizer. One that is asked for while a CUDA graph is captured belongs to the
    graph, and is made anew for the next who asks.
    """

    def __get__(self, optimizer, owner=None):
        if optimizer is None:
            return self
        params = (p for group in optimizer.param_groups for p in group["params"])
        device = next((p.device for p in params), torch.device("cpu"))
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            vars(optimizer)[_NAME] = flag
        return flag
