from __future__ import annotations

import torch

from apex.optimizers._arguments import check_arguments
from apex.optimizers._combined_optimizer import CombinedOptimizer

__all__ = ["CombinedAdamP"]


class CombinedAdamP(CombinedOptimizer):
    """AdamP over combined tensors: Adam that keeps scale-invariant weights from growing.

    Where a weight's gradient is all but orthogonal to it (row by row, else as a whole), the part of the step along the
    weight is taken out, and its decay is reduced. Moments and updates are elementwise over flat slices; weights with
    more than one dimension are looked at one by one. Works after amp.initialize (O1, O2, O4, O5).

    Args:
        params: parameters, or dicts that define groups.
        lr: learning rate.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the denominators.
        weight_decay: strength of the decoupled decay.
        delta: a cosine below delta / sqrt(length) counts as orthogonal.
        wd_ratio: what weight decay is multiplied by for such weights.
        nesterov: Nesterov momentum.

    Raises:
        ValueError: lr, eps or weight_decay is negative, a beta is not in [0, 1).
        RuntimeError: step() without amp.initialize; a sparse gradient.

    Source: arXiv:2006.08217, algorithm 3.
    """

    reads_found_inf = False
    combines_rows = True

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        delta=0.1,
        wd_ratio=0.1,
        nesterov=False,
    ):
        check_arguments(type(self).__name__, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            delta=delta,
            wd_ratio=wd_ratio,
            nesterov=nesterov,
        )
        super().__init__(params, defaults)

    def _states(self, group):
        return ("exp_avg", "exp_avg_sq")

    def _update(self, group, slices, scaling):
        slices.count += 1
        slices.step += 1
        rows = zip(
            slices.owners,
            slices.layouts,
            slices.params,
            slices.grads,
            slices.states["exp_avg"],
            slices.states["exp_avg_sq"],
            strict=True,
        )
        for row in rows:
            _step(group, slices.count, *row)


def _step(group, count, owners, layout, param, grad, exp_avg, exp_avg_sq):
    """One slice."""
    beta1, beta2 = group["betas"]
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
    ahead = exp_avg.mul(beta1).add_(grad, alpha=1 - beta1) if group["nesterov"] else exp_avg
    perturb = ahead / denominator
    decays = group["weight_decay"] > 0
    ratio = torch.ones_like(param) if decays else None
    for i, p in enumerate(owners):
        if p.dim() > 1 and p.numel():
            found = _project(layout.view(param, i), layout.view(grad, i), layout.view(perturb, i), group)
            if decays:
                layout.view(ratio, i).copy_(found)
    lr = float(group["lr"])
    if decays:
        param.mul_(ratio.mul_(-lr * group["weight_decay"]).add_(1))
    param.add_(perturb, alpha=-lr / (1 - beta1**count))


def _project(param, grad, perturb, group):
    """Takes the part along `param` out of `perturb`, in place, where that applies; returns the ratio of decay.

    By rows if every row of the gradient is all but orthogonal to the parameter's; else as a whole if that is. Both are
    worked out and one is taken on the device: nothing waits.
    """
    eps, delta = group["eps"], group["delta"]
    rows = (param.shape[0], -1)
    p, g = param.reshape(rows), grad.reshape(rows)
    length = p.shape[1]
    dots, p_squares, g_squares = (p * g).sum(1), p.square().sum(1), g.square().sum(1)

    def cosine(dot, g_square, p_square):
        return dot.abs() / (g_square.sqrt() + eps) / (p_square.sqrt() + eps)

    by_rows = cosine(dots, g_squares, p_squares).max() < delta / length**0.5
    whole_square = p_squares.sum()
    whole = cosine(dots.sum(), g_squares.sum(), whole_square) < delta / p.numel() ** 0.5
    norm = torch.where(by_rows, p_squares, whole_square).sqrt().add_(eps)
    along = p / norm[:, None]
    parts = (along * perturb.reshape(rows)).sum(1)
    parts = torch.where(by_rows, parts, parts.sum())
    applies = by_rows | whole
    perturb.sub_((along * parts[:, None]).mul_(applies).reshape(param.shape))
    return torch.where(applies, group["wd_ratio"], 1.0)
