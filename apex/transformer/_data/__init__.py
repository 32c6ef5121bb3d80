"""Which samples a data parallel rank takes."""

from apex.transformer._data._batchsampler import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)

__all__ = ["MegatronPretrainingRandomSampler", "MegatronPretrainingSampler"]
