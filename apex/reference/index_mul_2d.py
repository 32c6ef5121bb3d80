"""index_mul_2d, out[i] = in1[idx1[i]] * in2[i], in plain PyTorch."""

import torch

from apex.reference._leaves import given_if_compiled


def _check(in1, second, index):
    """Raises TypeError or ValueError, as the bindings do."""
    if not in1.dtype.is_floating_point:
        raise TypeError(f"index_mul_2d takes float32, float16, bfloat16 and float64, not {in1.dtype}")
    if in1.dtype != second.dtype:
        raise TypeError(f"index_mul_2d: tensors must have one dtype, not {in1.dtype} and {second.dtype}")
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"index_mul_2d: idx1 is int64 or int32, not {index.dtype}")
    shapes = [list(t.shape) for t in (in1, second, index)]
    if [len(s) for s in shapes] != [2, 2, 1] or shapes[0][1] != shapes[1][1] or shapes[1][0] != shapes[2][0]:
        raise ValueError(
            "index_mul_2d: in1 [entries, features], in2 [rows, features] and idx1 [rows] do not fit: "
            + ", ".join(map(str, shapes))
        )


def _rows(index, entries):
    """(indices that may be used, which rows are outside [0, entries)). On a CPU the latter raise IndexError."""
    outside = (index < 0) | (index >= entries)
    if index.device.type == "cpu" and outside.any():
        row = outside.nonzero()[0].item()
        raise IndexError(f"index_mul_2d: idx1[{row}] is {index[row].item()}, outside [0, {entries})")
    return index.long().clamp(0, max(entries - 1, 0)), outside


def _gather(source, factor, index):
    rows, outside = _rows(index, source.shape[0])
    if not factor.numel() or not source.shape[0]:
        return torch.full_like(factor, torch.nan, memory_format=torch.contiguous_format)
    return (source[rows] * factor).masked_fill(outside.unsqueeze(-1), torch.nan).contiguous()


def index_mul_2d_forward(in1, in2, idx1):
    """in1[idx1] * in2.

    in1: [entries, features]; in2: [rows, features], of the same dtype: float16, bfloat16, float32 or float64.
    idx1: [rows], int64 or int32. A row whose index is outside [0, entries) raises IndexError on a CPU and is nan
    elsewhere. Raises TypeError and ValueError.
    """
    _check(in1, in2, idx1)
    return _gather(in1, in2, idx1)


def index_mul_2d_backward(grad_out, in1, in2, idx1, of_in1=True, of_in2=True):
    """(gradient of in1, of in2); without elements where not wanted. Sums are float32 (float64 for float64)."""
    _check(in1, in2, idx1)
    _check(in1, grad_out, idx1)
    first = second = in1.new_empty(0)
    if of_in2:
        second = _gather(in1, grad_out, idx1)
    if of_in1:
        math = torch.float64 if in1.dtype == torch.float64 else torch.float32
        rows, outside = _rows(idx1, in1.shape[0])
        terms = (grad_out.to(math) * in2.to(math)).masked_fill(outside.unsqueeze(-1), 0)
        first = in1.new_zeros(in1.shape, dtype=math)
        if in1.shape[0]:
            first = first.index_add_(0, rows, terms)
        first = first.to(in1.dtype)
    return first, second


class _Pair:
    """How autograd treats the pair where no binding fits this torch."""

    name = "index_mul_2d"

    def setup_context(self, ctx, inputs, output):
        """Keeps the inputs."""
        ctx.save_for_backward(*inputs)

    def backward(self, ctx, grad_out):
        """Gradients of the forward's inputs, through the backward op."""
        wanted = ctx.needs_input_grad[:2]
        found = torch.ops.apex.index_mul_2d_backward(grad_out, *ctx.saved_tensors, *wanted)
        return (*(g if w else None for g, w in zip(found, wanted, strict=True)), None)

    def setup_double_context(self, ctx, inputs, output):
        """Keeps the tensors; gradients that are not there stay None."""
        ctx.save_for_backward(*inputs[:4])
        ctx.set_materialize_grads(False)

    def double_backward(self, ctx, of_first, of_second):
        """Products and sums of the same two kinds."""
        grad_out, in1, in2, index = ctx.saved_tensors
        product, gradients = torch.ops.apex.index_mul_2d_forward, torch.ops.apex.index_mul_2d_backward
        parts = [product(of_first, in2, index)] if of_first is not None else []
        parts += [product(in1, of_second, index)] if of_second is not None else []
        of_in1 = None if of_second is None else gradients(grad_out, in1, of_second, index, True, False)[0]
        of_in2 = None if of_first is None else product(of_first, grad_out, index)
        of_grad = sum(parts[1:], parts[0]) if parts else None
        found = ((of_grad, grad_out), (of_in1, in1), (of_in2, in2))
        return *(given_if_compiled(*pair) for pair in found), None, None, None

    def autocast(self, device_type, arguments, keywords):
        """Nothing changes: the product has the factors' dtype."""
        return dict(zip(("in1", "in2", "idx1"), arguments, strict=False)) | keywords


PAIRS = (_Pair(),)
