"""Memory that the ranks of one machine share, and the exchange of halos through it."""

from apex._legacy import absent
from apex.contrib.peer_memory.peer_halo_exchanger_1d import PeerHaloExchanger1d
from apex.contrib.peer_memory.peer_memory import PeerMemoryPool

__all__ = ["PeerHaloExchanger1d", "PeerMemoryPool"]
__getattr__ = absent.attributes_of(__name__)
