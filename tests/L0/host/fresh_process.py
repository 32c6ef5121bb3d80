"""Runs a test's body in a process of its own: a driver is opened once per process, and some tests fork."""

import importlib
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from .apex_library import CUDA, HIP, Apex, FakeDriver


def before(variable, path) -> str:
    """The value of a search path with one more place in front."""
    return ":".join(filter(None, [str(path), os.environ.get(variable, "")]))


def fresh_process(driver=None, mapped=True, search=None, devices=0):
    """Decorates `body(apex[, driver])`.

    driver: "cuda", "old_cuda" or "hip": the fake that the process finds (CUDA by LD_LIBRARY_PATH, HIP because
    the process has mapped it, as torch would have) and that the body gets as its second argument.
    mapped: False leaves the fake findable but not loaded; the body then gets its path.
    devices: how many real GPUs the body needs; skipped where the `devices` fixture counts fewer.
    search: a folder within APEX_SCENE (a fixture's) for LD_LIBRARY_PATH.
    """

    def decorate(body):
        def test(library, fakes, request, tmp_path):
            if devices and request.getfixturevalue("devices") < devices:
                pytest.skip(f"needs {devices} devices: not run")
            folder = ""
            if driver:
                folder = str(fakes[driver].parent)
            elif search:
                folder = os.path.join(os.environ["APEX_SCENE"], search)
            source = Path(sys.modules[body.__module__].__file__)
            root = source.parents[body.__module__.count(".")]
            code = f"from {__name__} import main; main()"
            arguments = [
                body.__module__,
                body.__name__,
                str(library),
                str(fakes[driver]) if driver else "",
                str(mapped),
            ]
            done = subprocess.run(
                [sys.executable, "-c", code, *arguments],
                env={
                    **os.environ,
                    "PYTHONPATH": before("PYTHONPATH", root),
                    "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", folder),
                },
                capture_output=True,
                text=True,
                timeout=300,
                cwd=tmp_path,
            )
            print(done.stdout, end="")
            assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"

        test.body = body
        if driver:
            test = pytest.mark.fake_driver(test)
        if devices:
            test = pytest.mark.gpu(pytest.mark.two_gpus(test) if devices > 1 else test)
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        return test

    return decorate


def on_both(body):
    """Decorates `body(apex, driver, platform)`: its module gets two tests, one a vendor."""
    for name, platform in (("cuda", CUDA), ("hip", HIP)):

        def run(apex, driver, platform=platform):
            body(apex, driver, platform)

        run.__name__, run.__doc__, run.__module__ = (
            f"{body.__name__}_on_{name}",
            body.__doc__,
            body.__module__,
        )
        setattr(sys.modules[body.__module__], run.__name__, fresh_process(name)(run))


def show_with_values(kind, error, trace) -> None:
    """Prints an exception with the local variables: pytest does not rewrite the asserts of this process."""
    lines = traceback.TracebackException(kind, error, trace, capture_locals=True).format()
    sys.stderr.write("".join(lines))


def main() -> None:
    """The process's side."""
    sys.excepthook = show_with_values
    module, name, library, driver, mapped = sys.argv[1:]
    body = getattr(importlib.import_module(module), name).body
    apex = Apex(library)
    if not driver:
        body(apex)
    elif mapped == "True":
        body(apex, FakeDriver(driver))
    else:
        body(apex, Path(driver))
