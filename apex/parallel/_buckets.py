"""Which gradients travel together."""

from __future__ import annotations


class Bucket:
    """Parameters of one dtype and device whose gradients are reduced in one message.

    Attributes:
        params: the parameters.
        ready: ids of those that got their gradient in this backward pass.
        streams: streams on which these gradients are computed.
    """

    def __init__(self, params):
        self.params = params
        self.empty()

    def empty(self):
        self.ready = set()
        self.streams = set()

    @property
    def full(self):
        return len(self.ready) == len(self.params)


def by_type(params):
    """Parameters that may go into one bucket: [[of one dtype and device, in their order], ...]."""
    found = {}
    for p in params:
        found.setdefault((p.dtype, p.device), []).append(p)
    return list(found.values())


def plan_buckets(params, arrived, message_size, triggers=None):
    """Lists of indices into `params`: buckets in the order in which they get full.

    arrived: parameters in the order of their gradients. message_size: elements that make a bucket full.
    triggers: ids of parameters that do, in its place. Parameters that did not arrive get the last buckets, to
    hold up no other.
    """
    index_of = {id(p): i for i, p in enumerate(params)}
    full, filling = [], {}
    for p in arrived:
        bucket = filling.setdefault((p.dtype, p.device), [])
        bucket.append(p)
        if triggers is None:
            complete = sum(q.numel() for q in bucket) >= message_size
        else:
            complete = id(p) in triggers
        if complete:
            full.append(filling.pop((p.dtype, p.device)))
    here = {id(p) for p in arrived}
    late = by_type(p for p in params if id(p) not in here)
    return [[index_of[id(p)] for p in bucket] for bucket in (*full, *filling.values(), *late)]
