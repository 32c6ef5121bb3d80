"""Arguments of the public engine that ask for what is not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OVERLAPS = (
    "skip_weight_param_allocation",
    "ub_split_rs",
    "ub_split_ag",
    "ub_bulk_wgrad",
    "ub_bulk_dgrad",
    "ub_atomic_gemm_rs",
    "ub_atomic_gemm_ag",
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_tp_comm_overlap",
    "delay_wgrad_compute",
)
_NOTES = ("ub_name", "name", "symmetric_ar_type")


def check_overlaps(layer: str, arguments: Mapping[str, Any]) -> None:
    """Raises TypeError for a name that there is not, NotImplementedError for one that asks for something."""
    for name, value in arguments.items():
        if name in _NOTES:
            continue
        if name not in _OVERLAPS:
            raise TypeError(f"{layer} got an unexpected argument {name!r}")
        if value:
            raise NotImplementedError(
                f"{layer}: {name}={value!r} is not supported: leave it False (communication is not overlapped with "
                "products here)"
            )
