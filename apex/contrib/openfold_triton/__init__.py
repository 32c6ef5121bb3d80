"""What public apex has for OpenFold in Triton, on this package's kernels and torch's attention, without Triton."""

from __future__ import annotations

from apex.contrib.openfold_triton.layer_norm import LayerNormSmallShapeOptImpl
from apex.contrib.openfold_triton.mha import AttnBiasJIT, AttnNoBiasJIT, AttnTri, CanSchTriMHA

__all__ = [
    "AttnBiasJIT",
    "AttnNoBiasJIT",
    "AttnTri",
    "CanSchTriMHA",
    "LayerNormSmallShapeOptImpl",
    "sync_triton_auto_tune_cache_across_gpus",
]

# Scripts put tuned settings into these, one for each kernel of public apex. Kernels here are chosen without tuning.
_tuneable_triton_kernels: dict[str, object] = {}


def sync_triton_auto_tune_cache_across_gpus(strict: bool = True, verbose: bool = False) -> None:
    """Does nothing: no kernel here is tuned at run time, so ranks have nothing to agree on."""
