"""Wrappers that cast arguments, and the functions that put them in place of torch's.

Every wrapper asks its handle first whether casts are on. Calls whose tensors are all float64 are left alone:
who computes in float64 wants the digits. So are calls with out=, whose dtype the caller has chosen: the result of a
cast of it would be lost.
"""

import functools

import torch

from apex.amp import utils
from apex.amp._amp_state import _amp_state
from apex.amp._errors import MovedFunctionWarning, warn
from apex.amp._rnn_shim import VariableFunctionsShim

_HALVES = {torch.float16, torch.bfloat16}


def _present(mod, fn):
    """Whether `mod` has `fn`; says so by its name if a torch moved it away."""
    if utils.has_func(mod, fn):
        return True
    name = getattr(mod, "__name__", type(mod).__name__)
    warn(
        f"torch {torch.__version__} has no {name}.{fn}: amp does not cast its successor; register that by "
        f"amp.register_half_function or amp.register_float_function before amp.initialize",
        MovedFunctionWarning,
    )
    return False


def _writes_to(kwargs):
    return kwargs.get("out") is not None


# ---- to one dtype ----------------------------------------------------------------------------------------


def make_cast_wrapper(orig_fn, cast_fn, handle, try_caching=False):
    """orig_fn with its floating-point tensors cast by cast_fn; casts of weights are kept if try_caching."""

    @functools.wraps(orig_fn)
    def wrapper(*args, **kwargs):
        if not handle.is_active() or _writes_to(kwargs) or utils.all_double(args, kwargs):
            return orig_fn(*args, **kwargs)
        # A compiled graph must not hold on to tensors, and shares equal casts by itself.
        if try_caching and handle.has_cache and not torch.compiler.is_compiling():
            cache = handle.cache
            args = [utils.cached_cast(cast_fn, x, cache) if utils.should_cache(x) else x for x in args]
            for k, x in kwargs.items():
                if utils.should_cache(x):
                    kwargs[k] = utils.cached_cast(cast_fn, x, cache)
        args = utils.casted_args(cast_fn, args, kwargs)
        return orig_fn(*args, **kwargs)

    return wrapper


def cached_cast(mod, fn, cast_fn, handle, try_caching=False, verbose=False):
    """Patches mod.fn so that it runs in cast_fn's dtype."""
    if _present(mod, fn):
        cast_fn = utils.verbosify(cast_fn, fn, verbose)
        wrapper = make_cast_wrapper(utils.get_func(mod, fn), cast_fn, handle, try_caching)
        utils.set_func_save(handle, mod, fn, wrapper)


# ---- to the widest dtype ---------------------------------------------------------------------------------


def _widening_cast(dtypes):
    """The cast to the dtype that holds all of `dtypes`; None if they are one."""
    if len(dtypes) <= 1:
        return None
    return utils.maybe_double if torch.float64 in dtypes else utils.maybe_float


def make_promote_wrapper(orig_fn, cast_fn=None, handle=None):
    """orig_fn with its floating-point tensors cast to the widest dtype among them.

    cast_fn is public apex's and unused: float32, or float64 where one is float64, is what is widest.
    """

    @functools.wraps(orig_fn)
    def wrapper(*args, **kwargs):
        if utils.one_dtype(args, kwargs) or not _active(handle) or _writes_to(kwargs):
            return orig_fn(*args, **kwargs)
        widen = _widening_cast(utils.dtypes_of(args, kwargs))
        if widen is None:
            return orig_fn(*args, **kwargs)
        args = utils.casted_args(widen, args, kwargs)
        return orig_fn(*args, **kwargs)

    return wrapper


def _active(handle):
    handle = handle or getattr(_amp_state, "handle", None)
    return handle is not None and handle.is_active()


def promote(mod, fn, handle, verbose=False):
    """Patches mod.fn so that tensors of several dtypes are widened."""
    if _present(mod, fn):
        utils.set_func_save(handle, mod, fn, make_promote_wrapper(utils.get_func(mod, fn), None, handle))


def sequence_promote(mod, fn, handle, verbose=False):
    """The same for functions of a list of tensors, as torch.cat."""
    if not _present(mod, fn):
        return
    orig_fn = utils.get_func(mod, fn)

    @functools.wraps(orig_fn)
    def wrapper(*args, **kwargs):
        if handle.is_active():
            if args:
                args = (_widened(args[0]), *args[1:])
            elif "tensors" in kwargs:
                kwargs["tensors"] = _widened(kwargs["tensors"])
        return orig_fn(*args, **kwargs)

    utils.set_func_save(handle, mod, fn, wrapper)


def _widened(seq):
    widen = _widening_cast(utils.dtypes_of((seq,), {}))
    return seq if widen is None else utils.casted_args(widen, seq, {})


def promote_match_arg0(mod, fn, handle, verbose=False):
    """Patches an in-place method, where torch has it, so that its arguments take the dtype of its tensor."""
    if not utils.has_func(mod, fn):
        return
    orig_fn = utils.get_func(mod, fn)

    @functools.wraps(orig_fn)
    def wrapper(arg0, *args, **kwargs):
        if handle.is_active() and arg0.is_floating_point() and utils.on_cast_device(arg0):
            args = utils.casted_args(lambda x: utils._cast(x, arg0.dtype, fn, verbose), args, kwargs)
        return orig_fn(arg0, *args, **kwargs)

    utils.set_func_save(handle, mod, fn, wrapper)


# ---- refusals --------------------------------------------------------------------------------------------


def err_if_any_half(mod, fn, handle, custom_err_msg=None):
    """Patches mod.fn, where torch has it, so that it refuses half precision."""
    if not utils.has_func(mod, fn):
        return
    orig_fn = utils.get_func(mod, fn)
    message = custom_err_msg or (
        f"{fn} cannot work in place on float16 or bfloat16: amp runs {fn.rstrip('_')} in float32. Call "
        f"{fn.rstrip('_')} instead, or enter amp.disable_casts()"
    )

    @functools.wraps(orig_fn)
    def wrapper(*args, **kwargs):
        if handle.is_active() and utils.dtypes_of(args, kwargs) & _HALVES:
            raise NotImplementedError(message)
        return orig_fn(*args, **kwargs)

    utils.set_func_save(handle, mod, fn, wrapper)


def err_if_arg0_half(mod, fn, handle, verbose=False):
    """Patches an in-place method, where torch has it: refuses half tensors, casts arguments to float32."""
    if not utils.has_func(mod, fn):
        return
    orig_fn = utils.get_func(mod, fn)

    @functools.wraps(orig_fn)
    def wrapper(arg0, *args, **kwargs):
        if handle.is_active() and utils.on_cast_device(arg0):
            if arg0.dtype in _HALVES:
                raise NotImplementedError(
                    f"Tensor.{fn} cannot work in place on {arg0.dtype}: amp runs it in float32. "
                    f"Call {fn.rstrip('_')} instead, or enter amp.disable_casts()"
                )
            if arg0.dtype == torch.float32:
                args = utils.casted_args(utils.verbosify(utils.maybe_float, fn, verbose), args, kwargs)
        return orig_fn(arg0, *args, **kwargs)

    utils.set_func_save(handle, mod, fn, wrapper)


# ---- recurrent networks ----------------------------------------------------------------------------------


def new_rnn_cast(fn, cast_fn, handle, verbose=False):
    """Patches a whole recurrent network ("LSTM", "GRU", "RNN_TANH", "RNN_RELU") that torch.nn calls.

    The call is (input, [batch sizes,] hidden, weights, bias?, ...): the one list of tensors is the weights.
    """
    mod, fn = torch.nn.modules.rnn._VF, fn.lower()
    assert isinstance(mod, VariableFunctionsShim)
    if not _present(mod, fn):
        return
    orig_fn = utils.get_func(mod, fn)
    dtype = torch.bfloat16 if cast_fn is utils.maybe_bfloat16 else torch.float16
    cast_fn = utils.verbosify(cast_fn, fn, verbose)

    @functools.wraps(orig_fn)
    def wrapper(*args, **kwargs):
        if not handle.is_active() or utils.all_double(args, kwargs):
            return orig_fn(*args, **kwargs)
        args = [
            _cast_weights(x, cast_fn, dtype, handle, fn, verbose)
            if isinstance(x, list) and x and utils.is_fp_tensor(x)
            else cast_fn(x)
            if utils.is_fp_tensor(x)
            else x
            for x in args
        ]
        return orig_fn(*args, **kwargs)

    utils.set_func_save(handle, mod, fn, wrapper)


def rnn_cast(backend, fn, handle, verbose=False):
    """Patched the factories of recurrent functions that torch had before 1.0. Raises NotImplementedError."""
    raise NotImplementedError(
        f"torch has no factories of recurrent functions since 1.0, so {fn} of {backend} cannot be cast: "
        "apex.amp.wrap.new_rnn_cast(fn, cast_fn, handle) casts those of today"
    )


def _cast_weights(weights, cast_fn, dtype, handle, fn, verbose):
    if not _in_one_piece(weights):
        if handle.has_cache and utils.should_cache(weights) and not torch.compiler.is_compiling():
            return utils.cached_cast(cast_fn, weights, handle.cache)
        return cast_fn(weights)
    total = sum(w.numel() for w in weights)
    flat = torch.empty(total, dtype=dtype, device=weights[0].device)
    return utils.new_synthesize_flattened_rnn_weights(weights, flat, fn, dtype, verbose)


def _in_one_piece(weights):
    """Whether an accelerator's weights fill one piece of memory, as flatten_parameters() lays them out."""
    first = weights[0]
    if not (first.is_cuda and all(w.dtype == torch.float32 for w in weights)):
        return False
    base = first.data_ptr()
    ends = [(w.data_ptr() - base) // 4 + w.numel() for w in weights]
    return min(ends) > 0 and max(ends) == sum(w.numel() for w in weights)


def disable_casts(mod, fn, handle):
    """Patches mod.fn, where torch has it, so that nothing is cast while it runs."""
    if not utils.has_func(mod, fn):
        return
    orig_fn = utils.get_func(mod, fn)

    @functools.wraps(orig_fn)
    def wrapper(*args, **kwargs):
        with handle._disable_casts():
            return orig_fn(*args, **kwargs)

    utils.set_func_save(handle, mod, fn, wrapper)
