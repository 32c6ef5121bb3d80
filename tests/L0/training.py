"""Short training runs beside a float64 twin: what the tests of fused optimizers share."""

from __future__ import annotations

import lists
import torch

SHAPES = ((1,), (0,), (7,), (33, 5), (2050,))


def parameters(dtype, device, shapes=SHAPES, seed=1):
    """One parameter of normal values a shape."""
    return [torch.nn.Parameter(t) for t in lists.random(dtype, device, shapes, seed=seed)]


def twins_of(params):
    """float64 parameters on the CPU with the same values."""
    return [torch.nn.Parameter(t) for t in lists.exact(params)]


def give_gradients(params, twins, step, scale=1.0, without=()):
    """Normal gradients, other ones at each step: rounded to the parameter's dtype, exact in its twin.

    scale: the parameters' gradients are multiplied by it, their twins' not; a power of two. without: indices
    of parameters that get none.
    """
    for index, (p, twin) in enumerate(zip(params, twins, strict=True)):
        if index in without:
            p.grad = twin.grad = None
            continue
        (gradient,) = lists.random(p.dtype, p.device, [p.shape], seed=1000 * step + index)
        p.grad = torch.empty_like(p).copy_(gradient * scale)
        (twin.grad,) = lists.exact([gradient])


def train(optimizer, oracle, params, twins, steps=3, **how):
    """The same steps of both; how: see give_gradients."""
    for step in range(1, steps + 1):
        give_gradients(params, twins, step, **how)
        optimizer.step()
        oracle.step()


def assert_trained(params, twins, steps=3, arithmetic=8):
    """Parameters are where their twins are, within a rounding to their dtype (and more of the arithmetic) a
    step.

    Both are relative to the tensor's largest value: an element may have been larger before.
    """
    for p, twin in zip(params, twins, strict=True):
        working = lists.ROUNDING[lists.math_dtype(p.dtype)]
        largest = max(1.0, float(twin.detach().abs().max())) if twin.numel() else 1.0
        allowed = steps * (lists.ROUNDING[p.dtype] + arithmetic * working) * largest
        lists.assert_near([p], lists.exact([twin]), smallest=allowed)


def launches(variant, op):
    """Kernels of an op that the executor ran since the test began, or None where that is not counted."""
    if not variant.simt:
        return None
    return sum(count for name, count in variant.kernels.items() if name.startswith(op))


def state_values(optimizer, name):
    """That state of every parameter that has it, in order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.state[p][name] for p in params if name in optimizer.state.get(p, {})]


class Oracle:
    """An optimizer in float64 for a formula that torch does not have; its learning rate, if it has one, is
    `lr`.

    update(state, p, g): the new value of a parameter, from and into a dict that is its own.
    """

    def __init__(self, twins, update):
        self.twins, self.update = twins, update
        self.states = [{} for _ in twins]

    @torch.no_grad()
    def step(self):
        for twin, state in zip(self.twins, self.states, strict=True):
            if twin.grad is not None:
                twin.copy_(self.update(state, twin.detach().clone(), twin.grad))


def any_grad_dtype(p, dtype):
    """Gives `p` a gradient of another dtype than its own, where this torch can; returns whether it did."""
    if not hasattr(p, "grad_dtype"):
        return False
    p.grad_dtype = dtype
    p.grad = torch.ones_like(p, dtype=dtype)
    return True


def replay(fused, oracle, params, twins, lr):
    """Four replays of one captured step, with new gradients and learning rates; the third is flagged.

    lr: the tensor that the fused optimizer reads. A flagged step before the capture makes the states (a
    capture would make them anew at every replay) and changes nothing.
    """
    fused.found_inf = lists.scalar(1.0, lr.device)
    for p in params:
        p.grad = torch.zeros_like(p)
    fused.step()
    gradients = [p.grad for p in params]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused.step()
    for step in (1, 2, 3, 4):
        give_gradients(params, twins, step)
        for memory, p in zip(gradients, params, strict=True):
            memory.copy_(p.grad)
        fused.found_inf.fill_(float(step == 3))
        lr.fill_(0.1 * step)
        if isinstance(oracle, Oracle):
            oracle.lr = 0.1 * step
        else:
            oracle.param_groups[0]["lr"] = 0.1 * step
        graph.replay()
        if step != 3:
            oracle.step()
