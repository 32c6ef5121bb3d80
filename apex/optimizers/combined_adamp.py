from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from apex.optimizers._arguments import check_arguments
from apex.optimizers._combined_optimizer import CombinedOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["CombinedAdamP"]


class CombinedAdamP(CombinedOptimizer):
    """AdamP over combined tensors: Adam that keeps scale-invariant weights from growing.

    Where a weight's gradient is all but orthogonal to it (row by row, else as a whole), the part of the step along the
    weight is taken out, and its decay is reduced; that is for weights of more than one dimension. What is measured of
    rows and weights is measured in whole slices; one launch a weight is left. Works after amp.initialize (O1, O2, O4,
    O5).

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
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
    ) -> None:
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
        if not hasattr(slices, "rows"):
            slices.rows = [Rows(layout, slices.device) for layout in slices.layouts]
        rows = zip(
            slices.rows,
            slices.params,
            slices.grads,
            slices.states["exp_avg"],
            slices.states["exp_avg_sq"],
            strict=True,
        )
        for row in rows:
            _step(group, slices.count, *row)


class Rows:
    """A slice cut into segments: each row of each weight of more than one dimension, and all that lies between.

    Sums over every segment are then one launch, whatever the number of weights.

    Args:
        layout: where the slice's parameters lie; their first dimensions are the outermost.
        device: of the slice.

    Attributes:
        lengths: [segments], int64, of the segments in order.
        counts: [blocks], int64: segments of each weight; what lies between two is a block of one segment.
        block: [segments], int64: each segment's block.
        is_weight: [blocks], bool.
        length, numel: [blocks], float32: of a segment, and of the whole block.
    """

    def __init__(self, layout, device):
        self._weights, self._between = [], []  # (begin, end in the slice, first segment, rows); (begin, end)
        lengths, counts, end = [], [], 0
        for shape, begin in (*zip(layout.shapes, layout.offsets, strict=True), (None, layout.total)):
            if shape is not None and (len(shape) < 2 or not shape.numel()):
                continue
            if begin > end:
                self._between.append((end, begin))
                lengths.append(begin - end)
                counts.append(1)
            if shape is not None:
                end = begin + shape.numel()
                self._weights.append((begin, end, len(lengths), shape[0]))
                lengths += [shape.numel() // shape[0]] * shape[0]
                counts.append(shape[0])
        counts = torch.tensor(counts, dtype=torch.int64, device="cpu")
        firsts = counts.cumsum(0) - counts
        of_weights = counts.new_tensor([first for _, _, first, _ in self._weights])
        lengths = counts.new_tensor(lengths)
        self.lengths, self.counts = lengths.to(device), counts.to(device)
        self.block = torch.arange(len(counts), dtype=torch.int64, device="cpu")
        self.block = self.block.repeat_interleave(counts).to(device)
        self.is_weight = torch.isin(firsts, of_weights).to(device)
        self.length = lengths[firsts].to(device, torch.float32)
        self.numel = self.length * self.counts

    def sums(self, flat):
        """[segments]: the sum of each."""
        return torch.segment_reduce(flat, "sum", lengths=self.lengths, unsafe=True)

    def by_block(self, values, reduction="sum"):
        """[blocks] from one value a segment."""
        return torch.segment_reduce(values, reduction, lengths=self.counts, unsafe=True)

    def scale(self, flat, factors, others):
        """Multiplies each row of a weight by its segment's factor, and what lies between by `others`, a float."""
        for begin, end, first, rows in self._weights:
            flat[begin:end].view(rows, -1).mul_(factors[first : first + rows, None])
        for begin, end in self._between if others != 1.0 else ():
            flat[begin:end].mul_(others)


def _step(group, count, rows, param, grad, exp_avg, exp_avg_sq):
    """One slice."""
    beta1, beta2 = group["betas"]
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
    ahead = exp_avg.mul(beta1).add_(grad, alpha=1 - beta1) if group["nesterov"] else exp_avg
    perturb = ahead / denominator
    size, decay = float(group["lr"]) / (1 - beta1**count), float(group["lr"]) * group["weight_decay"]
    along, ratio = _projection(group, rows, param, grad, perturb)
    # param * (1 - decay * ratio) - size * (perturb - param * along)
    rows.scale(param, along.mul_(size).sub_(ratio, alpha=decay).add_(1), 1 - decay)
    param.add_(perturb, alpha=-size)


def _projection(group, rows, param, grad, perturb):
    """([segments] what of a row, times it, is to leave the step; [segments] the ratio of its decay).

    By rows if every row of a weight's gradient is all but orthogonal to the weight's; else as a whole if that is. Both
    are worked out and one is taken on the device: nothing waits.
    """
    eps, delta, block = group["eps"], group["delta"], rows.block
    pairs = (param, grad), (grad, grad), (param, param), (param, perturb)
    dots, of_grad, of_param, along = by_row = [rows.sums(a * b) for a, b in pairs]
    whole_dot, whole_grad, whole_param, whole_along = map(rows.by_block, by_row)

    def cosine(dot, g_square, p_square):
        return dot.abs() / (g_square.sqrt() + eps) / (p_square.sqrt() + eps)

    largest = rows.by_block(cosine(dots, of_grad, of_param), "max")
    by_rows = rows.is_weight & (largest < delta / rows.length.sqrt())
    whole = rows.is_weight & (cosine(whole_dot, whole_grad, whole_param) < delta / rows.numel.sqrt())
    by_rows, applies = by_rows[block], (by_rows | whole)[block]
    norm = torch.where(by_rows, of_param, whole_param[block]).sqrt_().add_(eps)
    along = torch.where(by_rows, along, whole_along[block]).div_(norm).div_(norm).mul_(applies)
    return along, torch.full_like(along, group["wd_ratio"]).masked_fill_(~applies, 1.0)
