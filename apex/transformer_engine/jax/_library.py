"""libapex for JAX: its handlers of XLA's foreign function interface, registered, and which of its ops serve where.

Without the library, or where it has no variant for a platform, the formulas in jax.numpy beside each op serve.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from apex._loader import library, probe
from apex._loader.errors import ApexError, SlowPathWarning
from apex._loader.machine import Device, strip_features

PLATFORMS = {"cpu": "cpu", "cuda": "CUDA", "hip": "ROCM"}  # ours: XLA's
HANDLERS = (
    "layer_norm_forward",
    "layer_norm_backward",
    "rms_norm_forward",
    "rms_norm_backward",
    "scaled_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "xentropy_forward",
    "xentropy_backward",
)


@functools.cache
def _library() -> library.Library | None:
    """The library with its handlers registered; None, said once, where it cannot be had."""
    try:
        loaded = library.load()
    except ApexError as error:
        warnings.warn(
            f"apex's kernels do not serve JAX here, XLA's own ops do: {error}", SlowPathWarning, stacklevel=2
        )
        return None
    for handler in HANDLERS:
        for ours, theirs in PLATFORMS.items():
            function = getattr(loaded.c, f"apex_xla_{handler}_{ours}")
            jax.ffi.register_ffi_target(f"apex_{handler}", jax.ffi.pycapsule(function), platform=theirs)
    probe.also_devices(_gpus)
    return loaded


def _gpus() -> tuple[Device, ...]:
    """The GPUs that JAX sees, by their places in the driver's list; () without any."""
    found = []
    for device in jax.local_devices():
        if device.platform not in ("gpu", "cuda", "rocm"):
            continue
        arch, features = strip_features(str(getattr(device, "compute_capability", "")))
        platform = "hip" if arch.startswith("gfx") else "cuda"
        name = arch if platform == "hip" else f"sm_{arch.replace('.', '')}"
        found.append(Device(platform, device.local_hardware_id, name, device.device_kind, features))
    return tuple(found)


@functools.cache
def serves(unit: str, platform: str) -> bool:
    """Whether the library runs `unit` ("layer_norm") on the first device of a platform ("cpu", "cuda", "hip")."""
    loaded = _library()
    if loaded is None:
        return False
    places = [d.index for d in probe.here().devices if d.platform == platform] if platform != "cpu" else [0]
    return bool(places) and loaded.resolve(platform, places[0], unit) != library.REFERENCE


def call(
    handler: str, results: Sequence[jax.ShapeDtypeStruct], *arguments: jax.Array, **attributes: Any
) -> Any:
    """One call of the library; under vmap, one for each element of the batch. results: shapes and dtypes of what it
    returns."""
    return jax.ffi.ffi_call(f"apex_{handler}", tuple(results), vmap_method="sequential")(
        *arguments, **attributes
    )


def dispatch(unit: str, kernel: Callable[..., Any], formula: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `kernel` on platforms where the library serves `unit`, and `formula` elsewhere.

    Both take arrays and return a tuple of arrays of the same shapes and dtypes.
    """

    def chosen(*arguments: jax.Array) -> Any:
        served = {theirs.lower(): kernel for ours, theirs in PLATFORMS.items() if serves(unit, ours)}
        return jax.lax.platform_dependent(*arguments, default=formula, **served)

    return chosen


def over_rows(function: Callable[..., Any], rows: Sequence[bool]) -> Callable[..., Any]:
    """`function` under vmap: a batch of arguments that hold rows is more rows; of others (weights), one call each.

    rows: which of the arguments may have any number of leading dimensions.
    """
    batched = jax.custom_batching.custom_vmap(function)

    @batched.def_vmap
    def rule(size: int, in_batched: Sequence[bool], *arguments: jax.Array) -> Any:
        if any(is_batched and not row for is_batched, row in zip(in_batched, rows, strict=True)):
            whole = [
                a if is_batched else jax.numpy.broadcast_to(a, (size, *a.shape))
                for a, is_batched in zip(arguments, in_batched, strict=True)
            ]
            results = jax.lax.map(lambda one: function(*one), tuple(whole))
        else:
            results = batched(
                *(
                    jax.numpy.broadcast_to(a, (size, *a.shape)) if row and not is_batched else a
                    for a, is_batched, row in zip(arguments, in_batched, rows, strict=True)
                )
            )
        return results, jax.tree.map(lambda _: True, results)

    return batched


def differentiable(function: Callable[..., Any], formula: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose derivative is that of `formula`: for gradients of gradients."""
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(
        lambda *arguments: (function(*arguments), arguments),
        lambda arguments, cotangents: jax.vjp(formula, *arguments)[1](cotangents),
    )
    return wrapped


def op(
    unit: str, kernel: Callable[..., Any], formula: Callable[..., Any], rows: Sequence[bool] | None = None
) -> Callable[..., Any]:
    """`kernel` where the library serves `unit`, else `formula`, whose derivative both have. rows: as of `over_rows`;
    None: under vmap each element of the batch is a call."""
    function = dispatch(unit, kernel, formula)
    return differentiable(function if rows is None else over_rows(function, rows), formula)
