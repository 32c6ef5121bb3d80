"""The bottleneck block of residual networks with frozen batch norm."""

from apex._legacy import absent
from apex.contrib.bottleneck.bottleneck import Bottleneck

__all__ = ["Bottleneck"]
__getattr__ = absent.attributes_of(__name__)
