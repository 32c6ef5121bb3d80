"""torch.fx.symbolic_trace takes torch's own layers as leaves, one node a call. So it takes those of apex."""

from __future__ import annotations

from torch.fx import Proxy


def leaf(module, *arguments, **keywords):
    """The call module(*arguments, **keywords) as a node of the graph that is traced, or None where no argument is a
    proxy of it.

    None too for the module that is itself what is traced: there is nothing that the node could name.
    """
    for value in (*arguments, *keywords.values()):
        if isinstance(value, Proxy):
            target = value.tracer.path_of_module(module)
            return value.tracer.create_proxy("call_module", target, arguments, keywords) if target else None
    return None
