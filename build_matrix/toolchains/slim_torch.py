"""Loads a binding under the torch it was built for, where that torch is not installed.

A *slim torch* is the published wheel without its CUDA libraries: 130 MB by range requests instead of 3 GB
with its requirements. What those libraries would have defined is a stub, so it imports and runs eagerly on
the CPU; nothing distributed or compiled works in it. It tells whether a binding loads, registers its ops and
computes.
"""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from apex._loader.elf import STB_WEAK, Elf
from build_matrix import REPOSITORY
from build_matrix.errors import LoadError, PackageIndexError
from build_matrix.store import Store, WorkUnit, archive, digest
from build_matrix.toolchains import base, borrow, headers, host_compiler, package_index
from build_matrix.toolchains.pythons import Python
from build_matrix.toolchains.range_zip import RangeZip

LIMITS = archive.Limits(50_000, 1 << 30, 4 << 30)  # of a slim torch: it has 700 MB
RECORD = ".dist-info/RECORD"
LEFT_OUT = re.compile(r"torch/(include|bin|share|test)/|.*/libtorch_cuda|.*nvshmem|.*\.a$")
VENDOR = re.compile(r"lib(cu|nv|nccl|torch_nv|cusparse)")
SYSTEM = (
    "libc.so.6",
    "libm.so.6",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
    "libpthread.so.0",
)
VALUES = REPOSITORY / "tests/L0/binding_values.py"
INIT = """
import ctypes as _ct, os as _os
_ct.CDLL(_os.path.join(_os.path.dirname(__file__), "lib", "libtorch_cuda.so"), _ct.RTLD_GLOBAL)
"""
# Modules of torch's extension that need c10d, which the stub cannot stand for.
DROPPED = "('_c10d_init', '_rpc_init', '_dist_autograd_init', '_faulty_agent_init')"
PROGRAM = """
import torch
from apex._loader import bindings
from apex.optimizers import FusedAdam
loaded = bindings.load()
assert loaded.native and loaded.module is not None, loaded
torch.manual_seed(0)
ours = [torch.nn.Parameter(torch.randn(n)) for n in (1, 7, 1024)]
theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
a = FusedAdam(ours, lr=0.1, weight_decay=0.1)
b = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1, foreach=False)
for _ in range(3):
    for p, q in zip(ours, theirs):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    a.step()
    b.step()
worst = max((p - q).abs().max().item() for p, q in zip(ours, theirs))
assert worst < 1e-5, worst
print(torch.__version__, "worst difference", worst)
"""


def wheel_of(version: str, python: Python) -> package_index.IndexFile:
    """The wheel of a release for that very Python. Raises PackageIndexError where there is none."""
    found = headers.wheels_of(version)
    if python.tag not in found:
        raise PackageIndexError(
            f"no index holds torch {version} for {python.tag}; there are {', '.join(sorted(found))}"
        )
    return found[python.tag]


def unit(version: str, python: Python) -> WorkUnit:
    """The slim torch of one release and Python."""
    wheel = wheel_of(version, python)

    def make(folder: Path) -> None:
        remote = RangeZip(wheel.url)
        recorded = _recorded(remote, version)
        for name, contents in remote.read(_wanted, LIMITS):
            if name in recorded and digest.of_bytes(contents) != recorded[name]:
                raise PackageIndexError(f"{wheel.url}: {name} is not what the wheel's RECORD says")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
        if lacking := [name for name in ("torch/__init__.py", "torch/lib") if not (folder / name).exists()]:
            raise PackageIndexError(f"{wheel.url} is no torch: it lacks {' and '.join(lacking)}")
        try:
            _stub(folder / "torch")
            _patch(folder / "torch/__init__.py")
        except (ValueError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            raise PackageIndexError(f"{wheel.url}: no slim torch can be made of it: {error}") from error
        (folder / "torch/bin").mkdir(exist_ok=True)
        (folder / "torch/bin/torch_shm_manager").touch(mode=0o755)

    return WorkUnit("slim", f"torch {version} {python.tag}", {"wheel": wheel.sha256, "format": 1}, make)


def _wanted(name: str) -> bool:
    return not name.endswith("/") and not LEFT_OUT.match(name)


def _recorded(remote: RangeZip, version: str) -> dict[str, str]:
    """The digests of a wheel's own RECORD, once torch's commit is the pinned one. Nobody vouches for them but whoever
    serves the wheel: a slim torch is run, and trusted as an installed one is. Raises PinError, and PackageIndexError
    for a RECORD that is none."""
    first = dict(remote.read(lambda name: name == headers.VERSION or name.endswith(RECORD), LIMITS))
    said = headers.say(first.get(headers.VERSION, b"").decode(errors="replace"))
    headers.check_pin(version, said["git_version"] or "")
    found = {}
    try:
        for name in first.keys() - {headers.VERSION}:
            for path, stated, _ in csv.reader(first[name].decode().splitlines()):
                if stated:
                    found[path] = base64.urlsafe_b64decode(stated.removeprefix("sha256=") + "=").hex()
    except (ValueError, csv.Error) as error:
        raise PackageIndexError(f"{remote.url}: its RECORD cannot be read: {error}") from error
    return found


def _stub(package: Path) -> None:
    """libtorch_cuda.so with everything that nothing here defines, and empty libraries for the vendor's
    sonames."""
    libraries = [*package.glob("lib/*.so*"), *package.glob("_C*.so")]
    elves = [Elf.read(path) for path in libraries]
    symbols = [symbol for elf in elves for symbol in elf.symbols(dynamic=True)]
    defined = {symbol.name for symbol in symbols if symbol.defined}
    for name in SYSTEM:
        for folder in ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64"):
            if (Path(folder) / name).exists():
                defined |= {s.name for s in Elf.read(Path(folder) / name).symbols(dynamic=True) if s.defined}
                break
    wanted = sorted({s.name for s in symbols if s.name and not s.defined and s.bind != STB_WEAK} - defined)
    wanted = [name for name in wanted if not name.startswith(("Py", "_Py", "_gfortran", "_quadmath"))]
    source = package / "lib/stub.s"
    source.write_text(_assembly(wanted))
    command = [
        host_compiler.find().path,
        "-shared",
        "-nostartfiles",
        "-o",
        str(package / "lib/libtorch_cuda.so"),
    ]
    options = ["-Wl,-soname,libtorch_cuda.so", "-Wl,--no-as-needed", "-lstdc++"]
    base.run("the stub of torch's CUDA libraries", [*command, str(source), *options])
    needed = {name for elf in elves for name in elf.dynamic()[1]}
    for name in needed:
        if VENDOR.match(name) and not (package / "lib" / name).exists():
            host_compiler.find().stub(name, package / "lib")


def _assembly(names: list[str]) -> str:
    """C++ functions return the address of zeros, C functions 0; type infos are real ones."""
    lines = [".bss", ".balign 64", "zeros: .skip 65536", ".text"]
    for name in names:
        if not name.startswith("_ZTI"):
            body = "lea zeros(%rip),%rax" if name.startswith("_Z") else "xor %eax,%eax"
            head = f".balign 16\n.globl {name}\n.type {name},@function"
            lines.append(f"{head}\n{name}: {body}\n ret\n .skip 48\n.size {name},.-{name}")
    lines.append('.section .data.rel,"aw"')
    for name in names:
        if name.startswith("_ZTI"):
            head = f".balign 16\n.globl {name}\n.type {name},@object"
            value = "_ZTVN10__cxxabiv117__class_type_infoE+16"
            lines.append(f'{head}\n{name}: .quad {value}, 1f\n.size {name},16\n1: .asciz "{name[4:]}"')
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def _patch(path: Path) -> None:
    """torch/__init__.py that opens the stub first and does not reach for c10d."""
    text = path.read_text(encoding="utf-8")
    drop = f"import torch._C as _slim\n{{0}}[delattr(_slim, n) for n in {DROPPED} if hasattr(_slim, n)]\n"
    text = re.sub(
        r"^( *)from torch\._C import \*.*\n",
        lambda match: match[0] + match[1] + drop.format(match[1]),
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(
        r"^( *)import torch\.distributed\._meta_registrations.*\n", r"\1pass\n", text, flags=re.MULTILINE
    )
    text = re.sub(r"^import torch\._native.*\n", "", text, flags=re.MULTILINE)
    first = text.index("\nimport ")
    path.write_text(text[:first] + INIT + text[first:], encoding="utf-8")


def load(version: str, python: Python, built: Path, store: Store) -> str:
    """Runs PROGRAM with the binding of `built` under a slim torch. Returns its words; raises LoadError."""
    return _run(version, python, built, store, ["-c", PROGRAM])


def portable_values(version: str, python: Python, built: Path, store: Store) -> dict[str, list[str]]:
    """What every op gives by the portable binding under a slim torch: tests/L0/binding_values.py's digests. Raises
    LoadError."""
    printed = _run(version, python, built, store, [str(VALUES)], APEX_BINDING="portable")
    return _values(printed, f"torch {version} for {python.tag}")[1]


def own_values(built: Path) -> dict[str, list[str]]:
    """The same under the torch of the Python that runs this."""
    environment = {"APEX_TREE": str(built), "APEX_BINDING": "portable", "PYTHONPATH": str(REPOSITORY)}
    return _own(environment)[1]


def wheel_values(
    version: str | None, python: Python, installed: Path, store: Store
) -> tuple[str, dict[str, list[str]]]:
    """What an unpacked wheel serves (exact, portable or reference), and what its ops give, under a slim torch, or, if
    `version` is None, under the torch of the Python that runs this. Raises LoadError where nothing loads, and another
    BuildError where the slim torch cannot be made: then nothing is known of the wheel."""
    if version is None:
        return _own({"PYTHONPATH": str(installed)})
    environment = _environment(version, python, installed, store)
    printed = _call([python.program, "-W", "ignore", str(VALUES)], environment, version, python)
    return _values(printed, f"torch {version} for {python.tag}")


def _own(environment: dict[str, str]) -> tuple[str, dict[str, list[str]]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("APEX_")}
    done = subprocess.run(
        [sys.executable, str(VALUES)], env=inherited | environment, encoding="utf-8", capture_output=True
    )
    if done.returncode:
        raise LoadError(f"the binding does not load:\n{done.stderr[-3000:]}")
    return _values(done.stdout, "the torch of this Python")


def _values(printed: str, torch: str) -> tuple[str, dict[str, list[str]]]:
    """(kind of the binding, digests of the calls) of the last line that VALUES printed. A torch may end the process on
    its own, without an error: LoadError names it."""
    try:
        found = json.loads(printed.splitlines()[-1])
        return str(found["kind"]), dict(found["digests"])
    except (LookupError, ValueError, TypeError, RecursionError) as error:
        said = printed[-300:] or "nothing"
        raise LoadError(f"under {torch} it ended without results; it printed: {said}") from error


def _run(version: str, python: Python, built: Path, store: Store, program: list[str], **more: str) -> str:
    environment = _environment(version, python, REPOSITORY, store)
    environment |= {"APEX_TREE": str(built), "APEX_STRICT": "1", **more}
    return _call([python.program, "-W", "ignore", *program], environment, version, python)


def _environment(version: str, python: Python, apex: Path, store: Store) -> dict[str, str]:
    """That in which `import torch` is the slim one and `import apex` that of the folder `apex`."""
    slim = store.build(unit(version, python)).folder
    lent = store.root / "lent" / python.tag
    lent.mkdir(parents=True, exist_ok=True)
    for distribution in borrow.closure(
        ["typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "filelock"]
    ).values():
        for name, path in borrow.top_level(distribution).items():
            if not list(path.glob("**/*.so")):
                borrow.link(lent / name, path)
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(apex), str(slim), str(lent)]),
        "LD_LIBRARY_PATH": str(slim / "torch/lib"),
        "PYTHONDONTWRITEBYTECODE": "1",  # an output of the store that holds more than was made counts as damaged
    }


def _call(command: list[str], environment: dict[str, str], version: str, python: Python) -> str:
    done = subprocess.run(command, env=environment, encoding="utf-8", errors="replace", capture_output=True)
    if done.returncode:
        raise LoadError(
            f"the binding of torch {version} for {python.tag} does not load:\n{done.stderr[-3000:]}"
        )
    return done.stdout.strip()
