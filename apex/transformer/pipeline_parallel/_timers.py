"""Stopwatches by name. On an accelerator they wait for what was queued before, so that they measure it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def _now():
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


class _Timer:
    """A stopwatch. `start` and `stop` raise RuntimeError where it runs already, or does not run."""

    def __init__(self, name: str) -> None:
        self.name_, self.elapsed_ = name, 0.0
        self.started_, self.start_time = False, 0.0

    def start(self) -> None:
        if self.started_:
            raise RuntimeError(f"timer {self.name_!r} runs already")
        self.start_time, self.started_ = _now(), True

    def stop(self) -> None:
        if not self.started_:
            raise RuntimeError(f"timer {self.name_!r} does not run: call start() first")
        self.elapsed_ += _now() - self.start_time
        self.started_ = False

    def reset(self) -> None:
        """Stops it, at 0 seconds."""
        self.elapsed_, self.started_ = 0.0, False

    def elapsed(self, reset: bool = True) -> float:
        """Seconds so far; it goes on if it runs. reset: from 0."""
        running = self.started_
        if running:
            self.stop()
        elapsed = self.elapsed_
        if reset:
            self.reset()
        if running:
            self.start()
        return elapsed


class _Timers:
    """Stopwatches; one that is asked for by a new name is made. Unknown names raise KeyError in `write` and `log`."""

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    def write(
        self, names: Iterable[str], writer: Any, iteration: int, normalizer: float = 1.0, reset: bool = False
    ) -> None:
        """Seconds / `normalizer` of each, by writer.add_scalar("NAME-time", seconds, iteration), as TensorBoard's."""
        for name, seconds in self._seconds(names, normalizer, reset).items():
            writer.add_scalar(f"{name}-time", seconds, iteration)

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Prints milliseconds / `normalizer` of each, on the last rank."""
        seconds = self._seconds(names, normalizer, reset)
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            parts = (f" | {name}: {1000 * value:.2f}" for name, value in seconds.items())
            print("time (ms)" + "".join(parts), flush=True)

    def _seconds(self, names, normalizer, reset):
        if not normalizer > 0:
            raise ValueError(f"normalizer {normalizer}: a positive number is required")
        return {name: self.timers[name].elapsed(reset) / normalizer for name in names}
