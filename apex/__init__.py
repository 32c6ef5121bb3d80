"""Fused optimizers, normalization, softmax and amp tools for PyTorch, with kernels for NVIDIA and AMD GPUs.

Importing this package imports neither torch nor a GPU driver and probes nothing; `python -m apex` shows what
would run here. Subpackages are imported when they are first named.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from apex._legacy import absent as _absent

_absent.install()

_SUBPACKAGES = (
    "amp",
    "optimizers",
    "multi_tensor_apply",
    "normalization",
    "parallel",
    "contrib",
    "transformer",
    "transformer_engine",
    "fp16_utils",
    "RNN",
    "fused_dense",
    "mlp",
    "testing",
)
_ELSEWHERE = {
    "check_if_rocm_pytorch": "apex._torch_build",
    "check_cudnn_version_and_warn": "apex._torch_build",
    "IS_ROCM_PYTORCH": "apex._torch_build",
    "RankInfoFormatter": "apex.transformer.log_util",
}


def __getattr__(name):
    if name == "__version__":
        from apex._loader import layout

        return globals().setdefault("__version__", layout.version())
    if name in _SUBPACKAGES:
        try:
            return importlib.import_module(f"apex.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"apex.{name}":
                raise
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    raise _absent.missing("apex", name, sys._getframe(1))


def __dir__():
    import pkgutil

    present = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted({*globals(), "__version__", *_ELSEWHERE, *(present & set(_SUBPACKAGES))})


def require(name: str) -> ModuleType:
    """The compiled extension module of public apex called `name` ("amp_C", "syncbn").

    Raises ModuleNotFoundError, with `name` set and what serves in its place, if this installation lacks it.
    """
    from apex._legacy import require

    return require(name)


def served() -> dict[tuple[str, str], str]:
    """What served each op so far in this process: {("cuda:0", "multi_tensor_adam"): "sm_90", ...}.

    The name is a variant's as in APEX_VARIANT: a pack's arch, "jit", "cpu" or "reference".
    """
    from apex._loader import library

    found = {}
    for (platform, index, unit), choice in library.choices().items():
        device = "cpu" if platform == "cpu" else f"cuda:{index}"  # torch spells both vendors cuda
        if choice.taken is not None:
            found[device, unit] = choice.taken.variant
    return found
