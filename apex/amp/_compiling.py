"""torch.compile and casts: a graph is used while casts are as they were when it was made.

Dynamo looks into patched functions. Methods of tensors, operators, and functions that torch itself is written with, it
puts into the graph by name; their wrappers run when the graph is traced, and the casts of that moment stay in it. So
wrappers leave a guard then. torch also keeps graphs on disk, and finds them by those names: its key is told of casts.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import weakref

import torch
from torch._guards import Guard, TracingContext
from torch.compiler import config

_guards: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # context of a graph -> its guards
_PREFIX = " apex.amp "  # in the tag of torch's caches, after what the user has there


def note_casts(handle):
    """Called by wrappers. Where a graph is being traced, it is good as long as `handle` is as active as now."""
    context = TracingContext.try_get()
    if context is None:
        return
    active = handle.is_active_now()
    known = _guards.setdefault(context, {})
    if (handle, active) not in known:
        source = torch._dynamo.source.GlobalStateSource()
        known[handle, active] = Guard(source, functools.partial(_add_guard, handle, active))
    context.guards_context.dynamo_guards.add(
        known[handle, active]
    )  # which it may have, or have dropped again
    tell_caches(handle.key if active else None)


def _add_guard(handle, active, builder, guard):
    words = [f"apex.amp casts are {'on' if active else 'off'}"]
    add = builder.guard_manager.root.add_lambda_guard
    check = lambda *_: handle.is_active_now() == active  # noqa: E731
    try:
        add(check, words, None)
    except TypeError:  # before torch 2.11
        add(check, words)


def tell_caches(key):
    """key: AmpHandle.key, or None where functions are torch's own."""
    users = config.cache_key_tag.partition(_PREFIX)[0]
    config.cache_key_tag = users if key is None else f"{users}{_PREFIX}{key}"


def key_of(*words):
    """For AmpHandle.key: of all that decides how functions are cast."""
    return hashlib.sha256(repr(words).encode()).hexdigest()


def forget_graphs():
    """Functions were patched: graphs that call them by name, and know of no casts, are made anew."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def note_methods():
    """While no function is patched: Dynamo finds out once which methods of tensors are torch's own.

    It would miss those that are patched then, for good.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    methods = getattr(rules, "get_tensor_method", None)
    if hasattr(methods, "cache_clear"):
        methods.cache_clear()
        methods()
