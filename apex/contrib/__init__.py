"""Fused operations that public apex keeps under `contrib`. Submodules are imported when they are named."""

from apex._legacy import absent

__getattr__ = absent.attributes_of(__name__)
