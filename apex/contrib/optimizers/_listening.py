"""Hooks on parameters, by which a sharded optimizer hears that their gradients are there."""

from __future__ import annotations

import weakref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_hooks = WeakTensorKeyDictionary()  # parameter -> (reference to its optimizer, handle of the hook)


class Listening:
    """Mixin of ShardedOptimizer."""

    def _listen(self):
        """Hooks on all parameters, frozen ones too: they may thaw. Those of an earlier optimizer are removed."""
        for p, (index, place) in self._place.items():
            owner, handle = _hooks.get(p, (lambda: None, None))
            if owner() is self:
                continue
            if handle is not None:
                handle.remove()
            frozen = not p.requires_grad
            p.requires_grad_(True)  # torch takes hooks on such parameters alone
            try:
                handle = self._register(p, self._make_post_backward_hook(p, index, place))
            finally:
                p.requires_grad_(not frozen)
            _hooks[p] = weakref.ref(self), handle

    def _register(self, p, hook):
        if not self.contiguous_grad_buffer:
            return p.register_post_accumulate_grad_hook(hook)
        # Kernels that write into the buffer leave autograd without a gradient: only the node knows of the pass.
        with torch.enable_grad():
            node = p.expand_as(p).grad_fn.next_functions[0][0]
        self._nodes.append(node)
        return node.register_hook(hook)

    def _make_post_backward_hook(self, param, param_group_id, param_id):
        me = weakref.ref(self)

        def post_backward_hook(*unused):
            self = me()
            if self is None:
                return
            with self._lock:
                if self.greedy_grad_copy:
                    self._grad_copy(param)
                    if self.overlap_grad_sync:
                        self._try_start_bucket_grad_sync(params=[param])

        return post_backward_hook
