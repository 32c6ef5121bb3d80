"""What differs between operating systems: how they call a machine and the files of libraries, and what they lack.

Functions that take `platform` (as `sys.platform` says it: "linux", "win32") are pure.
"""

from __future__ import annotations

import os
import platform as machines
import re
import sys
from collections.abc import Callable
from typing import Any

WINDOWS = "win32"
OWNERLESS = "this system does not tell whose a file is"  # so that nothing is kept that would be run


def on_windows(platform: str = sys.platform) -> bool:
    """Whether that platform is Windows."""
    return platform == WINDOWS


def name(platform: str = sys.platform, machine: str = "") -> str:
    """ "linux_x86_64", "win_amd64": a machine as wheels say it. `machine`: platform.machine(); default: this one's."""
    machine = machine or machines.machine()
    return f"win_{machine.lower()}" if on_windows(platform) else f"{platform}_{machine}"


def processor(machine: str = "") -> str:
    """ "x86_64", "aarch64": one name where systems have several."""
    machine = machine or machines.machine()
    return {"AMD64": "x86_64", "ARM64": "aarch64", "arm64": "aarch64"}.get(machine, machine)


def host_library(platform: str = sys.platform) -> str:
    """The file name of the host library."""
    return "apex.dll" if on_windows(platform) else "libapex.so"


def cuda_driver(platform: str = sys.platform) -> str:
    """The library that NVIDIA's driver installs."""
    return "nvcuda.dll" if on_windows(platform) else "libcuda.so.1"


def torch_library(name: str, platform: str = sys.platform) -> str:
    """The file name of one of torch's own libraries ("torch_cpu", "c10")."""
    return f"{name}.dll" if on_windows(platform) else f"lib{name}.so"


def has_stem(file: str, stem: str, platform: str = sys.platform) -> bool:
    """Whether a file name is that of a library, in any of its versions. Stems are Linux's names: "libamdhip64.so" is
    that of amdhip64_7.dll, "libnvrtc.so" that of nvrtc64_130_0.dll. csrc/host/windows/os.cpp says the same."""
    if not on_windows(platform):
        return file == stem or file.startswith(f"{stem}.")
    base = re.escape(stem.removeprefix("lib").removesuffix(".so"))
    return re.fullmatch(rf"{base}(64)?(_[0-9_]*)?\.dll", file, re.IGNORECASE) is not None


def pattern(stem: str, platform: str = sys.platform) -> str:
    """The pattern of Path.glob for a library's versions: "libnvrtc-builtins.so.*", "nvrtc-builtins*.dll"."""
    return f"{stem.removeprefix('lib').removesuffix('.so')}*.dll" if on_windows(platform) else f"{stem}.*"


def flags_to_read(of: Any = os) -> int:
    """Of os.open, for a file that is read as it is: a FIFO is not waited for, and Windows changes no line's end."""
    return of.O_RDONLY | sum(getattr(of, flag, 0) for flag in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


def in_forked_child(function: Callable[[], Any], of: Any = os) -> None:
    """Has a function called in every child that this process forks; nothing where no process forks."""
    if hasattr(of, "register_at_fork"):
        of.register_at_fork(after_in_child=function)


def unset(*names: str, platform: str = sys.platform) -> str:
    """What takes variables out of the environment: the shell's command, for Windows, which has two shells, in words."""
    return (
        f"remove from the environment: {', '.join(names)}"
        if on_windows(platform)
        else f"unset {' '.join(names)}"
    )


def without_other_copies(platform: str = sys.platform) -> str:
    """What keeps the system's loader from finding a second copy of a library."""
    if on_windows(platform):
        return "remove the folder of the copy that is not torch's from PATH"
    return unset("LD_LIBRARY_PATH", "LD_PRELOAD", platform=platform)
