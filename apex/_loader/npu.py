"""Ascend NPUs: which torch_npu goes with a torch, a Python and a CANN, by the table of the release, and which is here.

apex holds no code for them: every op runs by its PyTorch reference on `.npu()` tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from apex._loader import remedies
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
    for file in sorted(Path(home).glob("*-linux/ascend_*_install.info")) if home else ():
        try:
            found = re.search(
                r"^version=(\S+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
            )
        except OSError:
            continue
        if found:
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
        tags = sorted({tag for row in of_torch for tag in row.python}, key=_age)
        why = f"no torch_npu for torch {torch} has a wheel for {machine.python}; there are some for {', '.join(tags)}"
    near = nearest(machine, rows)
    return why, install(near[0]) if near else f"use one of {_torches(rows)}"


def nearest(machine: Machine, rows: Sequence[NpuRow]) -> list[NpuRow]:
    """Rows near a machine that none is for, the nearest first: of its CANN and its Python, the newest torch."""
    cann = machine.npu.cann if machine.npu else ""
    torch = machine.torch.version if machine.torch else ""
    for wanted in (
        {"cann": cann, "python": machine.python},
        {"torch": torch},
        {"python": machine.python},
        {},
    ):
        if any(wanted.values()) and (found := fitting(rows, **wanted)):
            return sorted(found, key=lambda row: _age(row.torch), reverse=True)
    return list(rows)[::-1]


def install(row: NpuRow) -> str:
    """The line that brings a torch_npu with its torch. Its wheels for x86_64 want a torch labelled +cpu, so that comes
    from PyTorch's own index."""
    torch = f"{remedies.PIP} install torch=={row.torch} --index-url {remedies.TORCH}/cpu"
    return f"{torch} && {remedies.PIP} install torch-npu=={row.torch_npu} pyyaml setuptools"


def _torches(rows: Iterable[NpuRow]) -> str:
    return "torch " + ", ".join(sorted({row.torch for row in rows}, key=_age))


def _age(text: str) -> tuple[int, ...]:
    """Of a version or a Python tag."""
    return tuple(int(number) for number in re.findall(r"\d+", text))
