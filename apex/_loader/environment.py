"""What this process runs in: its Python, its torch, its platform, and the switches of apex that are set."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping

from apex._loader import system
from apex._loader.errors import InstallationError
from apex._loader.machine import Device, Torch

BINDING = "APEX_BINDING"
BINDINGS = ("exact", "portable", "reference")  # what it may say
OFF = ("", "0", "false", "no", "off")
SWITCHES = (
    "APEX_VARIANT",
    BINDING,
    "APEX_STRICT",
    "APEX_JIT",
    "APEX_BLAS",
    "APEX_CACHE_DIR",
    "APEX_TREE",
    "HSA_OVERRIDE_GFX_VERSION",
)


def python_tag() -> str:
    """ "cp311" for CPython 3.11; a free-threaded build adds its "t"."""
    free_threaded = "t" if "t" in getattr(sys, "abiflags", "") else ""
    return f"cp{sys.version_info.major}{sys.version_info.minor}{free_threaded}"


def running_torch() -> Torch:
    """The Torch of this process; imports torch."""
    import torch

    return Torch(
        version=str(torch.__version__),
        git_version=getattr(torch.version, "git_version", None),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cxx11_abi=bool(torch.compiled_with_cxx11_abi()),
    )


def cpu_device(level: int) -> Device:
    """This machine's processor, or an x86-64 one of that level, as a device."""
    processor = system.processor()
    return Device("cpu", 0, f"x86-64-v{level}" if processor == "x86_64" else processor)


def switches(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The switches of apex that are set, and variables that look like one: APEX_VARIENT. An empty one is not set."""
    near = {name for name in environment if name.startswith("APEX_") and _misspelt(name)}
    return {name: environment[name] for name in (*SWITCHES, *sorted(near)) if environment.get(name)}


def _misspelt(name: str) -> bool:
    return name not in SWITCHES and bool(difflib.get_close_matches(name, SWITCHES, 1, cutoff=0.85))


def is_on(environment: Mapping[str, str], name: str, default: str = "0") -> bool:
    """Whether a switch of yes or no is on; an empty one is not set."""
    return (environment.get(name) or default).lower() not in OFF


def forced_binding(environment: Mapping[str, str] = os.environ) -> str | None:
    """What APEX_BINDING asks for; None if nothing. Raises InstallationError for a word that is none."""
    word = environment.get(BINDING, "").lower() or None
    if word not in (None, *BINDINGS):
        raise InstallationError(
            f"{BINDING}={word} names no binding", available=BINDINGS, remedy=system.unset(BINDING)
        )
    return word
