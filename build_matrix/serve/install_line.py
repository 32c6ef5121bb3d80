"""The lines that install apex from an index, and the torch that must be there before it; one spelling for README,
`which`, `compat`, the index server and the quickstart. Standard library alone."""

from __future__ import annotations

from build_matrix.spec import identity, matrix

INDEX = "<index>"  # where it is served, in lines for people
TORCH = "https://download.pytorch.org/whl"


def address(index: str) -> str:
    """Where an index is served, without its `whl`: an address is often copied with it."""
    return index.rstrip("/").removesuffix("/whl").rstrip("/")


def pin(accelerator: str) -> str:
    """apex-cuda==1.10.0+cu130"""
    known = matrix.load().accelerator(accelerator)
    return f"{known.distribution}=={identity.version()}+{known.label}"


def root(accelerator: str, index: str = INDEX) -> str:
    """The address of the root that lists an accelerator's wheels."""
    return f"{address(index)}/whl/{matrix.load().accelerator(accelerator).roots[0]}/"


def line(accelerator: str, index: str = INDEX) -> str:
    """pip's line. torch must be there before it: `--index-url` shows pip nothing but apex."""
    return f"pip install {pin(accelerator)} --index-url {root(accelerator, index)}"


def torch(accelerator: str) -> str:
    """The line that brings a torch for an accelerator, from PyPI or PyTorch's own index."""
    if accelerator == "cuda":  # what PyPI has is built for CUDA
        return "pip install torch"
    return f"pip install torch --index-url {TORCH}/{matrix.load().accelerator(accelerator).label}"
