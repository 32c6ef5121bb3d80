"""Cross entropy of logits whose vocabulary is split over the tensor parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from apex.transformer import _collectives as collectives
from apex.transformer.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from apex.transformer.tensor_parallel.utils import VocabUtility, check_words, refuse_create_graph

_WHAT = "a cross entropy over the tensor parallel ranks"


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """See vocab_parallel_cross_entropy."""

    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, label_smoothing=0.0):
        logits, part = vocab_parallel_logits, vocab_parallel_logits.shape[-1]
        group, ranks = get_tensor_model_parallel_group(), get_tensor_model_parallel_world_size()
        words = ranks * part
        _check(logits, target, label_smoothing, words)
        first, _ = VocabUtility.vocab_range_from_per_partition_vocab_size(
            part, get_tensor_model_parallel_rank(), ranks
        )
        wide = torch.promote_types(logits.dtype, torch.float32)
        highest = collectives.all_reduce(
            collectives.copy(logits.amax(-1).to(wide)), group, _WHAT, dist.ReduceOp.MAX
        )
        shifted = logits.to(wide) - highest.unsqueeze(-1)
        local = target.long() - first
        elsewhere = (local < 0) | (local >= part)
        local = local.masked_fill(elsewhere, 0)
        chosen = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        sums = [chosen, shifted.exp().sum(-1)]
        if label_smoothing:
            sums.append(shifted.sum(-1))
        chosen, exps, *total = collectives.all_reduce(torch.stack(sums), group, _WHAT).unbind()
        log_sum = exps.log()
        loss = log_sum - chosen
        ctx.smoothing = _spread(label_smoothing, words)
        if label_smoothing:
            mean = total[0] / words - log_sum
            loss = (1.0 - ctx.smoothing) * loss - ctx.smoothing * mean
        ctx.words = words
        ctx.save_for_backward(logits, highest, log_sum, local, elsewhere)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        refuse_create_graph("vocab_parallel_cross_entropy")
        logits, highest, log_sum, local, elsewhere = ctx.saved_tensors
        grad = (logits.to(log_sum.dtype) - highest.unsqueeze(-1)).sub_(log_sum.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            grad.sub_(ctx.smoothing / ctx.words)
        own = (ctx.smoothing - 1.0) * (~elsewhere).to(grad.dtype)
        grad.scatter_add_(-1, local.unsqueeze(-1), own.unsqueeze(-1))
        return grad.mul_(grad_output.unsqueeze(-1)).to(logits.dtype), None, None


def _spread(label_smoothing, words):
    """What is spread over all words, the target's among them, where `label_smoothing` goes to the others alone."""
    return label_smoothing * words / (words - 1) if label_smoothing else 0.0


def _check(logits, target, label_smoothing, words):
    if not logits.is_floating_point():
        raise TypeError(
            f"vocab_parallel_cross_entropy: the logits are {logits.dtype}: a float dtype is required"
        )
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"vocab_parallel_cross_entropy: targets of shape {list(target.shape)} for logits of shape "
            f"{list(logits.shape)}: one target for each row is required"
        )
    if target.is_floating_point() or target.dtype == torch.bool:
        raise TypeError(
            f"vocab_parallel_cross_entropy: the targets are {target.dtype}: integers are required"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(
            f"vocab_parallel_cross_entropy: label_smoothing {label_smoothing} is not within [0, 1)"
        )
    if label_smoothing and words == 1:
        raise ValueError("vocab_parallel_cross_entropy: one word leaves nothing to smooth with")
    check_words(target, words, "vocab_parallel_cross_entropy")


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Cross entropy of each row, of logits that are split over the tensor parallel ranks.

    Args:
        vocab_parallel_logits: [..., words / ranks], this rank's part of the vocabulary; never written. float16 and
            bfloat16 are computed in float32.
        target: [...], integers, words of the whole vocabulary, the same on all ranks.
        label_smoothing: the probability that the words other than the target share evenly, in [0, 1).

    Returns:
        [...], in float32, of float64 logits in float64; the same on all ranks.

    Raises:
        TypeError, ValueError: dtypes or shapes that do not fit, a smoothing out of range.
        IndexError: targets on the CPU that are no words. On a GPU this is not looked at.
    """
    return _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, label_smoothing)
