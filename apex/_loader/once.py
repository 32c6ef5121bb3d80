"""What is made once a process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from apex._loader import system

T = TypeVar("T")


class Once(Generic[T]):
    """A function without arguments that runs once a process, however many threads call it; all get its result.

    Where it raises, the next call runs it again. A forked child is not held up by a lock of a thread that it has not.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        functools.update_wrapper(self, make)
        self._make = make
        self._made: list[T] = []
        self._fresh_lock()
        system.in_forked_child(self._fresh_lock)

    def __call__(self) -> T:
        if not self._made:
            with self._lock:
                if not self._made:
                    self._made.append(self._make())
        return self._made[0]

    def made(self) -> T | None:
        """The result, if there is one."""
        return self._made[0] if self._made else None

    def forget(self) -> None:
        """The next call makes it anew."""
        self._made.clear()

    def _fresh_lock(self) -> None:
        self._lock = threading.RLock()
