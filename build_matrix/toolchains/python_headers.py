"""CPython's headers for a platform that no interpreter of this machine is of.

They are the same on every Linux but for pyconfig.h, which CPython's configure writes. The interpreter's own is taken;
of its macros that public headers read, sizes and alignments of C types, byte order and the few of `PROCESSOR` depend
on the processor. Those few are set as the cross compiler says, the sizes are compared by it, and nothing is built
where one differs. With Debian's pyconfig.h for arm64, of Python 3.11 and 3.13, the result agrees in all of these.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from build_matrix.errors import GateError
from build_matrix.toolchains import host_compiler
from build_matrix.toolchains.host_compiler import HostCompiler
from build_matrix.toolchains.pythons import Python

PROCESSOR = ("HAVE_GCC_ASM_FOR_X64", "HAVE_GCC_ASM_FOR_X87", "HAVE_USABLE_WCHAR_T")
SIZE = re.compile(r"(SIZEOF|ALIGNOF)_(\w+)")
INCLUDES = "#include <cstddef>\n#include <cstdint>\n#include <cstdio>\n#include <pthread.h>\n#include <sys/types.h>\n"
# What configure measures, by the end of its macro's name; others are named as their type is.
TYPES = {
    "LONG_LONG": "long long", "LONG_DOUBLE": "long double", "VOID_P": "void*", "_BOOL": "bool",
    "FPOS_T": "fpos_t", "MAX_ALIGN_T": "std::max_align_t", "DOUBLE": "double", "FLOAT": "float", "INT": "int",
    "LONG": "long", "SHORT": "short", "OFF_T": "off_t", "PID_T": "pid_t", "SIZE_T": "size_t",
    "TIME_T": "time_t", "UINTPTR_T": "uintptr_t", "WCHAR_T": "wchar_t", "PTHREAD_T": "pthread_t",
    "PTHREAD_KEY_T": "pthread_key_t",
}  # fmt: skip


def macros(compiler: HostCompiler, *included: Path) -> dict[str, str]:
    """Every macro that is defined after `included`; Debian's pyconfig.h includes that of the architecture."""
    text = "".join(f'#include "{path}"\n' for path in included)
    done = compiler.read(text, "-dM", "-E", "-x", "c++", "-")
    done.check_returncode()
    return {name: value for _, name, value in (f"{line} ".split(" ", 2) for line in done.stdout.splitlines())}


def configuration(python: Python, compiler: HostCompiler) -> dict[str, str]:
    """pyconfig.h for the platform that `compiler` compiles for."""
    own = host_compiler.find()
    there = macros(own, python.include / "pyconfig.h")
    found = {name: value.strip() for name, value in there.items() - macros(own).items()}
    found = {name: value for name, value in found.items() if name not in PROCESSOR}
    if "__WCHAR_UNSIGNED__" in macros(compiler):  # what configure calls usable
        found["HAVE_USABLE_WCHAR_T"] = "1"
    return dict(sorted(found.items()))


def _assertions(configured: dict[str, str]) -> str:
    lines = [INCLUDES]
    for name, value in configured.items():
        if (match := SIZE.fullmatch(name)) and match[2] in TYPES:
            measure = "sizeof" if match[1] == "SIZEOF" else "alignof"
            lines.append(f'static_assert({measure}({TYPES[match[2]]}) == {value}, "{name}");\n')
    order = "BIG" if "WORDS_BIGENDIAN" in configured else "LITTLE"
    return "".join(lines) + f'static_assert(__BYTE_ORDER__ == __ORDER_{order}_ENDIAN__, "byte order");\n'


def check(python: Python, configured: dict[str, str], compiler: HostCompiler) -> None:
    """Raises GateError naming every macro that the target's compiler contradicts, or cannot be asked about."""
    unknown = [n for n in configured if (match := SIZE.fullmatch(n)) and match[2] not in TYPES]
    done = compiler.read(_assertions(configured), "-std=c++17", "-fsyntax-only", "-x", "c++", "-")
    faults = re.findall(r"static assertion failed: (.*)", done.stderr) or done.stderr.splitlines()[:3]
    if unknown or done.returncode:
        raise GateError(
            f"pyconfig.h of {python.tag} for {compiler.path}", [f"{n} differs" for n in faults + unknown]
        )


def lay(python: Python, compiler: HostCompiler, folder: Path) -> None:
    """Writes the headers into `folder`. Raises GateError where they cannot be those of the target."""
    configured = configuration(python, compiler)
    check(python, configured, compiler)
    shutil.copytree(python.include, folder, ignore=shutil.ignore_patterns("pyconfig.h"))
    text = "".join(f"#define {name} {value}".rstrip() + "\n" for name, value in configured.items())
    (folder / "pyconfig.h").write_text(f"#ifndef Py_PYCONFIG_H\n#define Py_PYCONFIG_H\n{text}#endif\n")
