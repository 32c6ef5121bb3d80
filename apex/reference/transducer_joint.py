"""The transducer joint, output[b, t, u] = f[b, t] + g[b, u] with ReLU and dropout, in plain PyTorch."""

import torch

from apex.reference import _masks, _philox


def _check_lengths(batch, f_len, g_len, batch_offset):
    for name, lengths in (("f_len", f_len), ("g_len", g_len), ("batch_offset", batch_offset)):
        if lengths is None:
            continue
        if lengths.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"transducer_joint: {name} is int64 or int32, not {lengths.dtype}")
        if list(lengths.shape) != [batch]:
            raise ValueError(
                f"transducer_joint: {name} has one element for each item of the batch, not the shape "
                f"{list(lengths.shape)}"
            )


def _check(f, g, f_len, g_len, batch_offset, packed_batch, dropout, seed):
    """Raises TypeError or ValueError, as the bindings do."""
    if not f.dtype.is_floating_point:
        raise TypeError(f"transducer_joint takes float32, float16, bfloat16 and float64, not {f.dtype}")
    if f.dtype != g.dtype:
        raise TypeError(f"transducer_joint: f and g must have one dtype, not {f.dtype} and {g.dtype}")
    if f.dim() != 3 or g.dim() != 3 or f.shape[0] != g.shape[0] or f.shape[2] != g.shape[2]:
        raise ValueError(
            "transducer_joint: f [batch, frames, hidden] and g [batch, labels, hidden] do not fit: "
            f"{list(f.shape)}, {list(g.shape)}"
        )
    _check_lengths(f.shape[0], f_len, g_len, batch_offset)
    if packed_batch < 0:
        raise ValueError("transducer_joint: packed_batch must not be negative")
    if not 0 <= dropout <= 1:
        raise ValueError(f"transducer_joint: dropout_prob must be between 0 and 1, not {dropout}")
    if dropout and (seed is None or seed.dtype != torch.int64 or seed.numel() != 1):
        raise ValueError("transducer_joint: dropout needs a seed, one int64")


def _check_items(f_len, g_len, batch_offset, frames, labels, rows):
    """Raises ValueError for an item that does not fit, on a CPU: elsewhere that would make the host wait."""
    if f_len.device.type != "cpu":
        return
    end = 0
    for b, (t, u) in enumerate(zip(f_len.tolist(), g_len.tolist(), strict=True)):
        if not 0 <= t <= frames:
            raise ValueError(f"transducer_joint: f_len[{b}] is {t}, but f has {frames} frames")
        if not 0 <= u <= labels:
            raise ValueError(f"transducer_joint: g_len[{b}] is {u}, but g has {labels} labels")
        if batch_offset is None:
            continue
        end += t * u
        if batch_offset[b] != end:
            raise ValueError(
                f"transducer_joint: batch_offset[{b}] is {batch_offset[b].item()}, but the sum of f_len * g_len "
                f"up to it is {end}"
            )
        if end > rows:
            raise ValueError(
                f"transducer_joint: packed_batch is {rows}, less than the {end} rows of the items"
            )


class _Rows:
    """Where each row of the output comes from: item, frame and label, whether an item has it, whether it fits.

    Tensors of the output's shape without its last dimension.
    """

    def __init__(self, frames, labels, f_len, g_len, batch_offset, rows):
        f_len, g_len = f_len.long(), g_len.long()
        device, batch = f_len.device, len(f_len)
        bad = (f_len < 0) | (f_len > frames) | (g_len < 0) | (g_len > labels)
        if batch_offset is None:
            shape = (batch, frames, labels)
            self.item, self.frame, self.label = (
                _count(size, device).view([-1 if i == d else 1 for i in range(3)]).expand(shape)
                for d, size in enumerate(shape)
            )
            inside = torch.ones(shape, dtype=torch.bool, device=device)
        else:
            ends = batch_offset.long()
            begins = torch.cat((ends.new_zeros(1), ends[:-1]))[:batch]
            bad = bad | (begins < 0) | (ends > rows) | (ends - begins != f_len * g_len)
            row = _count(rows, device)
            item = torch.searchsorted(ends, row, right=True)
            inside = item < batch
            self.item = item.clamp(max=max(batch - 1, 0))
            inside = inside & (row >= begins[self.item]) if batch else inside
            place = row - begins[self.item] if batch else row
            width = g_len[self.item].clamp(min=1) if batch else torch.ones_like(row)
            self.frame = (place // width).clamp(0, max(frames - 1, 0))
            self.label = (place % width).clamp(0, max(labels - 1, 0))
        self.bad = inside & bad[self.item] if batch else inside
        self.live = inside & ~self.bad
        if batch:
            self.live = self.live & (self.frame < f_len[self.item]) & (self.label < g_len[self.item])
        self.bad_items = bad


def _count(n, device):
    return torch.arange(n, dtype=torch.int64, device=device)


def _math(tensor):
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def transducer_joint_forward(
    f, g, f_len, g_len, batch_offset=None, packed_batch=0, relu=False, dropout=0.0, seed=None
):
    """(output, mask): the sum of frames and labels, and what dropout keeps of it.

    f: [batch, frames, hidden]; g: [batch, labels, hidden], of the same dtype: float16, bfloat16, float32 or float64.
    f_len, g_len: [batch], int64 or int32: how many frames and labels each item has. Without batch_offset the
    output is [batch, frames, labels, hidden]; with it, [batch], the running sum of f_len * g_len, it is
    [packed_batch, hidden], the items' rows one behind another. Rows that no item has are -1. relu: of the sum.
    dropout: the probability of 0, with the others scaled by 1 / (1 - dropout); seed: one int64, the key of the
    random numbers. mask: uint8, the output's shape with ceil(hidden / 8) as its last dimension, bit i of byte j
    for column 8 j + i, ReLU's mask in it; without elements where dropout is 0.

    Items whose lengths or rows do not fit raise ValueError on a CPU and are nan elsewhere. Raises TypeError.
    """
    _check(f, g, f_len, g_len, batch_offset, packed_batch, dropout, seed)
    (batch, frames, hidden), labels = f.shape, g.shape[1]
    rows = packed_batch if batch_offset is not None else batch * frames * labels
    _check_items(f_len, g_len, batch_offset, frames, labels, rows)
    r = _Rows(frames, labels, f_len, g_len, batch_offset, rows)
    shape = (*r.item.shape, hidden)
    no_mask = f.new_empty(0, dtype=torch.uint8)
    if not rows or not hidden:
        return f.new_empty(shape), no_mask if not dropout else no_mask.new_empty(
            (*shape[:-1], -(-hidden // 8))
        )
    if not batch or not frames or not labels:
        output = torch.full(shape, -1.0, dtype=_math(f).dtype, device=f.device)
    else:
        output = _math(f)[r.item, r.frame] + _math(g)[r.item, r.label]
    mask = no_mask
    if dropout:
        parts = -(-hidden // 8)
        counter = _count(rows * parts, f.device).view(*shape[:-1], parts)
        kept = _philox.keep_eight(seed.reshape(()), counter, round((1 - dropout) * 65536))
        kept = kept.flatten(-2)[..., :hidden] & r.live.unsqueeze(-1)
        if relu:
            kept = kept & ~(output <= 0)
        mask = _masks.pack(kept)
        output = (output * (1 / (1 - dropout) if dropout < 1 else 0)).masked_fill(~kept, 0)
    elif relu:
        output = output.masked_fill(output < 0, 0)
    output = output.masked_fill(~r.live.unsqueeze(-1), -1).masked_fill(r.bad.unsqueeze(-1), torch.nan)
    return output.to(f.dtype), mask


def transducer_joint_backward(
    grad_output, f, g, mask, f_len, g_len, batch_offset, max_f_len, max_g_len, scale=1.0
):
    """(gradient of f, of g): sums over labels and over frames, in float32 (float64 for float64).

    grad_output: of the forward's output; rows that no item has are not read. With f and g, the forward's inputs,
    the gradient passes where their sum is not below or equal 0 (ReLU); with mask, the forward's, where it says
    so; else everywhere. max_f_len, max_g_len: frames of f and labels of g. scale: of the result.
    """
    _check_lengths(len(f_len), f_len, g_len, batch_offset)
    batch, hidden = len(f_len), grad_output.shape[-1]
    wanted = [grad_output.shape[0]] if batch_offset is not None else [batch, max_f_len, max_g_len]
    if list(grad_output.shape[:-1]) != wanted:
        raise ValueError(
            f"transducer_joint: the gradient's shape {list(grad_output.shape)} is not the output's: {batch} items, "
            f"{max_f_len} frames, {max_g_len} labels"
        )
    rows = grad_output.shape[0] if batch_offset is not None else batch * max_f_len * max_g_len
    _check_items(f_len, g_len, batch_offset, max_f_len, max_g_len, rows)
    r = _Rows(max_f_len, max_g_len, f_len, g_len, batch_offset, rows)
    grad = _math(grad_output)
    found = [grad.new_zeros((batch, size, hidden)) for size in (max_f_len, max_g_len)]
    if rows and hidden and batch and max_f_len and max_g_len:
        passes = r.live.unsqueeze(-1)
        if mask is not None:
            passes = passes & _masks.unpack(mask, hidden)
        elif f is not None:
            passes = passes & ~(_math(f)[r.item, r.frame] <= -_math(g)[r.item, r.label])
        grad = grad.masked_fill(~passes, 0.0)
        if batch_offset is None:
            found = [grad.sum(2), grad.sum(1)]
        else:
            for of, at in zip(found, (r.frame, r.label), strict=True):
                of.view(-1, hidden).index_add_(0, (r.item * of.shape[1] + at), grad)
    bad = r.bad_items.view(-1, 1, 1)
    return tuple((t * scale).masked_fill(bad, torch.nan).to(grad_output.dtype) for t in found)


class _Pair:
    """How autograd and autocast treat the pair where no binding fits this torch."""

    name = "transducer_joint"

    def setup_context(self, ctx, inputs, output):
        """Keeps what the backward needs."""
        f, g, f_len, g_len, batch_offset, _, relu, dropout, _ = inputs
        again = (f, g) if relu and not dropout else (None, None)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*again, output[1] if dropout else None, f_len, g_len, batch_offset)
        scale = 1 / (1 - dropout) if dropout < 1 else 0.0
        ctx.known = (f.shape[1], g.shape[1], scale)
        ctx.set_materialize_grads(False)

    def backward(self, ctx, grad_output, _):
        """Gradients of the forward's inputs, through the backward op."""
        if grad_output is None:
            return (None,) * 9
        found = torch.ops.apex.transducer_joint_backward(grad_output, *ctx.saved_tensors, *ctx.known)
        return (*found, *(None,) * 7)

    def setup_double_context(self, ctx, inputs, output):
        """Keeps nothing."""

    def double_backward(self, ctx, *gradients):
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "apex transducer_joint: the gradient of its gradient (double backward) is not implemented"
        )

    def autocast(self, device_type, arguments, keywords):
        """Arguments of the forward as autocast changes them: of two dtypes, the wider one."""
        names = (
            "f", "g", "f_len", "g_len", "batch_offset", "packed_batch", "relu", "dropout", "seed",
        )  # fmt: skip
        named = dict(zip(names, arguments, strict=False)) | keywords
        dtype = torch.promote_types(named["f"].dtype, named["g"].dtype)
        return named | {"f": named["f"].to(dtype), "g": named["g"].to(dtype)}


PAIRS = (_Pair(),)
