"""Tensors to and from files, between storage and GPU, with public apex's name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from apex._legacy._apex_gpu_direct_storage import _GDSFile

__all__ = ["GDSFile"]


@contextmanager
def GDSFile(filename: str | os.PathLike, mode: str) -> Iterator[_GDSFile]:
    """A file to read tensors from (mode "r") or to write them to ("w"), closed at the end of the block.

        with GDSFile("weights.bin", "w") as file:
            file.save_data(tensor)
        with GDSFile("weights.bin", "r") as file:
            file.load_data(tensor)

    A GPU's bytes go between it and storage by torch.cuda.gds where torch has cuFile and the file system allows it,
    otherwise through the host's memory, which a warning says. A CPU's, and all of them where torch has no GPU, go
    through the host's memory without one. A tensor lies at the beginning of the file; a shorter one leaves
    the rest of a file that is there. Modes "rn" and "wn" are for load_data_no_gds and save_data_no_gds.

    Raises:
        ValueError: another mode; a file that is shorter than the tensor; a tensor that is not contiguous.
        OSError: the file cannot be opened, read or written.
        RuntimeError: a tensor is read in a mode to write, or the other way round.
        TypeError: the tensor's memory does not hold its values (a wrapper, a sparse tensor), or it is no torch.Tensor.
    """
    file = _GDSFile(os.fspath(filename), mode)
    try:
        yield file
    finally:
        file.close()
