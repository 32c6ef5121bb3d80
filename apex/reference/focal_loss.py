"""Sigmoid focal loss in plain PyTorch."""

import torch
import torch.nn.functional as F

IGNORED = -2  # the target of an example that does not count


def _check(logits, targets, num_positives, num_real_classes, smoothing):
    """Raises TypeError or ValueError, as the bindings do."""
    if not logits.dtype.is_floating_point:
        raise TypeError(f"focal_loss takes float32, float16, bfloat16 and float64, not {logits.dtype}")
    if logits.dim() < 1 or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"focal_loss: logits of shape {list(logits.shape)} need targets of the same shape without the last "
            f"dimension, not {list(targets.shape)}"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"focal_loss: targets are int64 or int32, not {targets.dtype}")
    if num_positives.numel() != 1 or not num_positives.is_floating_point():
        raise ValueError("focal_loss: num_positives_sum is a floating-point tensor of one element")
    if not 0 <= num_real_classes <= logits.shape[-1]:
        raise ValueError(
            f"focal_loss: {num_real_classes} real classes do not fit logits of shape {list(logits.shape)}"
        )
    if not 0 <= smoothing <= 1:
        raise ValueError(f"focal_loss: label_smoothing must be between 0 and 1, not {smoothing}")


class _Terms:
    """What loss and gradient share, of the real classes."""

    def __init__(self, logits, targets, num_real_classes, alpha, gamma, smoothing):
        self.math = torch.float64 if logits.dtype == torch.float64 else torch.float32
        x = logits[..., :num_real_classes].to(self.math)
        classes = torch.arange(num_real_classes, dtype=torch.int64, device=logits.device)
        self.positive = targets.unsqueeze(-1) == classes
        self.counts = (targets != IGNORED).unsqueeze(-1)
        self.p = torch.sigmoid(x)
        self.q = torch.sigmoid(-x)
        minus_log_p, minus_log_q = F.softplus(-x, threshold=1e9), F.softplus(x, threshold=1e9)
        exponent = (
            torch.where(self.positive, minus_log_q, minus_log_p) * gamma if gamma else torch.zeros_like(x)
        )
        self.factor = self._select(alpha, 1 - alpha) * torch.exp(-exponent)
        self.target = self._select(1 - smoothing / 2, smoothing / 2)
        zero = torch.zeros_like(x)
        self.entropy = torch.where(self.target == 1, zero, (1 - self.target) * minus_log_q)
        self.entropy = self.entropy + torch.where(self.target == 0, zero, self.target * minus_log_p)
        self.slope = torch.where(self.positive, -gamma * self.p, gamma * self.q)
        half = smoothing / 2
        self.of_entropy = torch.where(
            self.positive, half - self.q, self.p - half
        )  # p - target, which cancels

    def _select(self, of_positives, of_negatives):
        """One number or the other, in full precision: torch.where makes two numbers float32."""
        values = self.p.new_full((), of_positives), self.p.new_full((), of_negatives)
        return torch.where(self.positive, *values)


def focal_loss_forward(logits, targets, num_positives, num_real_classes, alpha, gamma, smoothing=0.0):
    """The loss, one float32 (float64 for float64): the sum over examples and real classes / num_positives.

    logits: [..., classes], float16, bfloat16, float32 or float64; classes from num_real_classes on are padding.
    targets: [...], int64 or int32: a class, -1 for background, -2 for examples that do not count.
    num_positives: one element. Of each logit: weight * (1 - p_t)^gamma * cross entropy with the target smoothed
    to 1 - smoothing / 2 or smoothing / 2; the weight is alpha for the target, 1 - alpha for other classes.
    Raises TypeError and ValueError.
    """
    _check(logits, targets, num_positives, num_real_classes, smoothing)
    t = _Terms(logits, targets, num_real_classes, alpha, gamma, smoothing)
    return (t.factor * t.entropy).masked_fill(~t.counts, 0).sum() / num_positives.reshape(()).to(t.math)


def focal_loss_backward(
    grad_loss, logits, targets, num_positives, num_real_classes, alpha, gamma, smoothing=0.0
):
    """The gradient of the logits, of their shape and dtype; 0 for padding and for what does not count."""
    _check(logits, targets, num_positives, num_real_classes, smoothing)
    t = _Terms(logits, targets, num_real_classes, alpha, gamma, smoothing)
    scale = (grad_loss.to(t.math) / num_positives.to(t.math)).reshape(())
    gradient = t.factor * (t.slope * t.entropy + t.of_entropy) * scale
    padding = logits.shape[-1] - num_real_classes
    return F.pad(gradient.masked_fill(~t.counts, 0), (0, padding)).to(logits.dtype).contiguous()


class _Pair:
    """How autograd treats the pair where no binding fits this torch."""

    name = "focal_loss"

    def setup_context(self, ctx, inputs, output):
        """Keeps the inputs."""
        ctx.save_for_backward(*inputs[:3])
        ctx.known = inputs[3:]

    def backward(self, ctx, grad_loss):
        """Gradients of the forward's inputs, through the backward op."""
        gradient = torch.ops.apex.focal_loss_backward(grad_loss, *ctx.saved_tensors, *ctx.known)
        return (gradient, *(None,) * 6)

    def setup_double_context(self, ctx, inputs, output):
        """Keeps nothing."""

    def double_backward(self, ctx, gradient):
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "apex focal_loss: the gradient of its gradient (double backward) is not implemented"
        )

    def autocast(self, device_type, arguments, keywords):
        """Nothing changes: arithmetic and loss are float32 whatever the logits are."""
        names = ("logits", "targets", "num_positives", "num_real_classes", "alpha", "gamma", "smoothing")
        return dict(zip(names, arguments, strict=False)) | keywords


PAIRS = (_Pair(),)
