"""A service in a child process: for libraries that need a preloaded sanitizer, and code that may crash.

The child ends with a sanitizer's report; that becomes a KernelFault, and the next call starts a new child
(whose memory is empty: a test does not outlive its fault).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection

from simt.device import KernelFault

TESTS = pathlib.Path(__file__).resolve().parents[1]
_MOST_REPORT = 6000


class Worker:
    """Stands for an object in a child process: method calls go there, results and exceptions come back."""

    def __init__(self, factory: str, arguments: tuple, environment: dict[str, str]):
        """
        Args:
            factory: "module:Class", importable from the tests folder.
            arguments: of the constructor.
            environment: added to this process's.
        """
        self._factory = factory
        self._arguments = arguments
        self._environment = environment
        self._child: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._output = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        self._child = subprocess.Popen(
            [sys.executable, "-m", "simt.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=self._output,
            env={**os.environ, "PYTHONPATH": path, **self._environment},
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._call("start", (self._factory, self._arguments))

    def _report(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace").strip()

    def _call(self, method: str, arguments: tuple):
        try:
            self._connection.send((method, arguments))
            good, value = self._connection.recv()
        except (EOFError, OSError):
            code, report = self._child.wait(), self._report()
            self.stop()
            raise KernelFault(report[:_MOST_REPORT] or f"the child process ended with code {code}") from None
        if not good:
            raise value
        return value

    def __getattr__(self, method: str):
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*arguments):
            if self._child is None:
                self._start()
            return self._call(method, arguments)

        return call

    @property
    def warp_size(self) -> int:
        return self.get("warp_size")

    def free(self, address: int) -> None:
        """Frees memory, unless it went with a child that ended."""
        if self._child is not None:
            with contextlib.suppress(KeyError):
                self._call("free", (address,))

    def stop(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._connection.close()
            self._child.wait()
            self._output.close()
            self._child = None


def serve(connection: Connection) -> None:
    """The child: answers calls until the parent is gone."""
    service = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            if method == "start":
                factory, arguments = arguments
                module, name = factory.split(":")
                service = getattr(importlib.import_module(module), name)(*arguments)
                result = None
            elif method == "get":
                result = getattr(service, *arguments)
            else:
                result = getattr(service, method)(*arguments)
            answer = True, result
        except Exception as error:
            answer = False, error
        connection.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
