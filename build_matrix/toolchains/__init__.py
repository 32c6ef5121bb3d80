"""Device compilers. Each says its version and digest, what it can compile for, and, when it is not here, the
one command that brings it.

A toolchain is named `<compiler>-<series>`: `nvcc-13.0`, `nvrtc-12.3`, `clang-hip-7.2`. Which arch is built by
which toolchain stands in matrix.toml; the exact versions stand in related_commits.
"""

from __future__ import annotations

from build_matrix.toolchains.base import Compiled, Toolchain
from build_matrix.toolchains.find import available, find, of_vendor

__all__ = ["Compiled", "Toolchain", "available", "find", "of_vendor"]
