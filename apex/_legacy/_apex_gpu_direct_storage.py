"""The class of public apex's _apex_gpu_direct_storage: a tensor's bytes to and from a file, by torch.cuda.gds."""

from __future__ import annotations

import os
import warnings

import torch
from torch.cuda import gds

from apex import _plain

__all__ = ["_GDSFile"]

# mode: (flags of open, whether GPUs read and write by themselves)
_MODES = {
    "r": (os.O_RDONLY, True),
    "w": (os.O_CREAT | os.O_WRONLY, True),
    "rn": (os.O_RDONLY, False),
    "wn": (os.O_CREAT | os.O_WRONLY, False),
}
_AT_ONCE = 1 << 26  # bytes of a tensor that pass through the host's memory together


class _GDSFile:
    """A file that tensors are read from ("r", "rn") or written to ("w", "wn"), from its beginning.

    "r", "w": between storage and GPU by cuFile, where torch has it and the file system allows it; otherwise through
    the host, which is said once. "rn", "wn": through the host. A file that is there is overwritten in its place and
    keeps its length if that is larger, as in public apex. Tensors of a CPU go through the host always.

    Raises ValueError for another mode, OSError where the file cannot be opened, RuntimeError where it is open already.
    """

    def __init__(self, filename=None, mode=None):
        self.filename, self.mode = filename, mode
        self._descriptor, self._direct = None, None
        if filename is not None:
            self.open(filename, mode)

    def __del__(self):
        if getattr(self, "_descriptor", None) is not None:
            self.close()

    def open(self, filename, mode):
        """Opens the file; one that was closed, of the same name and mode, too."""
        if self._descriptor is not None:
            raise RuntimeError(f"{self.filename} is already open: close() comes first")
        if mode not in _MODES:
            raise ValueError(f"{filename}: a mode is one of {', '.join(_MODES)}, not {mode!r}")
        flags, direct = _MODES[mode]
        self._descriptor = os.open(filename, flags | os.O_CLOEXEC, 0o664)
        self.filename, self.mode = filename, mode
        self._direct = _direct_file(filename, flags) if direct else None

    def close(self):
        """Closes it; nothing if it is not open."""
        self._direct = None
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def load_data(self, tensor):
        """Fills the tensor with the file's first bytes. Mode "r".

        Raises RuntimeError for another mode, ValueError for a file that is shorter, or a tensor that is not
        contiguous, TypeError for one whose memory does not hold its values.
        """
        self._check("r", "load_data", tensor)
        self._load(tensor)

    def save_data(self, tensor):
        """Writes the tensor's bytes to the file's beginning. Mode "w". Raises as load_data."""
        self._check("w", "save_data", tensor)
        self._save(tensor)

    def load_data_no_gds(self, tensor):
        """As load_data, through the host. Mode "rn"."""
        self._check("rn", "load_data_no_gds", tensor)
        self._load(tensor)

    def save_data_no_gds(self, tensor):
        """As save_data, through the host. Mode "wn"."""
        self._check("wn", "save_data_no_gds", tensor)
        self._save(tensor)

    def _check(self, mode, function, tensor):
        if self._descriptor is None:
            raise RuntimeError(f"{function}: the file is not open")
        if self.mode != mode:
            raise RuntimeError(f"{function}: {self.filename} was opened in mode {self.mode!r}, not {mode!r}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{function} takes a torch.Tensor, not {type(tensor).__name__}")
        _plain.check(tensor, f"{function}: the tensor")
        if not _plain.is_plain(tensor) or not tensor.is_contiguous():
            raise ValueError(
                f"{function}: the tensor's memory is not its values in order: pass tensor.contiguous()"
            )

    def _load(self, tensor):
        there = os.fstat(self._descriptor).st_size
        if there < tensor.nbytes:
            raise ValueError(f"{self.filename} has {there} bytes, the tensor {tensor.nbytes}")
        if not tensor.nbytes:
            return
        tensor.data_ptr()  # gives a copy-on-write tensor memory of its own
        if self._direct is not None and tensor.is_cuda:
            self._direct.load_storage(_storage(tensor))
            return
        raw = _bytes(tensor)
        for begin in range(0, len(raw), _AT_ONCE):
            part = raw[begin : begin + _AT_ONCE]
            host = torch.empty(len(part), dtype=torch.uint8, device="cpu")
            _whole(os.preadv, self._descriptor, host, begin, self.filename)
            part.copy_(host)

    def _save(self, tensor):
        if not tensor.nbytes:
            return
        if self._direct is not None and tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()  # cuFile knows no stream
            self._direct.save_storage(_storage(tensor))
            return
        raw = _bytes(tensor)
        for begin in range(0, len(raw), _AT_ONCE):
            host = raw[begin : begin + _AT_ONCE].to("cpu")
            _whole(os.pwritev, self._descriptor, host, begin, self.filename)


def _direct_file(filename, flags):
    """torch's file for cuFile, or None, which is said, where there is none."""
    if not torch.cuda.is_available():
        return None
    try:
        return gds.GdsFile(os.fspath(filename), flags)
    except (RuntimeError, OSError) as error:
        warnings.warn(
            f"{filename} goes through the host's memory: GPUDirect Storage is not to be had ({error})",
            stacklevel=3,
        )
        return None


def _storage(tensor):
    """The part of the tensor's storage that is the tensor."""
    begin, end = _plain.range_of(tensor)
    return tensor.untyped_storage()[begin:end]


def _bytes(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8)


def _whole(function, descriptor, host, offset, filename):
    """preadv or pwritev until all of it is done."""
    rest = memoryview(host.numpy())
    while len(rest):
        done = function(descriptor, [rest], offset)
        if done <= 0:
            raise OSError(f"{filename}: no more than {offset} bytes could be read or written")
        rest, offset = rest[done:], offset + done
