"""Parts of transformers, and of models that are split over ranks."""

from apex._legacy import absent
from apex.transformer import (
    amp,
    functional,
    layers,
    parallel_state,
    pipeline_parallel,
    tensor_parallel,
    utils,
)
from apex.transformer.enums import AttnMaskType, AttnType, LayerType, ModelType

__all__ = [
    "AttnMaskType",
    "AttnType",
    "LayerType",
    "ModelType",
    "amp",
    "functional",
    "layers",
    "parallel_state",
    "pipeline_parallel",
    "tensor_parallel",
    "utils",
]

__getattr__ = absent.attributes_of(__name__)
