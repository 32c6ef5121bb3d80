"""The exchange of halos as an operation with a gradient, and as one that torch.compile knows.

What a rank receives from above is what its upper neighbour sent down. So the gradient of what was received goes back by
the same exchange, which is its own adjoint: a rank gets the gradients of what it had sent.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from apex._functional import is_traced

_numbers = itertools.count()
_exchangers: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # number -> exchanger, for graphs


def number_of(exchanger):
    """The number by which graphs name an exchanger."""
    if not hasattr(exchanger, "_number_in_graphs"):
        exchanger._number_in_graphs = next(_numbers)
        _exchangers[exchanger._number_in_graphs] = exchanger
    return exchanger._number_in_graphs


class _Exchange(torch.autograd.Function):
    """apply(top, bottom, exchanger): (from above, from below), zeros at the image's edges."""

    @staticmethod
    def forward(ctx, top, bottom, exchanger):
        ctx.exchanger = exchanger
        return exchanger.left_right_halo_exchange(top, bottom)

    @staticmethod
    def backward(ctx, from_top, from_bottom):
        return *_Exchange.apply(from_top.contiguous(), from_bottom.contiguous(), ctx.exchanger), None


@torch.library.custom_op("apex_halos::exchange", mutates_args=())
def _exchange(top: torch.Tensor, bottom: torch.Tensor, exchanger: int) -> tuple[torch.Tensor, torch.Tensor]:
    top, bottom = top.contiguous(), bottom.contiguous()
    return _exchangers[exchanger].left_right_halo_exchange(top, bottom)


@_exchange.register_fake
def _(top, bottom, exchanger):
    return bottom.new_empty(bottom.shape), top.new_empty(top.shape)


def _keep(ctx, inputs, output):
    ctx.exchanger = inputs[2]


def _gradients(ctx, from_top, from_bottom):
    return *_exchange(from_top, from_bottom, ctx.exchanger), None


_exchange.register_autograd(_gradients, setup_context=_keep)


def exchanged(exchanger, top, bottom):
    """(rows from above, rows from below), of the rows at the top and the bottom of this rank's strip; differentiable
    any number of times. Every rank of the group makes the same calls in the same order."""
    if is_traced():
        return _exchange(top, bottom, exchanger._number_in_graphs)
    return _Exchange.apply(top, bottom, exchanger)
