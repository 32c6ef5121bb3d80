"""What ranks tell each other beside the gradients of a pass: that it raised, or that other parameters train.

Three numbers go behind each bucket's gradients, so it costs no message of its own. On the CPU each rank reads them at
the end of the pass. An accelerator is not waited for: there they are copied to the host and read at the end of the
next pass.
"""

from __future__ import annotations

import torch

FINE = (0.0, 0.0, 1.0)  # raised, changed, unchanged
RAISED = (1.0, 0.0, 1.0)
CHANGED = (0.0, 1.0, 0.0)
LENGTH = 3


def check(raised, changed, unchanged, who):
    """Raises RuntimeError, on every rank alike, if a rank's pass raised or only some ranks' parameters changed.

    raised, changed, unchanged: whether a rank says so.
    """
    if raised:
        raise RuntimeError(
            f"{who}: the pass of a rank raised, so there is no mean of gradients: call zero_grad() on every rank, "
            "then run the pass again or leave the batch out, on every rank alike"
        )
    if changed and unchanged:
        raise RuntimeError(
            f"{who}: parameters came to require gradients, or no longer do, on some ranks only: set requires_grad "
            "alike on every rank"
        )


class Late:
    """Statuses of the last pass on an accelerator, on their way to the host."""

    def __init__(self, length=LENGTH):
        self._length = length
        self._host = self._arrived = None

    def put(self, status):
        """Copies the numbers beside whatever runs; not inside a graph's capture, where nothing can be read."""
        module = torch.get_device_module(status.device)
        if getattr(module, "is_current_stream_capturing", bool)():
            return
        if self._host is None or self._host.dtype != status.dtype:
            pinned = status.device.type == "cuda"
            self._host = torch.empty(self._length, dtype=status.dtype, device="cpu", pin_memory=pinned)
        self._host.copy_(status, non_blocking=True)
        self._arrived = module.Event()
        self._arrived.record(module.current_stream(status.device))

    def read(self):
        """Which numbers of the pass before, whose kernels ended long ago, are not 0; as FINE if there is none."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return [number != 0 for number in FINE[: self._length]]
        arrived.synchronize()
        return self._host.ne(0).tolist()
