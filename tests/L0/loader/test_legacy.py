"""Import names of public apex that this installation lacks."""

import glob
import os
import subprocess
import sys

import pytest

from apex import _legacy

from .described import ROOT

PYTHONS = [sys.executable, *sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.1[0-9]*/bin/python")))]


# An extension that is not in the build, whatever the registry has.
PLANNED = """
import apex
from apex._loader import registry
if known := bool(registry.extensions()):  # Python 3.10 without tomli reads no registry in a checkout
    registry.extensions = lambda: {"later_cuda": registry.Extension("later_cuda", "cuda", (), "planned", "1.12.0")}
"""


@pytest.mark.parametrize("interpreter", PYTHONS)
def test_absent_after_apex_is_imported(interpreter):
    """On every Python here: the finder looks at frames of the import system. None of this needs torch."""
    code = f"""{PLANNED}
import importlib, importlib.util, pkgutil, sys
assert importlib.util.find_spec("later_cuda") is None
assert "later_cuda" not in [m.name for m in pkgutil.iter_modules()]
for act in (__import__, importlib.import_module, apex.require):
    try:
        act("later_cuda")
    except ModuleNotFoundError as error:
        assert error.name == "later_cuda", error.name
        assert not known or "not in this build" in str(error), error
    else:
        raise AssertionError
for other in ("no_such_module_at_all", "os.no_such", "later_cuda.part"):
    try:
        importlib.import_module(other)
    except ModuleNotFoundError as error:
        assert error.name in (other, "later_cuda"), error.name
    else:
        raise AssertionError
assert sys.meta_path[-1].__name__ == "Finder"
importlib.reload(apex)
assert [getattr(f, "__name__", "") for f in sys.meta_path].count("Finder") == 1
print("done")
"""
    done = subprocess.run(
        [interpreter, "-c", code], capture_output=True, text=True, cwd="/", env={"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == "done\n", done.stderr


def test_the_message_names_the_release(monkeypatch):
    from apex._loader import registry

    row = registry.Extension("later_cuda", "cuda", (), "planned", "1.12.0")
    monkeypatch.setattr(registry, "extensions", lambda: {"later_cuda": row})
    assert "apex 1.12.0 brings it" in _legacy.message("later_cuda")
    assert _legacy.message("unknown") is None


def test_a_damaged_registry_leaves_other_imports_alone(monkeypatch):
    def fail():
        raise ValueError("damaged")

    from apex._loader import registry

    monkeypatch.setattr(registry, "extensions", fail)
    with pytest.raises(ModuleNotFoundError) as caught:
        __import__("no_such_module_at_all")
    assert caught.value.name == "no_such_module_at_all"


def test_text_of_generated_modules():
    text = _legacy.module_text("amp_C")
    compile(text, "amp_C.py", "exec")
    assert "import torch" in text and "from apex._legacy.amp_C import *" in text


def test_the_registry_of_the_checkout():
    from apex._loader import registry

    found = registry.extensions()
    assert {"amp_C", "apex_C", "syncbn", "fused_layer_norm_cuda"} <= set(found)
    assert all(extension.state in ("complete", "planned") for extension in found.values())
