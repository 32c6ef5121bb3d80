"""The lines that install apex from an index, and the torch that must be there before it, for pages and the index
server. They are the loader's own (apex/_loader/remedies.py), which `which`, `compat` and the doctor print. Standard
library alone."""

from __future__ import annotations

from apex._loader import npu, release, remedies
from build_matrix.parts import releases

INDEX = release.SOMEWHERE  # stands for where it is served, in lines for people


def version(accelerator: str) -> str:
    """1.10.0+cu130"""
    table = release.parse(releases.table())
    return f"{table.version}+{table.accelerator(accelerator).label}"


def pin(accelerator: str) -> str:
    """apex-cuda==1.10.0+cu130"""
    return f"apex-{accelerator}=={version(accelerator)}"


def line(accelerator: str, index: str = INDEX) -> str:
    """pip's line. torch must be there before it: `--index-url` shows pip nothing but apex."""
    table = release.parse(releases.table())
    known = table.accelerator(accelerator)
    return remedies.install(known.distribution, version(accelerator), table.root(known, index))


def torch(accelerator: str) -> str:
    """The line that brings a torch for an accelerator, from PyPI or PyTorch's own index."""
    if accelerator == "cuda":  # what PyPI has is built for CUDA
        return f"{remedies.PIP} install torch"
    if release.parse(releases.table()).accelerator(accelerator).pure:
        return npu.install(release.parse(releases.table()).npu[-1])
    return remedies.torch(release.parse(releases.table()).accelerator(accelerator).label)
