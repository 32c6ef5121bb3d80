"""A model of whose gradients several lie in the same memory, as autograd makes them."""

from __future__ import annotations

import torch

F32 = torch.float32


class Net(torch.nn.Module):
    """Two embeddings that are added as views, and one scalar that is stacked with another."""

    def __init__(self, dtype=F32):
        super().__init__()
        torch.manual_seed(3)
        for name, shape in (("position", (4, 3)), ("token", (4, 3)), ("a", ()), ("b", ())):
            value = torch.randn(shape, dtype=F32, device="cpu").to(dtype)
            setattr(self, name, torch.nn.Parameter(value))

    def forward(self, factor=1.0):
        added = self.position.unsqueeze(0) + self.token.unsqueeze(0)
        return (added.float() ** 2 * factor).sum() + torch.stack([self.a, self.b]).float().sum()


def apart(params):
    """What the gradients would be if each had its own memory."""
    for p in params:
        p.grad = None if p.grad is None else p.grad.clone()


def assert_same(found, expected, **bounds):
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), **bounds)
