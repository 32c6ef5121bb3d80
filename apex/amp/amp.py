"""Registration of functions that are to be cast, and `init`, which patches torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from apex.amp import _compiling, _pickling, rnn_compat, utils, wrap
from apex.amp._amp_state import _amp_state
from apex.amp._errors import AmpValueError
from apex.amp.handle import AmpHandle
from apex.amp.lists import (
    fft_overrides,
    functional_overrides,
    linalg_overrides,
    tensor_overrides,
    torch_overrides,
)

OVERRIDES = [functional_overrides, torch_overrides, tensor_overrides, linalg_overrides, fft_overrides]

# Dicts for their order: the later of two registrations of one function wraps the earlier.
_USER_CAST_REGISTRY: dict = {}
_USER_PROMOTE_REGISTRY: dict = {}


# ---- decorators ------------------------------------------------------------------------------------------


def _decorator_helper(orig_fn, cast_fn, wrap_fn):
    @functools.wraps(orig_fn)
    def wrapper(*args, **kwargs):
        handle = _amp_state.handle
        if not handle.is_active():
            return orig_fn(*args, **kwargs)
        inner_cast_fn = utils.verbosify(cast_fn, getattr(orig_fn, "__name__", "?"), handle.verbose)
        return wrap_fn(orig_fn, inner_cast_fn, handle)(*args, **kwargs)

    return wrapper


def half_function(fn: Callable) -> Callable:
    """Decorator: under O1 (and O4), fn gets its floating-point tensors in float16."""
    return _decorator_helper(
        fn, utils.maybe_half, functools.partial(wrap.make_cast_wrapper, try_caching=True)
    )


def bfloat16_function(fn: Callable) -> Callable:
    """Decorator: under O1 and O4, fn gets its floating-point tensors in bfloat16."""
    return _decorator_helper(
        fn, utils.maybe_bfloat16, functools.partial(wrap.make_cast_wrapper, try_caching=True)
    )


def float_function(fn: Callable) -> Callable:
    """Decorator: under O1 and O4, fn gets its floating-point tensors in float32."""
    return _decorator_helper(fn, utils.maybe_float, wrap.make_cast_wrapper)


def promote_function(fn: Callable) -> Callable:
    """Decorator: under O1 and O4, fn gets its floating-point tensors in the widest dtype among them."""
    return _decorator_helper(fn, utils.maybe_float, wrap.make_promote_wrapper)


# ---- registries ------------------------------------------------------------------------------------------


def _check_registered(module, name):
    if not hasattr(module, name):
        where = getattr(module, "__name__", module)
        raise AmpValueError(
            f"there is no function {name} in {where}",
            remedy="register it as it is looked up: amp.register_float_function(torch, 'sigmoid')",
        )


def register_half_function(module: Any, name: str) -> None:
    """From the next amp.initialize on, module.name gets float16 (under O1 and O4). Raises ValueError."""
    _check_registered(module, name)
    _USER_CAST_REGISTRY[module, name] = utils.maybe_half


def register_bfloat16_function(module: Any, name: str) -> None:
    """From the next amp.initialize on, module.name gets bfloat16 (under O1 and O4). Raises ValueError."""
    _check_registered(module, name)
    _USER_CAST_REGISTRY[module, name] = utils.maybe_bfloat16


def register_float_function(module: Any, name: str) -> None:
    """From the next amp.initialize on, module.name gets float32 (under O1 and O4). Raises ValueError."""
    _check_registered(module, name)
    _USER_CAST_REGISTRY[module, name] = utils.maybe_float


def register_promote_function(module: Any, name: str) -> None:
    """From the next amp.initialize on, module.name gets its tensors' widest dtype. Raises ValueError."""
    _check_registered(module, name)
    _USER_PROMOTE_REGISTRY[module, name] = None


# ---- patching --------------------------------------------------------------------------------------------


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    patch_type: torch.dtype = torch.float16,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    user_cast_preferred: bool = False,
) -> Any:
    """Patches torch's functions, as amp.initialize does for O1 and O4; returns the handle.

    An earlier call's patches are taken back first. patch_type: torch.float16 or torch.bfloat16.
    enable_caching: cast each weight once an iteration. verbose: print each cast. allow_banned: run functions
    that are refused in half precision in float32. user_cast_preferred: registered functions are left out of
    amp's own lists, so that the user's choice is final. Raises ValueError on another patch_type.
    """
    if patch_type not in (torch.float16, torch.bfloat16):
        raise AmpValueError(
            f"patched functions run in torch.float16 or torch.bfloat16, not {patch_type}",
            remedy='opt_level="O1" is float16, opt_level="O4" bfloat16',
        )
    unpatch()
    if not enabled:
        return _amp_state.handle

    _pickling.install()
    handle = AmpHandle(loss_scale, enable_caching, verbose)
    try:
        _patch(handle, patch_type, verbose, allow_banned, user_cast_preferred)
    except BaseException:  # a warning that is an error, say
        handle._deactivate()
        raise
    handle.key = _compiling.key_of(patch_type, allow_banned, user_cast_preferred, _what_is_patched())
    _compiling.forget_graphs()
    _amp_state.handle = handle
    return handle


def _what_is_patched():
    """Everything else that decides how functions are cast, as text that is the same in every process."""
    lists = [
        (name, value)
        for overrides in OVERRIDES
        for name, value in vars(overrides).items()
        if isinstance(value, list)
    ]
    casts = [(str(where), name, cast.__name__) for (where, name), cast in _USER_CAST_REGISTRY.items()]
    promotes = [(str(where), name) for where, name in _USER_PROMOTE_REGISTRY]
    return repr((lists, casts, promotes, sorted(_amp_state.cast_devices or ())))


def _patch(handle, patch_type, verbose, allow_banned, user_cast_preferred):
    handle._clear_after_steps()
    for (module, name), cast_fn in _USER_CAST_REGISTRY.items():
        wrap.cached_cast(module, name, cast_fn, handle, cast_fn is not utils.maybe_float, verbose)
    for module, name in _USER_PROMOTE_REGISTRY:
        wrap.promote(module, name, handle, verbose)
    _patch_lists(handle, patch_type, verbose, set(_USER_CAST_REGISTRY) if user_cast_preferred else ())
    _patch_in_place(handle, patch_type, verbose)
    rnn_compat.patch(_low_precision(patch_type)[1], handle, verbose)
    for name, message in functional_overrides.BANNED_FUNCS:
        if allow_banned:
            wrap.cached_cast(functional_overrides.MODULE, name, utils.maybe_float, handle, False, verbose)
        else:
            wrap.err_if_any_half(functional_overrides.MODULE, name, handle, message)


def _low_precision(patch_type):
    if patch_type == torch.float16:
        return "FP16_FUNCS", utils.maybe_half
    return "BFLOAT16_FUNCS", utils.maybe_bfloat16


def _patch_lists(handle, patch_type, verbose, kept):
    low_list, low_cast = _low_precision(patch_type)
    for overrides in OVERRIDES:
        module = overrides.MODULE
        for kind, cast_fn in ((low_list, low_cast), ("FP32_FUNCS", utils.maybe_float)):
            for name in getattr(overrides, kind):
                if (module, name) not in kept:
                    wrap.cached_cast(module, name, cast_fn, handle, cast_fn is low_cast, verbose)
        for name in overrides.CASTS:
            wrap.promote(module, name, handle, verbose)
        for name in overrides.SEQUENCE_CASTS:
            wrap.sequence_promote(module, name, handle, verbose)


def _patch_in_place(handle, patch_type, verbose):
    """In-place forms: those of float32 functions refuse half tensors, others keep their tensor's dtype."""
    low_list, _ = _low_precision(patch_type)
    for name in utils.as_inplace(torch_overrides.FP32_FUNCS):
        wrap.err_if_any_half(torch_overrides.MODULE, name, handle)
    for name in utils.as_inplace(tensor_overrides.FP32_FUNCS):
        wrap.err_if_arg0_half(tensor_overrides.MODULE, name, handle, verbose)
    for name in utils.as_inplace(
        itertools.chain(getattr(tensor_overrides, low_list), tensor_overrides.CASTS)
    ):
        wrap.promote_match_arg0(tensor_overrides.MODULE, name, handle, verbose)


def unpatch():
    """Takes back every patch of the last `init`."""
    _amp_state.handle._deactivate()
    _amp_state.handle = _amp_state.no_handle
