"""Layers of transformers that multiply in FP8, with Transformer Engine's names (docs/transformer_engine.md).

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.common import recipe
"""

from apex._legacy import absent
from apex.transformer_engine import common

__all__ = ["common"]
__getattr__ = absent.attributes_of(__name__)
