"""The transducer (RNN-T) loss in plain PyTorch."""

import torch


def _math_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _count(first, end, device):
    return torch.arange(first, end, dtype=torch.int64, device=device)


def _log_of(condition, dtype):
    """0 where it holds, else -inf."""
    return torch.full_like(condition, -torch.inf, dtype=dtype).masked_fill_(condition, 0.0)


def _check(x, label, f_len, y_len, blank_idx, batch_offset, max_f_len):
    """Raises TypeError or ValueError, as the bindings do."""
    if not x.dtype.is_floating_point:
        raise TypeError(f"transducer_loss takes float32, float16, bfloat16 and float64, not {x.dtype}")
    lengths = {"f_len": f_len, "y_len": y_len, "batch_offset": batch_offset}
    for name, tensor in {"label": label, **lengths}.items():
        if tensor is not None and tensor.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"transducer_loss: {name} is int64 or int32, not {tensor.dtype}")
    if label.dim() != 2:
        raise ValueError(f"transducer_loss: label is [batch, labels], not of shape {list(label.shape)}")
    for name, tensor in lengths.items():
        if tensor is not None and list(tensor.shape) != [label.shape[0]]:
            raise ValueError(
                f"transducer_loss: {name} has one element for each item of the batch, not the shape "
                f"{list(tensor.shape)}"
            )
    if batch_offset is not None:
        if x.dim() != 2:
            raise ValueError(f"transducer_loss: packed x is [rows, classes], not of shape {list(x.shape)}")
        if max_f_len < 0:
            raise ValueError("transducer_loss: max_f_len must not be negative")
    elif x.dim() != 4 or x.shape[0] != label.shape[0] or x.shape[2] != label.shape[1] + 1:
        raise ValueError(
            "transducer_loss: x [batch, frames, labels + 1, classes] and label [batch, labels] do not fit: "
            f"{list(x.shape)}, {list(label.shape)}"
        )
    if not 0 <= blank_idx < x.shape[-1]:
        raise ValueError(
            f"transducer_loss: blank_idx is {blank_idx}, outside the classes of x of shape {list(x.shape)}"
        )


def _check_items(x, label, f_len, y_len, batch_offset, frames):
    """Raises ValueError or IndexError for an item that does not fit, on a CPU: elsewhere the host would wait."""
    if f_len.device.type != "cpu":
        return
    end, most = 0, label.shape[1]
    for b, (t, u) in enumerate(zip(f_len.tolist(), y_len.tolist(), strict=True)):
        if not 1 <= t <= frames:
            raise ValueError(
                f"transducer_loss: f_len[{b}] is {t}, outside [1, {frames}]: an item has at least one frame"
            )
        if not 0 <= u <= most:
            raise ValueError(f"transducer_loss: y_len[{b}] is {u}, but label has {most} columns")
        for i, value in enumerate(label[b, :u].tolist()):
            if not 0 <= value < x.shape[-1]:
                raise IndexError(f"transducer_loss: label[{b}, {i}] is {value}, outside [0, {x.shape[-1]})")
        if batch_offset is None:
            continue
        end += t * (u + 1)
        if batch_offset[b] != end:
            raise ValueError(
                f"transducer_loss: batch_offset[{b}] is {batch_offset[b].item()}, but the sum of f_len * "
                f"(y_len + 1) up to it is {end}"
            )
        if end > len(x):
            raise ValueError(f"transducer_loss: packed x has {len(x)} rows, less than the {end} of the items")


class _Lattice:
    """The nodes (t, u) of each item: whether they are there, and which row of x is theirs.

    Tensors of shape [batch, frames, labels + 1], or [batch].
    """

    def __init__(self, x, label, f_len, y_len, batch_offset, frames):
        self.shape = (label.shape[0], frames, label.shape[1] + 1)
        self.classes = x.shape[-1]
        self.rows = x.reshape(-1, x.shape[-1])
        batch, _, labels = self.shape
        f_len, y_len, device = f_len.long(), y_len.long(), x.device
        bad = (f_len < 1) | (f_len > frames) | (y_len < 0) | (y_len >= labels)
        self.label = label.long()
        used = _count(0, labels - 1, device) < y_len[:, None]
        outside = ((self.label < 0) | (self.label >= x.shape[-1])) & used
        self.outside = outside.any(1)
        self.label = self.label.clamp(0, x.shape[-1] - 1)
        if batch_offset is None:
            first = _count(0, batch, device) * frames * labels
            stride = torch.full_like(first, labels)
        else:
            ends = batch_offset.long()
            first = torch.cat((ends.new_zeros(1), ends[:-1]))[:batch]
            stride = y_len + 1
            bad = bad | (first < 0) | (ends > len(x)) | (ends - first != f_len * stride)
        self.bad = bad
        self.t = _count(0, frames, device)[None, :, None]
        self.u = _count(0, labels, device)[None, None]
        self.there = (self.t < f_len[:, None, None]) & (self.u <= y_len[:, None, None]) & ~bad[:, None, None]
        row = first[:, None, None] + self.t * stride[:, None, None] + self.u
        self.row = row.masked_fill(~self.there, 0)
        self.last_frame = self.t == f_len[:, None, None] - 1
        self.last_label = self.u == y_len[:, None, None]
        self.bad_rows = self._rows_of(bad, batch_offset, frames)

    def _rows_of(self, bad, ends, frames):
        """Which rows of x belong to bad items."""
        batch, _, labels = self.shape
        if ends is None:
            return bad.repeat_interleave(frames * labels)
        row = _count(0, len(self.rows), bad.device)
        item = torch.searchsorted(ends.long(), row, right=True)
        return (item < batch) & bad[item.clamp(max=max(batch - 1, 0))] if batch else row < 0

    def log_p(self, normalizers):
        """[batch, frames, labels + 1, classes]: log p of each class at each node."""
        x = self.rows[self.row].to(_math_dtype(self.rows.dtype))
        if normalizers is None:
            return x
        largest, log_of_sum = normalizers.reshape(-1, 2)[self.row].unsqueeze(-2).unbind(-1)
        return x - largest - log_of_sum

    def label_index(self):
        """[batch, 1, labels + 1, 1]: the next label of each node; 0 behind the last."""
        return torch.nn.functional.pad(self.label, (0, 1))[:, None, :, None]


def _edges(lattice, log_p, blank_idx):
    """(log p of the blank, of the next label) of each node; -inf where there is none."""
    label = log_p.gather(-1, lattice.label_index().expand(*lattice.shape, 1)).squeeze(-1)
    blank = log_p[..., blank_idx].masked_fill(~lattice.there, -torch.inf)
    return blank, label.masked_fill(~lattice.there | lattice.last_label, -torch.inf)


def _log_add(a, b):
    """log(exp(a) + exp(b)) of whole numbers and rests, [..., 2]: sums of thousands keep a small rest's digits."""
    (a_whole, a_rest), (b_whole, b_rest) = a.unbind(-1), b.unbind(-1)
    more = (b_rest - a_rest) + (b_whole - a_whole)
    high = torch.where((more > 0).unsqueeze(-1), b, a)
    whole = high[..., 1].round()
    rest = (high[..., 1] - whole) + (-more.abs()).exp().log1p()
    none = (a_rest.isneginf() & b_rest.isneginf()).unsqueeze(-1)
    return torch.where(none, a, torch.stack((high[..., 0] + whole, rest), -1))


def _then(nodes, edge):
    """log p of ways to nodes, [..., 2], and along an edge from each."""
    return torch.stack((nodes[..., 0], nodes[..., 1] + edge), -1)


def _as_pair(rest):
    return torch.stack((torch.zeros_like(rest), rest), -1)


def _alpha(start, blank, label):
    """log p of all ways to each node, along the diagonals t + u: start where ways begin."""
    start = _as_pair(start)
    nodes = start.clone()
    _, frames, labels, _ = start.shape
    for d in range(1, frames + labels - 1):
        t = _count(max(0, d - labels + 1), min(frames - 1, d) + 1, start.device)
        u = d - t
        stay, go = (x[:, t.sub(dt).clamp(min=0), u.sub(du).clamp(min=0)] for x, dt, du in (
            (_then(nodes, blank), 1, 0), (_then(nodes, label), 0, 1),
        ))  # fmt: skip
        stay[..., 1].masked_fill_(t == 0, -torch.inf)
        go[..., 1].masked_fill_(u == 0, -torch.inf)
        nodes[:, t, u] = _log_add(_log_add(stay, go), start[:, t, u])
    return nodes


def _beta(end, blank, label):
    """log p of all ways from each node to the end: end where ways end."""
    end = _as_pair(end)
    nodes = end.clone()
    _, frames, labels, _ = end.shape
    for d in reversed(range(frames + labels - 2)):
        t = _count(max(0, d - labels + 1), min(frames - 1, d) + 1, end.device)
        u = d - t
        stay = _then(nodes[:, t.add(1).clamp(max=frames - 1), u], blank[:, t, u])
        go = _then(nodes[:, t, u.add(1).clamp(max=labels - 1)], label[:, t, u])
        stay[..., 1].masked_fill_(t == frames - 1, -torch.inf)
        go[..., 1].masked_fill_(u == labels - 1, -torch.inf)
        nodes[:, t, u] = _log_add(_log_add(stay, go), end[:, t, u])
    return nodes


def transducer_loss_forward(
    x, label, f_len, y_len, blank_idx, batch_offset=None, max_f_len=0, log_probs=False, half_to_float=False
):
    """(loss, alpha, beta, normalizers): -log of the labels' probability over all ways to spread them over the frames.

    x: [batch, frames, labels + 1, classes] logits, or packed [rows, classes] with batch_offset, [batch], the running
    sum of f_len * (y_len + 1), and max_f_len frames; float16, bfloat16, float32 or float64. With log_probs x holds
    logarithms of probabilities, softmax done. label: [batch, labels], f_len and y_len: [batch], int64 or int32.
    blank_idx: the class that goes to the next frame.

    loss: [batch], of x's dtype or float32 with half_to_float (float64 of float64). alpha, beta: [batch, frames,
    labels + 1, 2], float32 or float64: log p of all ways to a node, and from it to the end, as a whole number and a
    rest, whose sum it is; 0 where no item is. normalizers, [..., 2]: of each row the largest x, and the log of the sum
    of exp(x - largest); without elements with log_probs.

    Items whose lengths, rows or labels do not fit raise ValueError or IndexError on a CPU and are nan elsewhere.
    """
    _check(x, label, f_len, y_len, blank_idx, batch_offset, max_f_len)
    frames = max_f_len if batch_offset is not None else x.shape[1]
    _check_items(x, label, f_len, y_len, batch_offset, frames)
    lattice = _Lattice(x, label, f_len, y_len, batch_offset, frames)
    math = _math_dtype(x.dtype)
    loss_dtype = math if half_to_float else x.dtype
    batch = len(label)
    if log_probs:
        normalizers = x.new_empty(0, dtype=math)
    else:
        rows = lattice.rows.to(math)
        largest = rows.amax(-1, keepdim=True)
        normalizers = torch.cat((largest, (rows - largest).logsumexp(-1, keepdim=True)), -1)
        used = torch.zeros(len(lattice.rows) + 1, dtype=torch.bool, device=x.device)
        used[torch.where(lattice.there, lattice.row, len(lattice.rows)).flatten()] = True
        normalizers = normalizers.masked_fill(~used[:-1, None], 0).reshape(*x.shape[:-1], 2)
    alpha, beta = (x.new_zeros((*lattice.shape, 2), dtype=math) for _ in range(2))
    if batch == 0 or frames == 0 or len(lattice.rows) == 0:
        return x.new_full((batch,), torch.nan, dtype=loss_dtype), alpha, beta, normalizers
    blank, go = _edges(lattice, lattice.log_p(None if log_probs else normalizers), blank_idx)
    there = lattice.there
    begin = _log_of((lattice.t == 0) & (lattice.u == 0) & there, math)
    end = blank.masked_fill(~(lattice.last_frame & lattice.last_label & there), -torch.inf)
    stay = blank.masked_fill(lattice.last_frame, -torch.inf)
    alpha = _alpha(begin, stay, go).masked_fill(~there.unsqueeze(-1), 0)
    beta = _beta(end, stay, go).masked_fill(~there.unsqueeze(-1), 0)
    loss = (-beta[:, 0, 0].sum(-1)).masked_fill(lattice.bad | lattice.outside, torch.nan)
    return loss.to(loss_dtype), alpha, beta, normalizers


def transducer_loss_backward(
    grad_loss, x, label, f_len, y_len, alpha, beta, normalizers, blank_idx, batch_offset, of_logits
):
    """The gradient of x, of its shape and dtype; 0 in rows that no item has.

    normalizers: the forward's, where x are logits; None where they are logarithms of probabilities. of_logits: the
    gradient of the logits (behind these logarithms, if there are no normalizers), else that of the logarithms.
    """
    _check(x, label, f_len, y_len, blank_idx, batch_offset, alpha.shape[1])
    if normalizers is not None and not of_logits:
        raise ValueError("transducer_loss: with normalizers the gradient is that of logits")
    frames = alpha.shape[1]
    _check_items(x, label, f_len, y_len, batch_offset, frames)
    lattice = _Lattice(x, label, f_len, y_len, batch_offset, frames)
    math = _math_dtype(x.dtype)
    gradient = lattice.rows.new_zeros((len(lattice.rows) + 1, x.shape[-1]), dtype=math)  # the last: of no row
    if lattice.row.numel() and len(lattice.rows):
        log_p = lattice.log_p(normalizers)
        blank, go = _edges(lattice, log_p, blank_idx)
        g = grad_loss.to(math)[:, None, None]
        before = alpha - beta[:, :1, :1]  # given the labels
        next_frame = torch.cat((beta[:, 1:], torch.zeros_like(beta[:, :1])), 1)
        out = _log_of(lattice.last_label, math)
        onward = torch.where(lattice.last_frame.unsqueeze(-1), _as_pair(out), next_frame)
        of_blank = (_then(before + onward, blank).sum(-1)).exp() * g
        next_label = torch.cat((beta[:, :, 1:], torch.zeros_like(beta[:, :, :1])), 2)
        of_label = (_then(before + next_label, go).sum(-1).exp() * g).masked_fill(lattice.last_label, 0.0)
        each = torch.zeros_like(log_p)
        if of_logits:
            each = (log_p + (before + beta).sum(-1, keepdim=True)).exp() * g.unsqueeze(-1)
        each[..., blank_idx] -= of_blank
        index = lattice.label_index().expand(*lattice.shape, 1)
        each = each.scatter_add(-1, index, -of_label.unsqueeze(-1))
        each = each.masked_fill(lattice.outside.view(-1, 1, 1, 1), torch.nan)
        gradient[torch.where(lattice.there, lattice.row, len(lattice.rows)).flatten()] = each.flatten(0, 2)
    gradient = gradient[:-1].masked_fill(lattice.bad_rows.unsqueeze(-1), torch.nan)
    return gradient.to(x.dtype).reshape(x.shape)


class _Pair:
    """How autograd and autocast treat the pair where no binding fits this torch."""

    name = "transducer_loss"

    def setup_context(self, ctx, inputs, output):
        """Keeps what the backward needs."""
        x, label, f_len, y_len, blank_idx, batch_offset, _, log_probs, _ = inputs
        _, alpha, beta, normalizers = output
        ctx.mark_non_differentiable(*output[1:])
        kept = None if log_probs else normalizers
        ctx.save_for_backward(x, label, f_len, y_len, alpha, beta, kept, batch_offset)
        ctx.known = (blank_idx, not log_probs)
        ctx.set_materialize_grads(False)

    def backward(self, ctx, grad_loss, *_):
        """Gradients of the forward's inputs, through the backward op."""
        if grad_loss is None:
            return (None,) * 9
        *saved, batch_offset = ctx.saved_tensors
        blank_idx, of_logits = ctx.known
        gradient = torch.ops.apex.transducer_loss_backward(
            grad_loss, *saved, blank_idx, batch_offset, of_logits
        )
        return (gradient, *(None,) * 8)

    def setup_double_context(self, ctx, inputs, output):
        """Keeps nothing."""

    def double_backward(self, ctx, gradient):
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "apex transducer_loss: the gradient of its gradient (double backward) is not implemented"
        )

    def autocast(self, device_type, arguments, keywords):
        """Arguments of the forward as autocast changes them: losses are float32."""
        names = (
            "x", "label", "f_len", "y_len", "blank_idx", "batch_offset", "max_f_len", "log_probs",
            "half_to_float",
        )  # fmt: skip
        return dict(zip(names, arguments, strict=False)) | keywords | {"half_to_float": True}


PAIRS = (_Pair(),)


# ---- shapes alone, for tracers: the formulas above would bind a compiled graph to one number of frames ----


def _shapes_forward(
    x, label, f_len, y_len, blank_idx, batch_offset=None, max_f_len=0, log_probs=False, half_to_float=False
):
    _check(x, label, f_len, y_len, blank_idx, batch_offset, max_f_len)
    math, frames = _math_dtype(x.dtype), x.shape[1] if batch_offset is None else max_f_len
    nodes = (label.shape[0], frames, label.shape[1] + 1, 2)
    loss = x.new_empty(label.shape[0], dtype=math if half_to_float else x.dtype)
    normalizers = x.new_empty(0 if log_probs else (*x.shape[:-1], 2), dtype=math)
    return loss, x.new_empty(nodes, dtype=math), x.new_empty(nodes, dtype=math), normalizers


def _shapes_backward(
    grad_loss, x, label, f_len, y_len, alpha, beta, normalizers, blank_idx, batch_offset, of_logits
):
    return x.new_empty(x.shape)


SHAPES = {"transducer_loss_forward": _shapes_forward, "transducer_loss_backward": _shapes_backward}
