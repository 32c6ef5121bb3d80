"""The hot parts in C (csrc/portable/fast.cpp), where this torch has DLPack's C exchange interface: 2.10 and later.

`module` is None where it cannot serve; everything is done by ctypes then, slower and with the same results. abi3 does
not cover a free-threaded Python.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import sysconfig

import torch

from apex._loader import layout, library

NAME = "apex_portable"
FILE = f"{NAME}.abi3.so"
DISABLED = "APEX_PORTABLE_MODULE"  # 0: without it


def why_not():
    """Why the module cannot serve, or None."""
    if os.environ.get(DISABLED) == "0":
        return f"{DISABLED}=0"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "a free-threaded Python has another C interface"
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return f"torch {torch.__version__} has no C exchange interface of DLPack: 2.10 is the first that has"
    if not (layout.libraries() / FILE).is_file():
        return f"{FILE} is not installed"
    return None


def _open():
    if why_not():
        return None
    digest = library.load().c.apex_interface_digest
    digest.restype, digest.argtypes = ctypes.c_char_p, []
    spec = importlib.util.spec_from_file_location(NAME, layout.libraries() / FILE)
    try:
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        types = torch.Tensor, torch.nn.Parameter
        known = made.set_api(torch.Tensor.__dlpack_c_exchange_api__, *types, torch.Tensor.is_neg)
    except (ImportError, OSError, ValueError):
        return None
    if not known or made.interface_digest != digest().decode():
        return None
    sys.modules.setdefault(NAME, made)
    return made


module = _open()
