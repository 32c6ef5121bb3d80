"""Failures that ranks tell each other: who waits for a rank that failed is ended, and learns which rank and why.

A rank that fails amid what all ranks do (`Together`), or by an error that ends its process, writes so into the store of
init_process_group. While a rank waits, a thread of it looks there twice a second, and ends the process group that it
waits in: a call of gloo's cannot be left otherwise. What is written counts for ranks amid the same step only, so that
nobody hears of an old failure.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import datetime
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

TICK = 0.5  # seconds between two looks
_SLICE = datetime.timedelta(seconds=TICK)
VAIN = "waited in vain"  # of errors that follow from another rank's
_PATIENCE = datetime.timedelta(seconds=5)  # with a store that does not answer
_LENGTH = 2000  # of an error's text
_PROCESS = "process"  # of errors that end it
_ADVICE = ". Process groups of that rank are at an end: destroy them and make others to go on"
_NOBODY_SENDS = 2**30 + 17  # a tag


class Wait:
    """A call that waits for other ranks, in a process group (None: that of all ranks).

    heard: how often in a row a failure was found that ends it. ended: the group is at an end.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.heard, self.ended = group, 0, False

    def begin(self) -> None:
        board = _current()
        if board is not None:
            self.group = dist.group.WORLD if self.group is None else self.group
            if board.doubtful:
                board.why_ended(self.group)
            self.ended = self.group in board.ended
            _waits[id(self)] = self

    def end(self) -> None:
        _waits.pop(id(self), None)

    def run(self, collective: Any, *tensors: Any, **options: Any) -> None:
        """A collective of torch.distributed in this group, to its end."""
        if _is_gloo(self.group):
            self.until(collective(*tensors, **options, async_op=True))
        else:
            collective(*tensors, **options)

    def until(self, work: Any) -> None:
        """Waits for a collective in this group that was started. Messages cannot be waited for bit by bit."""
        if work is None or not _is_gloo(self.group):
            if work is not None:
                work.wait()
            return
        while True:
            begin = time.monotonic()
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if self.ended:
                    raise RuntimeError("Connection closed: this process group was ended") from None
                if (
                    time.monotonic() - begin < TICK / 2
                ):  # an error of its own, and not that it is not there yet
                    raise


class _Board:
    """What the ranks of one world tell each other.

    open: the Together that this rank is in, from outside. counts: how many there were within no other, by name.
    ended: groups, and why. doubtful: this rank has failed, and others may have ended groups since, in which gloo may
    wait for its whole timeout.
    """

    def __init__(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            store = store.clone()  # a connection of its own: a call that waits may hold the other one
            store.set_timeout(_PATIENCE)
        self.rank, self.world, self.process = dist.get_rank(), dist.get_world_size(), os.getpid()
        store = dist.PrefixStore("apex.parallel/failures", store)
        self._all = dist.PrefixStore(str(store.add(f"worlds/{self.rank}", 1)), store)
        self.restart(0)
        self.ended: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def restart(self, number: int) -> None:
        """Counts from the start again: from here on, what was told before is not heard. number: of this restart."""
        self._store = dist.PrefixStore(str(number), self._all)
        self.open: list[Together] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.doubtful = False

    def keys(self) -> list[str]:
        """Of what this rank is in, or was in last, and of what ends processes."""
        within = [one.key for one in reversed(self.open)]
        last = [_key(what, number) for what, number in self.counts.items()]
        return [*within, *(key for key in last if key not in within), _key(_PROCESS)]

    def tell(self, key: str, what: str, error: BaseException) -> None:
        """Nothing where the store is gone with the rank that held it."""
        self.doubtful = True
        with contextlib.suppress(RuntimeError):
            text = f"rank {self.rank} failed in {what}: {_in_words(error)}"
            self._store.set(f"{key}{self.rank}", text[:_LENGTH])
            self._store.set(key, "told")

    def end(self, group: Any, why: str) -> None:
        """Ends a group in which this rank waits, of which the others will hear when they use it."""
        self.ended[group] = why
        if key := _ended(group):
            with contextlib.suppress(RuntimeError):
                self._store.set(key, why)
        _break(group)

    def heard(self, group: Any, keys: list[str]) -> str | None:
        """What ranks of a group told, in words: of those that failed by themselves, if there are any."""
        told: dict[int, str] = {}
        with contextlib.suppress(RuntimeError):
            for key in filter(lambda key: self._store.check([key]), keys):
                for rank in _ranks(group, self.world):
                    if rank != self.rank and rank not in told and self._store.check([f"{key}{rank}"]):
                        told[rank] = self._store.get(f"{key}{rank}").decode()
        found = [*told.values()]
        return "; ".join(([text for text in found if VAIN not in text] or found)[:3]) or None

    def why_ended(self, group: Any) -> str | None:
        """Of a group that a rank of it has ended."""
        if group not in self.ended and (key := _ended(group)):
            with contextlib.suppress(RuntimeError):
                if self._store.check([key]):
                    self.ended[group] = self._store.get(key).decode()
        return self.ended.get(group)


class Together:
    """A context of what all ranks do at the same time, each as often as the others.

    A rank that leaves it by an exception tells so, and ends the waiting of the others that are in it.

    Args:
        what: it is called.
        answered: process groups in which a rank that failed goes on, so that nobody waits for it in vain.
    """

    def __init__(self, what: str, answered: tuple[Any, ...] = ()) -> None:
        self.what, self.answered = what, answered
        self._board: _Board | None = None
        self.key, self._told = "", False
        self._counts: collections.Counter[str] = collections.Counter()  # of those within

    def __enter__(self) -> Together:
        self._board = board = _current()
        if board is not None:
            # A rank that failed may not have come to what is within: it is counted anew each time.
            counts, before = (
                (board.open[-1]._counts, board.open[-1].key) if board.open else (board.counts, "")
            )
            counts[self.what] += 1
            self.key = before + _key(self.what, counts[self.what])
            board.open.append(self)
        return self

    def tell(self, error: BaseException) -> None:
        if self._board is not None:
            self._told = True
            self._board.tell(self.key, self.what, error)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._board is None:
            return
        if error is not None and not isinstance(error, GeneratorExit):  # a generator's caller left it
            self.tell(error)
        elif not self._told:
            self._board.doubtful = False
        if self in self._board.open:  # which a restart empties
            self._board.open.remove(self)


@contextlib.contextmanager
def failing_together(what: str = "a step") -> Iterator[None]:
    """A step of all ranks, which fails on all of them if it fails on one.

    Every rank enters it, as often as the others. Where one leaves it by an exception, those that wait for that rank in
    a call of apex raise RuntimeError within seconds, which names the rank and its error, and do not wait until the
    timeout. The process groups in which they waited are at an end then, on every rank that is in them: to go on, all
    ranks destroy them and make others. Errors that end the process are told without it.

    NCCL waits on the GPU and is not ended before its timeout; what is raised then names the rank.

    Args:
        what: the step is called in errors.
    """
    with Together(what):
        yield


_boards: weakref.WeakKeyDictionary[Any, _Board | None] = weakref.WeakKeyDictionary()
_names: weakref.WeakKeyDictionary[Any, str] = (
    weakref.WeakKeyDictionary()
)  # of groups that torch does not list
_waits: dict[int, Wait] = {}
_stop = threading.Event()
_thread: threading.Thread | None = None


def name(group: Any, text: str) -> Any:
    """The group. text: the same on all its ranks, of a group that has no name of its own."""
    _names[group] = text
    return group


def reason(group: Any) -> str | None:
    """Why ranks of a group (None: that of all ranks) that were waited for did not come, if they told."""
    board = _current()
    if board is None:
        return None
    group = dist.group.WORLD if group is None else group
    told = board.why_ended(group) or board.heard(group, board.keys())
    return told and told.replace(_ADVICE, "") + _ADVICE  # an error that follows from another one has it, too


def restart(number: int) -> None:
    """All ranks are at one place: whatever they failed in before, they count alike from here on."""
    if board := _current():
        board.restart(number)


def _in_words(error):
    """Its class and text. A text that cannot be had or sent must not hide that there was an error."""
    try:
        text = str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    except Exception as another:
        text = f"its text cannot be had, {type(another).__name__}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _key(what, number=0):
    return f"{what}/{number}/"


def _ended(group):
    name = getattr(group, "group_name", "") or _names.get(group)
    return name and f"ended/{name}"


def _ranks(group, world):
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):  # a group that torch does not list
        return range(world)


def _current() -> _Board | None:
    """The board of this world; None where there is nobody else."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = dist.group.WORLD
    if world not in _boards:
        alone = dist.get_world_size() == 1 or dist.get_backend() in ("fake", "mpi")  # MPI has no store
        _boards[world] = None if alone else _Board()
        if not alone:
            _start()
    board = _boards[world]
    # A process that was forked is no rank, and must not write between the messages of its parent's connection.
    return board if board is not None and board.process == os.getpid() else None


def _start():
    """Once a process: the thread that looks, and the hook of errors that end the process."""
    global _thread
    if _thread is not None and _thread.is_alive():  # a process that was forked has none
        return
    _thread = threading.Thread(target=_watch, name="apex.parallel failures", daemon=True)
    _thread.start()
    atexit.register(_finish, _thread)
    if not getattr(sys.excepthook, "tells_ranks", False):
        sys.excepthook = _telling(sys.excepthook)


def _finish(thread):
    _stop.set()
    thread.join(2 * TICK)


def _telling(before):
    """An excepthook that tells the other ranks, too."""

    def hook(kind, error, trace):
        board = None if hasattr(sys, "ps1") else _current()  # an interactive session goes on
        if board is not None:
            board.tell(_key(_PROCESS), "what ended its process", error)
        before(kind, error, trace)

    hook.tells_ranks = True
    return hook


def _watch():
    while not _stop.wait(TICK):
        for wait in list(_waits.values()):
            board = _current()
            told = None if board is None else _heard_in(board, wait.group)
            wait.heard = 0 if told is None else wait.heard + 1
            if wait.heard == 2:  # what is there once only may be on its way, as is its answer
                wait.ended = True
                board.end(wait.group, told)


def _heard_in(board, group):
    keys = [one.key for one in list(board.open) if group not in one.answered]
    return board.why_ended(group) or board.heard(group, [*keys, _key(_PROCESS)])


_gloo: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _is_gloo(group):
    """Whether gloo alone carries a group's tensors: a wait for another backend must not be cut short."""
    if group is None:
        return False
    if group not in _gloo:
        devices = getattr(group, "_device_types", None)  # none: it is a backend by itself
        backends = [group] if devices is None else [group._get_backend(device) for device in devices]
        _gloo[group] = bool(backends) and all("gloo" in backend.name() for backend in backends)
    return _gloo[group]


def _break(group):
    """Ends a gloo group and calls in it, which is what gloo does about a message that does not come in time.

    Now and then a call is left, for which the group's destructor would wait until the timeout: it never runs.
    """
    if not _is_gloo(group) or group.size() == 1:
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
    for other in range(
        group.size()
    ):  # a connection that is closed raises at once, and leaves the others open
        if other != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([nothing], other, _NOBODY_SENDS).wait(datetime.timedelta(milliseconds=1))
