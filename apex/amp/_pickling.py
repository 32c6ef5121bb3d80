"""Functions that amp patches are pickled as torch's own, by torch.save and on their way to another process.

Python pickles a function by its name, and under the name of a patched one stands amp's wrapper. What a model took
before amp.initialize is then no longer found under its name; nor is an earlier wrapper. These are pickled as a look-up
of the name, which needs neither apex nor amp where it is loaded. (Plain pickle.dumps, which nobody can teach, takes the
wrappers in place alone: they bear the names that they stand under.)
"""

from __future__ import annotations

import inspect
import pickle
import pkgutil
import types
import weakref
from multiprocessing.reduction import ForkingPickler

import torch

# A patched function, or a wrapper -> "torch.nn.functional:softmax".
_places: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def remember(owner, name, original, wrapper):
    """That `wrapper` now stands in the place of `original`, as owner.name; owner: a module or a class."""
    if isinstance(owner, types.ModuleType):
        module, path = owner.__name__, name
    elif isinstance(owner, type):
        module, path = owner.__module__, f"{owner.__qualname__}.{name}"
    else:
        return
    wrapper.__module__, wrapper.__qualname__ = module, path
    for function in (original, wrapper):
        if type(function) is types.FunctionType:
            _places.setdefault(function, f"{module}:{path}")


def reduced(pickler, value):
    """`reducer_override` of a pickler."""
    if type(value) is types.FunctionType:
        place = _places.get(value)
        if place is not None and not _has_its_name(value):
            return pkgutil.resolve_name, (place,)
    return NotImplemented


def _has_its_name(function):
    try:
        return pkgutil.resolve_name(f"{function.__module__}:{function.__qualname__}") is function
    except (ImportError, AttributeError, ValueError):
        return False


class _Pickler(pickle.Pickler):
    reducer_override = reduced


class _Pickling(types.ModuleType):
    """What torch.save takes as its pickle_module: Python's, with the pickler above."""

    Pickler = _Pickler

    def __getattr__(self, name):
        return getattr(pickle, name)


def install():
    """From now on torch.save and multiprocessing know the functions that were patched. They keep to it when amp goes:
    models hold wrappers longer than amp is on."""
    if "reducer_override" not in vars(ForkingPickler):
        ForkingPickler.reducer_override = reduced
    save = torch.serialization.save
    defaults = inspect.signature(save).parameters
    names = [
        name for name, p in defaults.items() if p.default is not p.empty and p.kind is not p.KEYWORD_ONLY
    ]
    if defaults["pickle_module"].default is pickle:  # else someone's own pickler stays
        values = [defaults[name].default for name in names]
        values[names.index("pickle_module")] = _Pickling("pickle")
        save.__defaults__ = tuple(values)
