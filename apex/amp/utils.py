"""Casts of arguments, the cache of cast weights, and access to the functions that are patched."""

import functools

import torch

from apex.amp import _pickling, _scripting
from apex.amp._amp_state import _amp_state


def is_cuda_enabled():
    return torch.version.cuda is not None


def get_cuda_version():
    return tuple(int(part) for part in torch.version.cuda.split("."))


# ---- what an argument is ---------------------------------------------------------------------------------


def is_nested(x):
    return isinstance(x, (tuple, list))


def is_fp_tensor(x):
    """Whether x is a floating-point tensor, or a tuple or list of nothing else."""
    if isinstance(x, torch.Tensor):
        return x.is_floating_point()
    return is_nested(x) and all(is_fp_tensor(y) for y in x)


def on_cast_device(x):
    devices = _amp_state.cast_devices
    return devices is None or x.device.type in devices


def dtypes_of(args, kwargs):
    """Set of the dtypes of a call's floating-point tensors that are on the models' kinds of device."""
    found = set()
    _note_dtypes(args, found)
    if kwargs:
        _note_dtypes(kwargs.values(), found)
    return found


def _note_dtypes(values, found):
    for x in values:
        if isinstance(x, torch.Tensor):
            dtype = x.dtype
            if dtype not in found and dtype.is_floating_point and on_cast_device(x):
                found.add(dtype)
        elif is_nested(x):
            _note_dtypes(x, found)


def one_dtype(args, kwargs):
    """Whether a call plainly holds tensors of one dtype: a quick look, for what is called all the time."""
    first = None
    for x in args:
        if isinstance(x, torch.Tensor):
            if first is None:
                first = x.dtype
            elif x.dtype is not first:
                return False
        elif is_nested(x):
            return False
    return not kwargs


def all_double(args, kwargs):
    """Whether a call's floating-point tensors are float64."""
    for x in args:
        if isinstance(x, torch.Tensor) and x.dtype.is_floating_point and x.dtype is not torch.float64:
            return False
    return dtypes_of(args, kwargs) == {torch.float64}


def collect_fp_tensor_types(args, kwargs):
    """As dtypes_of, in the words of `type_string`."""
    return {type_string(torch.empty(0, dtype=dtype, device="cpu")) for dtype in dtypes_of(args, kwargs)}


def type_string(x):
    """ "HalfTensor", "FloatTensor", ... without the device."""
    return x.type().split(".")[-1]


def should_cache(x):
    """Whether a cast of x is worth keeping: float32 parameters are cast once a training iteration."""
    if type(x) is torch.nn.Parameter:
        return x.dtype is torch.float32
    return is_nested(x) and all(should_cache(y) for y in x)


# ---- casts -----------------------------------------------------------------------------------------------


def _cast(x, dtype, name, verbose):
    if is_nested(x):
        return _rebuild(x, (_cast(y, dtype, name, verbose) for y in x))
    if x.dtype == dtype or not on_cast_device(x):
        return x
    if verbose:
        print(f"{x.dtype} -> {dtype} ({name})".replace("torch.", ""))
    return x.to(dtype)


def _rebuild(x, values):
    return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)


def maybe_half(x, name="", verbose=False):
    """x (a tensor, or tuples and lists of them) in float16, where amp casts."""
    return _cast(x, torch.float16, name, verbose)


def maybe_bfloat16(x, name="", verbose=False):
    """x in bfloat16, where amp casts."""
    return _cast(x, torch.bfloat16, name, verbose)


def maybe_float(x, name="", verbose=False):
    """x in float32, where amp casts."""
    return _cast(x, torch.float32, name, verbose)


def maybe_double(x, name="", verbose=False):
    """x in float64, where amp casts."""
    return _cast(x, torch.float64, name, verbose)


def casted_args(cast_fn, args, kwargs):
    """The list of positional arguments with floating-point tensors cast; `kwargs` is changed in place."""
    for k, value in kwargs.items():
        if is_fp_tensor(value):
            kwargs[k] = cast_fn(value)
    return [cast_fn(x) if is_fp_tensor(x) else x for x in args]


def cached_cast(cast_fn, x, cache):
    """cast_fn(x), kept in `cache` until the parameter changes or the cache is cleared.

    Only casts that autograd follows are kept: without gradients a weight may be written through .data between
    two calls (averaged weights that are swapped in, say), which nothing could notice.
    """
    if is_nested(x):
        return _rebuild(x, (cached_cast(cast_fn, y, cache) for y in x))
    if not torch.is_grad_enabled():
        return cast_fn(x)
    key = (id(x), getattr(cast_fn, "func", cast_fn))
    entry = cache.get(key)
    if entry is not None:
        owner, version, address, cast = entry
        same = owner is x and version == x._version and address == x.data_ptr()
        if same and cast.requires_grad == x.requires_grad:
            return cast
    cast = cast_fn(x)
    cache[key] = (x, x._version, x.data_ptr(), cast)
    return cast


def verbosify(cast_fn, fn_name, verbose):
    return functools.partial(cast_fn, name=fn_name, verbose=verbose) if verbose else cast_fn


# ---- functions that are patched --------------------------------------------------------------------------


def as_inplace(fns):
    """The names of the in-place forms."""
    for name in fns:
        yield name + "_"


def has_func(mod, fn):
    return fn in mod.function_classes if hasattr(mod, "function_classes") else hasattr(mod, fn)


def get_func(mod, fn):
    return mod.function_classes[fn] if hasattr(mod, "function_classes") else getattr(mod, fn)


def set_func(mod, fn, new_fn):
    if hasattr(mod, "function_classes"):
        mod.function_classes[fn] = new_fn
    else:
        setattr(mod, fn, new_fn)


def set_func_save(handle, mod, fn, new_fn):
    """Puts new_fn in place; `handle` remembers what was there."""
    if mod is torch.Tensor:
        new_fn = _as_method(fn, new_fn)
    own = not isinstance(mod, type) or fn in vars(mod)
    handle._save_func(mod, fn, get_func(mod, fn) if own else None)
    _pickling.remember(mod, fn, get_func(mod, fn), new_fn)
    _scripting.remember(get_func(mod, fn), new_fn)
    set_func(mod, fn, new_fn)


def _as_method(name, function):
    """A patched method of tensors, which torch.compile puts into the graph by its name, as it does any method.

    Under a default device, a mode around every function, it would look inside, and find torch's own method, which it
    can call by that name alone.
    """

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return getattr(self, name)(*args, **kwargs)
        return function(self, *args, **kwargs)

    return method


# ---- weights of recurrent networks -----------------------------------------------------------------------


def new_synthesize_flattened_rnn_weights(
    fp32_weights, fp16_flat_tensor, rnn_fn="", dtype=torch.float16, verbose=False
):
    """Casts of `fp32_weights` that lie in `fp16_flat_tensor` (1-D, `dtype`) as the originals lie in memory.

    cuDNN and MIOpen want the weights of a recurrent network in one piece. Autograd follows the copies.
    """
    base = fp32_weights[0].data_ptr()
    storage = fp16_flat_tensor.untyped_storage()
    cast_weights = []
    for weight in fp32_weights:
        offset = (weight.data_ptr() - base) // weight.element_size()
        cast = torch.empty(0, dtype=dtype, device=weight.device)
        cast.set_(storage, offset, weight.shape, weight.stride())
        cast.copy_(weight)
        if verbose:
            print(f"float32 -> {dtype} ({rnn_fn})".replace("torch.", ""))
        cast_weights.append(cast)
    return cast_weights


def synthesize_flattened_rnn_weights(fp32_weights, fp16_flat_tensor, rnn_fn="", verbose=False):
    """The same for weights nested by layer, in float16."""
    flat = [w for layer in fp32_weights for w in layer]
    cast = iter(new_synthesize_flattened_rnn_weights(flat, fp16_flat_tensor, rnn_fn, torch.float16, verbose))
    return [[next(cast) for _ in layer] for layer in fp32_weights]
