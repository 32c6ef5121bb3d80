"""The computation of Bottleneck.

Its input x goes into the first convolution and into the shortcut. autograd would make both gradients of x and add them
in a pass of its own; Fork has the product that makes one of them add it to the other.
"""

from __future__ import annotations

import torch

from apex import amp
from apex._functional import is_autocast_enabled, is_traced
from apex._once import in_given_dtypes
from apex.contrib.conv_bias_relu.conv_bias_relu import _conv, _flat

_backward = torch.ops.apex.conv_bias_relu_backward.default
# Numbers of x from which on Fork is taken where a CUDA graph or torch.compile records it, which pays for its Python
# once. In eager calls it takes longer than the pass that it saves, at every size that was measured.
SMALLEST = 1 << 24


def block(stride, scales, biases, x, weights):
    """The block's output [batch, channels, height, width] of x; scales and biases get no gradients."""
    scales, biases = ([_numbers(t) for t in numbers] for numbers in (scales, biases))
    # (weight, scale, bias) of the first convolution, and of the shortcut's if there is one
    forked = [t for i in range(0, len(weights), 3) for t in (weights[i], scales[i], biases[i])]
    first, shortcut = (_fork if _is_forked(x, forked) else _both)(stride, x, *forked)
    second = _conv(first, weights[1], scales[1], biases[1], None, None, 1, 1, True)
    return _conv(second, weights[2], scales[2], biases[2], shortcut, None, 0, 1, True)


def _numbers(of_channels):
    flat = _flat(of_channels)
    return flat.detach() if flat.requires_grad else flat


def _both(stride, x, weight, scale, bias, *of_shortcut):
    """(what the first ReLU gives, the shortcut)"""
    first = _conv(x, weight, scale, bias, None, None, 0, stride, True)
    if not of_shortcut:
        return first, x
    return first, _conv(x, *of_shortcut, None, None, 0, stride, False)


def _is_recorded(x):
    """Whether Python's time is none of a step's: it makes a graph."""
    return torch.compiler.is_compiling() or x.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_forked(x, forked):
    """Whether x gets a gradient, whose pixels are rows of a product's matrix, and nothing traces or transforms."""
    if not (torch.is_grad_enabled() and x.requires_grad and x.numel() >= SMALLEST and _is_recorded(x)):
        return False
    compiles = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    if not compiles and (is_traced() or torch._C._functorch.maybe_current_level() is not None):
        return False
    if torch.overrides.has_torch_function((x, *forked)) or x.dim() != 4:
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and all(
        weight.dim() == 4 and weight.shape[2] == weight.shape[3] == 1 for weight in forked[::3]
    )


@amp.half_function
def _fork(stride, x, *forked):
    """_both by Fork, of what amp and autocast give a convolution."""
    kind = x.device.type
    if is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, *forked = (
            t.to(dtype) if i in (0, 1, 4) and t.dtype != torch.float64 else t
            for i, t in enumerate((x, *forked))
        )
    return Fork.apply(stride, x, *forked)


class Fork(torch.autograd.Function):
    """_both, of 1x1 convolutions; the gradient of x is one product that is added to the shortcut's gradient."""

    @staticmethod
    def forward(ctx, stride, x, *forked):
        first, shortcut = _both(stride, x, *forked)
        ctx.stride = stride
        ctx.save_for_backward(first, x, *forked)
        return first, shortcut

    @staticmethod
    def backward(ctx, grad, of_shortcut):
        first, x, *forked = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        with in_given_dtypes(x.device.type):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                return None, *_recorded(ctx.stride, x, forked, (grad, of_shortcut), needed)
            return None, *_gradients(ctx.stride, x, forked, first, grad, of_shortcut, needed)


def _recorded(stride, x, forked, grads, needed):
    """The gradients by autograd, which records them: somebody wants theirs."""
    wanted = [t for t, is_needed in zip((x, *forked), needed, strict=True) if is_needed]
    made = iter(torch.autograd.grad(_both(stride, x, *forked), wanted, grads, create_graph=True))
    return [next(made) if is_needed else None for is_needed in needed]


def _gradients(stride, x, forked, first, grad, of_shortcut, needed):
    of_x, *of_rest = needed
    weight, scale, _, *other = forked
    found = [None] * len(needed)
    if of_x or of_rest[0]:
        arguments = (grad, x, weight, scale, None, first, stride, 0, False, of_rest[0], False, of_x)
        _, of_weight, _, grad = _backward(*arguments)  # now behind the norm
        found[1] = of_weight if of_rest[0] else None
    if other and of_rest[3]:
        arguments = (of_shortcut, x, other[0], other[1], None, None, stride, 0, False, True, False, False)
        found[4] = _backward(*arguments)[1]
    if of_x:
        found[0] = _of_input(stride, x, forked, grad, of_shortcut)
    return found


def _rows(tensor):
    """[batch * height * width, channels]; the same memory in torch.channels_last."""
    return tensor.permute(0, 2, 3, 1).reshape(-1, tensor.shape[1])


def _of_input(stride, x, forked, grad, of_shortcut):
    """The gradient of x, of what the norms give; takes the memory of of_shortcut."""
    # Scaled weights, a few numbers, stand for scaled gradients.
    products = [
        (w.flatten(1) * s.unsqueeze(1)).to(x.dtype) for w, s in zip(forked[::3], forked[1::3], strict=True)
    ]
    total = _rows(of_shortcut) if len(products) == 1 else _rows(of_shortcut) @ products[1]
    if torch.compiler.is_compiling():
        total = torch.addmm(total, _rows(grad), products[0])
    else:
        total.addmm_(_rows(grad), products[0])
    batch, _, height, width = grad.shape
    made = total.view(batch, height, width, x.shape[1]).permute(0, 3, 1, 2)
    if stride == 1:
        return made
    spread = torch.zeros_like(x, memory_format=torch.channels_last)
    spread[:, :, ::stride, ::stride] = made
    return spread
