"""Ascend NPUs: which torch_npu goes with a torch, a Python and a CANN, by the table of the release, and which is here.

apex holds no code for them: every op runs by its PyTorch reference on `.npu()` tensors.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from apex._loader import layout, remedies
from apex._loader.machine import Machine, Npu
from apex._loader.release import NpuRow

NAME = "npu"  # of the accelerator, and of the tensors' device
SERVED = "npu: every op by its PyTorch reference, as torch_npu runs it; apex has no code of its own for NPUs"
VERSION = re.compile(r"\d+(\.\w+)*")


# ---- what is here ------------------------------------------------------------------------------------------


def here() -> Npu | None:
    """The Npu of this machine: torch_npu by the installer's records, which imports nothing; None without it."""
    try:
        return Npu(metadata.version("torch-npu"), cann(os.environ.get("ASCEND_HOME_PATH", "")))
    except metadata.PackageNotFoundError:
        return None


def cann(home: str) -> str:
    """The version of the CANN in a folder, as its own files name it; ASCEND_HOME_PATH is what its set_env.sh sets. ""
    where none says."""
    # glob.glob passes over what this user may not read, which Path.glob raises for.
    for name in sorted(glob.glob("*-linux/ascend_*_install.info", root_dir=home)) if home else ():
        try:
            text = layout.read_bytes(Path(home, name)).decode("utf-8", "replace")
        except OSError:
            continue
        if found := re.search(r"^version=(\S+)", text, re.MULTILINE):
            return found[1]
    return ""


# ---- what goes together ------------------------------------------------------------------------------------


def same_cann(one: str, other: str) -> bool:
    """Whether two versions may mean one CANN: 8.5 and 8.5.0, 9.1.2 and 9.1.X."""
    pairs = zip(one.upper().split("."), other.upper().split("."), strict=False)
    return all(a == b or "X" in (a, b) for a, b in pairs)


def fitting(rows: Iterable[NpuRow], torch: str = "", python: str = "", cann: str = "") -> list[NpuRow]:
    """The rows of a torch ("2.9.0+cpu"), a Python tag and a CANN, each where it is named."""
    release = torch.partition("+")[0]
    return [
        row
        for row in rows
        if release in ("", row.torch)
        and (not python or python in row.python)
        and (not cann or same_cann(row.cann, cann))
    ]


def words(rows: Sequence[NpuRow]) -> str:
    """ "torch_npu 2.9.0 for CANN 8.5.0, 2.9.0.post2 for CANN 9.0.0" """
    return "torch_npu " + ", ".join(f"{row.torch_npu} for CANN {row.cann}" for row in rows)


def reasons(machine: Machine, rows: Sequence[NpuRow]) -> list[str]:
    """What serves the NPUs of a machine, and which torch_npu its torch takes."""
    torch, asked = (machine.torch.version if machine.torch else ""), machine.npu or Npu()
    fits = fitting(rows, torch, machine.python, asked.cann)
    said = [SERVED]
    if torch and fits:
        said.append(f"torch {torch}: {words(fits)}")
    if asked.torch_npu and asked.torch_npu not in [row.torch_npu for row in fits]:
        of = f" and CANN {asked.cann}" if asked.cann else ""
        said.append(f"torch_npu {asked.torch_npu} is here: no table says that it goes with torch {torch}{of}")
    return said


def fault(machine: Machine, rows: Sequence[NpuRow]) -> tuple[str, str] | None:
    """(why, the command) where no torch_npu is for the torch, Python and CANN that are asked about; None of a machine
    that has a torch_npu, where the reference serves whatever runs."""
    torch, asked = (machine.torch.version if machine.torch else ""), machine.npu or Npu()
    if asked.torch_npu or fitting(rows, torch, machine.python, asked.cann):
        return None
    of_torch = fitting(rows, torch)
    if not of_torch:
        why = f"no torch_npu is known for torch {torch}: there are some for {_torches(rows)}"
    elif asked.cann and not fitting(rows, torch, cann=asked.cann):
        why = f"no torch_npu for torch {torch} is known for CANN {asked.cann}: {words(of_torch)}"
    else:
        of = f" and CANN {asked.cann}" if asked.cann else ""
        tags = ", ".join(_pythons(fitting(rows, torch, cann=asked.cann)))
        why = (
            f"no torch_npu for torch {torch}{of} has a wheel for {machine.python}; there are some for {tags}"
        )
    return why, mend(machine, rows)


def mend(machine: Machine, rows: Sequence[NpuRow]) -> str:
    """What brings a torch to an NPU, and its torch_npu; or which Python or CANN must come first. Of a torch_npu that is
    here, the torch of its own release, whatever the table knows of it."""
    asked = machine.npu or Npu()
    if found := re.match(r"\d+\.\d+\.\d+", asked.torch_npu):
        return _torch(found[0])
    near = nearest(machine, rows)
    if not near:
        return remedies.torch("cpu")
    if machine.python not in near[0].python:
        return f"use one of Python {', '.join(f'{tag[2]}.{tag[3:]}' for tag in _pythons(near))}"
    if asked.cann and not same_cann(asked.cann, near[0].cann):
        return f"install CANN {near[0].cann}, then: {install(near[0])}"
    return install(near[0])


def nearest(machine: Machine, rows: Sequence[NpuRow]) -> list[NpuRow]:
    """Rows near a machine that none is for, the nearest first: of its CANN and its Python, the newest torch. pip brings
    another torch, so that goes first; a CANN is the machine's, and stays where the table has it at all."""
    cann, python = (machine.npu.cann if machine.npu else ""), machine.python
    torch = machine.torch.version if machine.torch else ""
    of_cann = [{"cann": cann, "torch": torch}, {"cann": cann}] if cann else []
    for wanted in (
        {"cann": cann, "python": python},
        *of_cann,
        {"torch": torch, "python": python},
        {"python": python},
        {"torch": torch},
    ):
        if found := fitting(rows, **wanted):
            return sorted(found, key=lambda row: _age(row.torch), reverse=True)
    return list(rows)[::-1]


def install(row: NpuRow) -> str:
    """The line that brings a torch_npu with its torch. Its wheels for x86_64 want a torch labelled +cpu, so that comes
    from PyTorch's own index."""
    return f"{_torch(row.torch)} && {remedies.PIP} install torch-npu=={row.torch_npu} pyyaml setuptools"


def _torch(release: str) -> str:
    return f"{remedies.PIP} install torch=={release} --index-url {remedies.TORCH}/cpu"


def _pythons(rows: Iterable[NpuRow]) -> list[str]:
    return sorted({tag for row in rows for tag in row.python}, key=_age)


def _torches(rows: Iterable[NpuRow]) -> str:
    return "torch " + ", ".join(sorted({row.torch for row in rows}, key=_age))


def _age(text: str) -> tuple[int, ...]:
    """Of a version or a Python tag."""
    return tuple(int(number) for number in re.findall(r"\d+", text))
