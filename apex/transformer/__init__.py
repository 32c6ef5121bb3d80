"""Parts of transformers."""

from apex._legacy import absent
from apex.transformer import functional, layers
from apex.transformer.enums import AttnMaskType, AttnType, LayerType, ModelType

__all__ = ["AttnMaskType", "AttnType", "LayerType", "ModelType", "functional", "layers"]

__getattr__ = absent.attributes_of(__name__)
