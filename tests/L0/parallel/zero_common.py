"""What the cases of the zero_*.py files share: parameters, gradients, and torch's optimizer in float64 over them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from apex.contrib.optimizers import DistributedFusedAdam

SHAPES = ((33, 5), (7,), (1,), (6,), (2, 3, 4, 5), (301,), ())
HYPER = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
DEVICE = "cpu"  # where parameters are; zero_cuda.py sets another
SMALL = dict(bucket_cap_mb=0.001)  # a parameter lies in several buckets, and a bucket has several parameters


def ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def parameters(dtype=torch.float32, shapes=SHAPES, seed=1, device=None):
    """Of one dtype, or of these in turn."""
    dtypes = dtype if isinstance(dtype, (tuple, list)) else [dtype]
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(
            torch.randn(shape, generator=generator).to(device or DEVICE, dtypes[i % len(dtypes)])
        )
        for i, shape in enumerate(shapes)
    ]


def gradients(params, seed, of_rank):
    """What a rank's pass gives the parameters, in their dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + of_rank)
    return [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in params]


def backward(params, seed, of_rank=None, scale=1.0):
    """A pass in which the parameters get this rank's gradients, by autograd, the last parameter first."""
    found = gradients(params, seed, rank() if of_rank is None else of_rank)
    loss = torch.zeros((), device=params[0].device, dtype=torch.float64)
    for p, g in zip(params, found, strict=True):
        loss = loss + (p * g).double().sum() * scale
    loss.backward()


class Oracle:
    """torch's optimizer in float64, over the mean (or sum) of the gradients of all ranks.

    masters: begin from these values rather than the parameters'.
    """

    def __init__(self, params, adam_w_mode=True, of=None, average=True, **options):
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        self.params = params
        self.ranks = ranks() if of is None else of
        self.average = average
        self.copies = [torch.nn.Parameter(p.detach().to("cpu", torch.float64)) for p in params]
        self.optimizer = kind(self.copies, **{**HYPER, **options})

    def accumulate(self, *seeds):
        for seed in seeds:
            for r in range(self.ranks):
                for q, g in zip(self.copies, gradients(self.params, seed, r), strict=True):
                    g = g.to("cpu", torch.float64) / (self.ranks if self.average else 1)
                    q.grad = g if q.grad is None else q.grad + g

    def step(self, *seeds, clip=None):
        """Returns the norm."""
        self.accumulate(*seeds)
        norm = torch.nn.utils.clip_grad_norm_(self.copies, clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def check(self, tolerance=1e-5):
        for p, q in zip(self.params, self.copies, strict=True):
            agree(p, q, tolerance, tolerance)


def agree(found, wanted, rtol, atol=0.0):
    """Compared on the host: what is tested may lie on a GPU, and the oracle does not."""
    found, wanted = (tensor.detach().to("cpu", torch.float64) for tensor in (found, wanted))
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def make(params, on_host=True, **options):
    """on_host False: as on an accelerator, but that gloo's work is the host's: let it have many buckets under way."""
    optimizer = DistributedFusedAdam(params, **{**HYPER, **options})
    optimizer._gradients._on_host &= on_host
    return optimizer


def clones(params):
    return [p.detach().clone() for p in params]


def equal(found, wanted):
    for f, w in zip(found, wanted, strict=True):
        assert torch.equal(f, w.to(f.device)), (f, w)
