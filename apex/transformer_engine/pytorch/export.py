"""Exports to ONNX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from apex.transformer_engine.pytorch._state import current


@contextlib.contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Within, layers are made of torch's own products, which torch.onnx.export knows, and multiply without FP8.

    The exported model has the values of the layers outside of fp8_autocast. enabled: False: all is as it was.
    """
    before, current.exporting = current.exporting, enabled
    try:
        yield
    finally:
        current.exporting = before


def is_in_onnx_export_mode() -> bool:
    """Whether onnx_export is entered."""
    return current.exporting
