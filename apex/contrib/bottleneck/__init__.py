"""The bottleneck block of residual networks with frozen batch norm, of whole images and of images split among ranks."""

from apex._legacy import absent
from apex.contrib.bottleneck.bottleneck import Bottleneck
from apex.contrib.bottleneck.halo_exchangers import (
    HaloExchangerAllGather,
    HaloExchangerNoComm,
    HaloExchangerPeer,
    HaloExchangerSendRecv,
)
from apex.contrib.bottleneck.spatial import SpatialBottleneck

__all__ = [
    "Bottleneck",
    "HaloExchangerAllGather",
    "HaloExchangerNoComm",
    "HaloExchangerPeer",
    "HaloExchangerSendRecv",
    "SpatialBottleneck",
]
__getattr__ = absent.attributes_of(__name__)
