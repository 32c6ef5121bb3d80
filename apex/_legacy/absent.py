"""What an import of an absent name says: of an extension (mlp_cuda), or of public apex's Python (apex.mlp).

The finder stands last in sys.meta_path, so it is asked only for modules that nothing else has. For an import
statement it raises ModuleNotFoundError with what is to be used. For everyone who merely looks
(importlib.util.find_spec, pkgutil) it answers None as any finder would. The two are told apart by the
caller's frame, because the import system offers no other way; where the frame is not recognised the answer is
None, and Python's own "No module named ..." follows. So are `from apex import mlp`, which raises the same, and
hasattr(apex, "mlp"), which is False.
"""

from __future__ import annotations

import dis
import sys

# Of names that there will not be.
_REFUSED = {
    "apex.transformer_engine.tensorflow": "No module named 'apex.transformer_engine.tensorflow': Transformer Engine "
    "has no TensorFlow face any more, the public project dropped it with version 1.0; use "
    "apex.transformer_engine.pytorch"
}


class Finder:
    """Never finds a module."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if (path is not None and not name.startswith("apex.")) or not _is_import(sys._getframe(1)):
            return None
        text = _message(name)
        if text:
            raise ModuleNotFoundError(text, name=name)
        return None


def _is_import(frame):
    """Whether `frame` (importlib's _find_spec) was called to carry out an import."""
    caller = frame.f_back if frame else None
    return (
        caller is not None
        and caller.f_code.co_name == "_find_and_load_unlocked"
        and caller.f_globals.get("__name__") == "importlib._bootstrap"
    )


def _message(name):
    from apex._legacy import message, public_names

    if name in _REFUSED:
        return _REFUSED[name]
    try:
        return public_names.message(name) if name.startswith("apex.") else message(name)
    except Exception:  # a damaged registry must not change what an unrelated import does
        return None


def attributes_of(module):
    """A `__getattr__` for the module of that name, which says what it says of modules of attributes too."""

    def __getattr__(name):
        raise missing(module, name, sys._getframe(1))

    return __getattr__


def missing(module, name, frame):
    """The exception for an attribute that `module` lacks: ImportError where `frame` runs `from module import name`."""
    text = None if name.startswith("__") else _message(f"{module}.{name}")
    if text is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    if text.startswith("No module") and _is_from_import(frame):
        return ModuleNotFoundError(text, name=f"{module}.{name}")
    return refused(text, module, frame)


def refused(text, module, frame):
    """AttributeError with a text; ImportError where `frame` runs `from module import name`, which shows no other's."""
    return ImportError(text, name=module) if _is_from_import(frame) else AttributeError(text)


def _is_from_import(frame):
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]


def install():
    """Appends the finder to sys.meta_path, once."""
    if Finder not in sys.meta_path:
        sys.meta_path.append(Finder)
