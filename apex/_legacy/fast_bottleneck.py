"""The functions of public apex's fast_bottleneck. They record no gradients, as there, and keep no state between calls.

Tensors come in lists, as there. `inputs` of the forward: [x, weights 1 to 3, scales 1 to 3, biases 1 to 3], and where
the shortcut has a convolution its [weight, scale, bias]; of the backward: the first ten of these, [gradient of the
third convolution, gradient of the shortcut, out1, out2], and the shortcut's weight. With explicit_nhwc tensors are
[batch, height, width, channels], else [batch, channels, height, width]; scales and biases of any shape. out1 and out2
are what the ReLUs behind the first two convolutions give. stride_1X1: of the first convolution and the shortcut's.

Functions of one step write their results to `outputs`, which forward_init and backward_init make, or return them.
Those with `halo`, `pad` and `mask` are for images that several ranks have strips of.
"""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex._loader import bindings
from apex._plain import contiguous

bindings.load()
_ops, _aten = torch.ops.apex, torch.ops.aten
__all__ = [
    "backward",
    "backward_grad_out1",
    "backward_grad_out1_halo",
    "backward_grad_out1_halo_corr",
    "backward_grad_out1_mask",
    "backward_grad_out2",
    "backward_init",
    "backward_rest",
    "backward_wgrad1",
    "backward_wgrad2",
    "backward_wgrad2_halo",
    "backward_wgrad2_pad",
    "backward_wgrad3",
    "forward",
    "forward_init",
    "forward_out1",
    "forward_out2",
    "forward_out2_halo",
    "forward_out2_halo_corr",
    "forward_out2_mask",
    "forward_out2_pad",
    "forward_rest",
]


# ---- layouts, and the steps ------------------------------------------------------------------------------------------


def _nchw(explicit_nhwc, tensor):
    """A view of it as [batch, channels, height, width]."""
    return tensor.permute(0, 3, 1, 2) if explicit_nhwc else tensor


def _as_given(explicit_nhwc, tensor):
    """[batch, channels, height, width] in the caller's layout."""
    return contiguous(tensor.permute(0, 2, 3, 1)) if explicit_nhwc else tensor


def _of_forward(explicit_nhwc, inputs):
    """(x, weights, scales, biases); the last weight, scale and bias are the shortcut's, if there is one."""
    x, *weights = (_nchw(explicit_nhwc, t) for t in inputs[:4])
    scales, biases = ([t.reshape(-1) for t in inputs[i : i + 3]] for i in (4, 7))
    if len(inputs) > 10:
        weights.append(_nchw(explicit_nhwc, inputs[10]))
        scales.append(inputs[11].reshape(-1))
        biases.append(inputs[12].reshape(-1))
    return x, weights, scales, biases


def _of_backward(explicit_nhwc, inputs):
    """(x, weights, scales, gradient of the third convolution, of the shortcut, out1, out2)"""
    x, *weights = (_nchw(explicit_nhwc, t) for t in (*inputs[:4], *inputs[14:15]))
    grad3, grad4, out1, out2 = (_nchw(explicit_nhwc, t) for t in inputs[10:14])
    return x, weights, [t.reshape(-1) for t in inputs[4:7]], grad3, grad4, out1, out2


def _layer(x, weight, scale, bias, stride=1, padding=0, residual=None, relu=True):
    return _ops.conv_bias_relu_forward(x, weight, scale, bias, residual, None, stride, padding, relu)


def _convolved(x, weight, padding):
    """padding: (of height, of width)."""
    return _aten.convolution(x, weight, None, [1, 1], padding, [1, 1], False, [0, 0], 1)


def _finished(x, scale, bias):
    """relu(x * scale + bias) of the channels, in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.relu(wide * scale.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)).to(x.dtype)


def _gradients(grad, x, weight, stride, padding, of_input, of_weight):
    """(gradient of x, of the weight), None where not wanted. padding: a number, or (of height, of width)."""
    padding = [padding] * 2 if isinstance(padding, int) else padding
    wanted = [of_input, of_weight, False]
    return _aten.convolution_backward(
        grad, x, weight, None, [stride] * 2, padding, [1, 1], False, [0, 0], 1, wanted
    )[:2]


def _of_input(grad, like, weight, padding=0):
    return _gradients(grad, like, weight, 1, padding, True, False)[0]


def _of_weight(grad, x, weight, stride=1, padding=0):
    return _gradients(grad, x, weight, stride, padding, False, True)[1]


def _behind(grad, output, scale):
    """What of a gradient passes the ReLU that gave `output`, and the scale before it."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32)) * scale.view(1, -1, 1, 1)
    return wide.masked_fill(~(output > 0), 0).to(grad.dtype)


def _write(explicit_nhwc, into, tensor):
    """Writes [batch, channels, height, width] to a caller's tensor."""
    _nchw(explicit_nhwc, into).copy_(tensor)


def _outside(tensor, top, bottom):
    """Which rows of [batch, channels, rows, columns] lie above `top` or below `bottom`, tensors of one int."""
    rows = torch.arange(tensor.shape[2], dtype=torch.int64, device=tensor.device).view(1, 1, -1, 1)
    return (rows < top) | (rows > bottom)


# ---- forward ---------------------------------------------------------------------------------------------------------


@_raw
def forward(explicit_nhwc, stride_1X1, inputs):
    """[out1, out2, the block's output]"""
    x, weights, scales, biases = _of_forward(explicit_nhwc, inputs)
    out1 = _layer(x, weights[0], scales[0], biases[0], stride_1X1)
    out2 = _layer(out1, weights[1], scales[1], biases[1], padding=1)
    out3 = _last(x, out2, weights, scales, biases, stride_1X1)
    return [_as_given(explicit_nhwc, out) for out in (out1, out2, out3)]


def _last(x, out2, weights, scales, biases, stride):
    """The block's output from its input and out2."""
    if len(weights) > 3:
        x = _layer(x, weights[3], scales[3], biases[3], stride, relu=False)
    return _layer(out2, weights[2], scales[2], biases[2], residual=x)


@_raw
def forward_init(explicit_nhwc, stride_1X1, inputs):
    """[out1, out2, the block's output], without their values"""
    x, weights, _, _ = _of_forward(explicit_nhwc, inputs)
    height, width = ((size - 1) // stride_1X1 + 1 for size in x.shape[2:])
    shapes = [(x.shape[0], weight.shape[0], height, width) for weight in weights[:3]]
    made = [x.new_empty(shape).to(memory_format=torch.channels_last) for shape in shapes]
    return [_as_given(explicit_nhwc, out) for out in made]


@_raw
def forward_out1(explicit_nhwc, stride_1X1, inputs, outputs):
    """Writes out1, outputs[0]."""
    x, weights, scales, biases = _of_forward(explicit_nhwc, inputs)
    _write(explicit_nhwc, outputs[0], _layer(x, weights[0], scales[0], biases[0], stride_1X1))


@_raw
def forward_out2(explicit_nhwc, stride_1X1, inputs, outputs):
    """Writes out2, outputs[1], from out1."""
    _, weights, scales, biases = _of_forward(explicit_nhwc, inputs)
    out1 = _nchw(explicit_nhwc, outputs[0])
    _write(explicit_nhwc, outputs[1], _layer(out1, weights[1], scales[1], biases[1], padding=1))


@_raw
def forward_out2_mask(explicit_nhwc, stride_1X1, inputs, outputs, thresholdTop, thresholdBottom):
    """Writes out2 from out1; rows above thresholdTop and below thresholdBottom get the convolution alone, to which
    forward_out2_halo_corr adds the neighbour's part. Thresholds: integer tensors of one element."""
    _, weights, scales, biases = _of_forward(explicit_nhwc, inputs)
    x = _convolved(_nchw(explicit_nhwc, outputs[0]), weights[1], [1, 1])
    outside = _outside(x, thresholdTop, thresholdBottom)
    _write(explicit_nhwc, outputs[1], torch.where(outside, x, _finished(x, scales[1], biases[1])))


@_raw
def forward_out2_halo(explicit_nhwc, fat_halo_y1, inputs):
    """The row of out2 in the middle of three rows of out1"""
    _, weights, scales, biases = _of_forward(explicit_nhwc, inputs)
    x = _convolved(_nchw(explicit_nhwc, fat_halo_y1), weights[1], [0, 1])
    return _as_given(explicit_nhwc, _finished(x, scales[1], biases[1]))


@_raw
def forward_out2_halo_corr(explicit_nhwc, slim_halo_y1, inputs, w1by3, out2_part_halo):
    """A row of out2 from its convolution without the neighbour's row of out1, and this row. w1by3: that row of the
    second weight."""
    _, _, scales, biases = _of_forward(explicit_nhwc, inputs)
    row, weight, part = (_nchw(explicit_nhwc, t) for t in (slim_halo_y1, w1by3, out2_part_halo))
    return _as_given(explicit_nhwc, _finished(_convolved(row, weight, [0, 1]) + part, scales[1], biases[1]))


@_raw
def forward_out2_pad(explicit_nhwc, stride_1X1, inputs, outputs, out1_pad):
    """Writes out2 from out1 with a row of each neighbour around it."""
    _, weights, scales, biases = _of_forward(explicit_nhwc, inputs)
    x = _convolved(_nchw(explicit_nhwc, out1_pad), weights[1], [0, 1])
    _write(explicit_nhwc, outputs[1], _finished(x, scales[1], biases[1]))


@_raw
def forward_rest(explicit_nhwc, stride_1X1, inputs, outputs):
    """Writes the block's output, outputs[2], from out2."""
    x, *parameters = _of_forward(explicit_nhwc, inputs)
    _write(explicit_nhwc, outputs[2], _last(x, _nchw(explicit_nhwc, outputs[1]), *parameters, stride_1X1))


# ---- backward --------------------------------------------------------------------------------------------------------


@_raw
def backward(explicit_nhwc, stride_1X1, inputs):
    """[gradient of x, of the weights 1 to 3, and of the shortcut's if there is one]"""
    outputs = backward_init(explicit_nhwc, stride_1X1, inputs)
    backward_wgrad3(explicit_nhwc, stride_1X1, inputs, outputs)
    grad_out2 = backward_grad_out2(explicit_nhwc, stride_1X1, inputs, outputs)
    backward_wgrad2(explicit_nhwc, stride_1X1, inputs, outputs, grad_out2)
    grad_out1 = backward_grad_out1(explicit_nhwc, stride_1X1, inputs, outputs, grad_out2)
    backward_wgrad1(explicit_nhwc, stride_1X1, inputs, outputs, grad_out1)
    backward_rest(explicit_nhwc, stride_1X1, inputs, outputs, grad_out2, grad_out1)
    return outputs


@_raw
def backward_init(explicit_nhwc, stride_1X1, inputs):
    """What `backward` returns, without its values"""
    return [torch.empty_like(t) for t in (*inputs[:4], *inputs[14:15])]


@_raw
def backward_wgrad3(explicit_nhwc, stride_1X1, inputs, outputs):
    """Writes the third weight's gradient, outputs[3]."""
    _, weights, _, grad3, _, _, out2 = _of_backward(explicit_nhwc, inputs)
    _write(explicit_nhwc, outputs[3], _of_weight(grad3, out2, weights[2]))


@_raw
def backward_grad_out2(explicit_nhwc, stride_1X1, inputs, outputs):
    """The gradient of the second convolution"""
    _, weights, scales, grad3, _, _, out2 = _of_backward(explicit_nhwc, inputs)
    return _as_given(explicit_nhwc, _behind(_of_input(grad3, out2, weights[2]), out2, scales[1]))


@_raw
def backward_grad_out1(explicit_nhwc, stride_1X1, inputs, outputs, grad_out2):
    """The gradient of the first convolution from that of the second"""
    _, weights, scales, _, _, out1, _ = _of_backward(explicit_nhwc, inputs)
    grad = _of_input(_nchw(explicit_nhwc, grad_out2), out1, weights[1], 1)
    return _as_given(explicit_nhwc, _behind(grad, out1, scales[0]))


@_raw
def backward_grad_out1_mask(
    explicit_nhwc, stride_1X1, inputs, outputs, grad_out2, thresholdTop, thresholdBottom
):
    """As backward_grad_out1; rows above thresholdTop and below thresholdBottom are out1's gradient by this rank's part
    of grad_out2, to which backward_grad_out1_halo_corr adds the neighbour's."""
    _, weights, scales, _, _, out1, _ = _of_backward(explicit_nhwc, inputs)
    grad = _of_input(_nchw(explicit_nhwc, grad_out2), out1, weights[1], 1)
    outside = _outside(grad, thresholdTop, thresholdBottom)
    return _as_given(explicit_nhwc, torch.where(outside, grad, _behind(grad, out1, scales[0])))


@_raw
def backward_grad_out1_halo(explicit_nhwc, stride_1X1, inputs, outputs, grad_out2_halo, relu1_halo):
    """The first convolution's gradient in three rows, from three rows of the second's and of out1"""
    _, weights, scales, *_ = _of_backward(explicit_nhwc, inputs)
    grad, out1 = (_nchw(explicit_nhwc, t) for t in (grad_out2_halo, relu1_halo))
    return _as_given(explicit_nhwc, _behind(_of_input(grad, out1, weights[1], 1), out1, scales[0]))


@_raw
def backward_grad_out1_halo_corr(
    explicit_nhwc, stride_1X1, inputs, w1by3, outputs, grad_out2_halo, relu1_halo, part_grad_out1
):
    """A row of the first convolution's gradient from out1's gradient by this rank alone, and the neighbour's row of the
    second's. w1by3: the row of the second weight that leads there."""
    _, _, scales, *_ = _of_backward(explicit_nhwc, inputs)
    weight, grad, out1, part = (
        _nchw(explicit_nhwc, t) for t in (w1by3, grad_out2_halo, relu1_halo, part_grad_out1)
    )
    return _as_given(explicit_nhwc, _behind(_of_input(grad, out1, weight, [0, 1]) + part, out1, scales[0]))


@_raw
def backward_wgrad2(explicit_nhwc, stride_1X1, inputs, outputs, grad_out2):
    """Writes the second weight's gradient, outputs[2]."""
    _, weights, _, _, _, out1, _ = _of_backward(explicit_nhwc, inputs)
    grad = _nchw(explicit_nhwc, grad_out2)
    _write(explicit_nhwc, outputs[2], _of_weight(grad, out1, weights[1], padding=1))


@_raw
def backward_wgrad2_pad(explicit_nhwc, stride_1X1, inputs, outputs, input, grad_out2):
    """Writes the second weight's gradient, outputs[2]. input: out1 with a row of each neighbour around it."""
    _, weights, *_ = _of_backward(explicit_nhwc, inputs)
    x, grad = (_nchw(explicit_nhwc, t) for t in (input, grad_out2))
    _write(explicit_nhwc, outputs[2], _of_weight(grad, x, weights[1], padding=[0, 1]))


@_raw
def backward_wgrad2_halo(explicit_nhwc, stride_1X1, inputs, outputs, input, grad_out2_halo):
    """The gradient of one row of the second weight, from a row of out1 and one of the second convolution's gradient"""
    _, weights, *_ = _of_backward(explicit_nhwc, inputs)
    x, grad = (_nchw(explicit_nhwc, t) for t in (input, grad_out2_halo))
    return _as_given(explicit_nhwc, _of_weight(grad, x, weights[1][:, :, :1], padding=[0, 1]))


@_raw
def backward_wgrad1(explicit_nhwc, stride_1X1, inputs, outputs, grad_out1):
    """Writes the first weight's gradient, outputs[1]."""
    x, weights, *_ = _of_backward(explicit_nhwc, inputs)
    grad = _nchw(explicit_nhwc, grad_out1)
    _write(explicit_nhwc, outputs[1], _of_weight(grad, x, weights[0], stride_1X1))


@_raw
def backward_rest(explicit_nhwc, stride_1X1, inputs, outputs, grad_out2, grad_out1):
    """Writes x's gradient, outputs[0], and that of the shortcut's weight, outputs[4], if there is one."""
    x, weights, _, _, grad4, _, _ = _of_backward(explicit_nhwc, inputs)
    if len(weights) > 3:
        grad4, of_weight = _gradients(grad4, x, weights[3], stride_1X1, 0, True, True)
        _write(explicit_nhwc, outputs[4], of_weight)
    grad = _nchw(explicit_nhwc, grad_out1)
    _write(explicit_nhwc, outputs[0], _gradients(grad, x, weights[0], stride_1X1, 0, True, False)[0] + grad4)
