"""apex.transformer_engine, by the name that scripts import: `import transformer_engine.pytorch as te`.

Every module of apex.transformer_engine is the same object by both names. Beside the public Transformer Engine, which
owns this name, importing it raises ImportError.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys

OWN = "apex-transformer-engine"


def _public():
    """The distribution of the public engine that is installed, or None.

    One that requires this one is no such: it has the name alone.
    """
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name != "transformer-engine" and not name.startswith("transformer-engine-"):
            continue
        if not any(text.startswith(OWN) for text in distribution.requires or ()):
            return name
    return None


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives apex.transformer_engine.x for transformer_engine.x."""

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(f"{__name__}."):
            return None
        found = importlib.util.find_spec(f"apex.{fullname}")
        if found is None:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, self, is_package=found.submodule_search_locations is not None
        )

    def create_module(self, spec):
        module = importlib.import_module(f"apex.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        # The import system wrote the spec of the other name into it.
        module.__spec__ = module.__spec__.loader_state


_other = _public()
if _other is not None:
    raise ImportError(
        f"both {OWN} and {_other} are installed, and have the name transformer_engine: "
        f"pip uninstall {OWN}, or pip uninstall {_other} and pip install --force-reinstall {OWN}"
    )
sys.meta_path.insert(0, _Modules())
_engine = importlib.import_module("apex.transformer_engine")
__version__ = importlib.import_module("apex").__version__


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(f"apex.{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(_engine, name)
