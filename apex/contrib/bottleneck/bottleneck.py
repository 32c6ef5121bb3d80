"""Bottleneck and FrozenBatchNorm2d, with public apex's names: each convolution with its frozen batch norm, the addition
of the shortcut and the ReLU behind it in one pass (apex.contrib.conv_bias_relu has the convolutions alone).

Source: K. He, X. Zhang, S. Ren and J. Sun, "Deep Residual Learning for Image Recognition", arXiv:1512.03385.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from apex import _symbolic as symbolic
from apex._functional import Function, is_traced
from apex._legacy import absent
from apex.contrib.bottleneck._block import block

__getattr__ = absent.attributes_of(__name__)


def kaiming_uniform_(
    tensor: torch.Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> None:
    """torch.nn.init.kaiming_uniform_ of a weight [outputs, inputs, rows, columns]."""
    nn.init.kaiming_uniform_(tensor, a=a, mode=mode, nonlinearity=nonlinearity)


class FrozenBatchNorm2d(nn.Module):
    """Batch norm whose statistics, weight and bias are buffers: nothing of it is trained, and no eps is added.

    Args:
        n: channels.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        for name, make in (
            ("weight", torch.ones),
            ("bias", torch.zeros),
            ("running_mean", torch.zeros),
            ("running_var", torch.ones),
        ):
            self.register_buffer(name, make(n))

    def get_scale_bias(self, nhwc: bool) -> list[torch.Tensor]:
        """[scale, bias] of the channels, so that the norm of x is x * scale + bias; [1, 1, 1, n] if nhwc, else
        [1, n, 1, 1]."""
        shape = (1, 1, 1, -1) if nhwc else (1, -1, 1, 1)
        return [found[0].reshape(shape) for found in _scales_and_biases([self])]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x, [batch, n, height, width]."""
        node = symbolic.leaf(self, x)
        if node is not None:
            return node
        scale, bias = self.get_scale_bias(False)
        return x * scale + bias


def _scales_and_biases(norms):
    """(scales, biases) of frozen batch norms, three kernels however many there are.

    What traces fuses plain operations by itself, or, as ONNX, knows no others.
    """
    names, find = ("weight", "bias", "running_mean", "running_var"), _finder()
    numbers = [[find(norm, "_buffers", name) for norm in norms] for name in names]
    if torch.is_grad_enabled() and any(t.requires_grad for of_all in numbers for t in of_all):
        with torch.no_grad():
            return _of_numbers(*numbers)
    return _of_numbers(*numbers)


def _of_numbers(weights, biases, means, variances):
    if is_traced():
        scales = [w * v.rsqrt() for w, v in zip(weights, variances, strict=True)]
        triples = zip(biases, means, scales, strict=True)
        return scales, [torch.addcmul(b, m, s, value=-1) for b, m, s in triples]
    scales = torch._foreach_mul(weights, torch._foreach_rsqrt(variances))
    return scales, torch._foreach_addcmul(biases, means, scales, value=-1)


def _at_hand(module, where, name):
    """module.name, without nn.Module's search for it, which takes longer than some kernels; `where`: its dict."""
    found = module.__dict__[where].get(name)
    return getattr(module, name) if found is None else found


def _searched(module, where, name):
    return getattr(module, name)


def _finder():
    """_at_hand, or what does the same and may be traced."""
    return _searched if is_traced() else _at_hand


def compute_scale_bias_one(nhwc, weight, bias, running_mean, running_var, w_scale, w_bias):
    """Writes a frozen batch norm's scale and bias to w_scale and w_bias."""
    scale = weight * running_var.rsqrt()
    w_scale.copy_(scale)
    w_bias.copy_(bias - running_mean * scale)


def compute_scale_bias_method(nhwc, args):
    """compute_scale_bias_one of each tuple of its arguments in `args`."""
    for arg in args:
        compute_scale_bias_one(nhwc, *arg)


def drelu_dscale1(grad_o, output, scale1):
    """(gradient behind a scale and a ReLU that gave `output`, gradient behind the ReLU)"""
    behind = (output > 0) * grad_o
    return behind * scale1, behind


def drelu_dscale2(grad_o, output, scale1, scale2):
    """Gradients behind each of two scales, and a ReLU that gave `output`."""
    behind = (output > 0) * grad_o
    return behind * scale1, behind * scale2


class BottleneckFunction(Function):
    """BottleneckFunction.apply(nhwc, stride_1x1, scale, bias, x, *weights): the block's output.

    Args:
        nhwc: x, weights and the output are [batch, height, width, channels], else [batch, channels, height, width].
        stride_1x1: stride of the first convolution, and of the shortcut's.
        scale, bias: of the frozen batch norm behind each convolution, in any shape; without gradients.
        x: the input.
        weights: of the convolutions 1x1, 3x3, 1x1, and of the shortcut's 1x1 if there is one.
    """

    @staticmethod
    def forward(ctx, nhwc, stride_1x1, scale, bias, x, *conv):
        if nhwc:
            x, *conv = (t.permute(0, 3, 1, 2) for t in (x, *conv))
        out = block(stride_1x1, scale, bias, x, conv)
        return out.permute(0, 2, 3, 1) if nhwc else out


bottleneck_function = BottleneckFunction.apply


def conv3x3(
    in_planes: int, out_planes: int, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    """A 3x3 convolution without bias, padded so that a stride of 1 keeps the size."""
    return nn.Conv2d(in_planes, out_planes, 3, stride, dilation, dilation, groups, bias=False)


def conv1x1(in_planes: int, out_planes: int, stride: int = 1) -> nn.Conv2d:
    """A 1x1 convolution without bias."""
    return nn.Conv2d(in_planes, out_planes, 1, stride, bias=False)


class Bottleneck(nn.Module):
    """relu(norm3(conv3(relu(norm2(conv2(relu(norm1(conv1(x)))))))) + shortcut(x)), norms frozen.

    conv1 is 1x1 and has the stride, conv2 3x3, conv3 1x1. The shortcut is x itself, or where the stride or the number
    of channels changes a 1x1 convolution with that stride and a frozen batch norm (`downsample`).

    Args:
        in_channels, bottleneck_channels, out_channels: channels of x, between the convolutions, of the output.
        stride: of conv1 and the shortcut.
        groups, dilation: 1.
        norm_func: None: FrozenBatchNorm2d, there is no other.
        use_cudnn: one pass behind each convolution; else torch's layers, one by one.
        explicit_nhwc: x and the output are [batch, height, width, channels], and weights [outputs, rows, columns,
            inputs]; with use_cudnn alone.

    Raises:
        RuntimeError: groups, dilation or norm_func is another; of the forward: explicit_nhwc without use_cudnn.
    """

    def __init__(
        self,
        in_channels: int,
        bottleneck_channels: int,
        out_channels: int,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
        norm_func: type[nn.Module] | None = None,
        use_cudnn: bool = False,
        explicit_nhwc: bool = False,
    ) -> None:
        super().__init__()
        if groups != 1:
            raise RuntimeError(f"Bottleneck has no groups: groups must be 1, not {groups}")
        if dilation != 1:
            raise RuntimeError(f"Bottleneck has no dilation: dilation must be 1, not {dilation}")
        if norm_func is not None:
            raise RuntimeError("Bottleneck's batch norm is frozen: norm_func must be None")
        norm = FrozenBatchNorm2d
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(conv1x1(in_channels, out_channels, stride), norm(out_channels))
        self.conv1 = conv1x1(in_channels, bottleneck_channels, stride)
        self.conv2 = conv3x3(bottleneck_channels, bottleneck_channels)
        self.conv3 = conv1x1(bottleneck_channels, out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.stride = stride
        self.bn1, self.bn2, self.bn3 = (
            norm(bottleneck_channels),
            norm(bottleneck_channels),
            norm(out_channels),
        )
        self.w_scale: list[torch.Tensor] | None = None
        self.w_bias: list[torch.Tensor] | None = None
        self.use_cudnn, self.explicit_nhwc = use_cudnn, explicit_nhwc
        for weight in self.w_conv:
            kaiming_uniform_(weight, a=1)
            if explicit_nhwc:
                weight.data = weight.data.permute(0, 2, 3, 1).contiguous()

    @property
    def w_conv(self) -> list[nn.Parameter]:
        """The weights of conv1, conv2, conv3, and of the shortcut's convolution if there is one."""
        find = _finder()
        return [find(made, "_parameters", "weight") for made in self._parts("conv1", "conv2", "conv3", 0)]

    def _norms(self):
        return self._parts("bn1", "bn2", "bn3", 1)

    def _parts(self, *names):
        """Modules of that name, and the shortcut's at the place that comes last, if there is one."""
        *names, place = names
        find = _finder()
        found, shortcut = (
            [find(self, "_modules", name) for name in names],
            find(self, "_modules", "downsample"),
        )
        return found if shortcut is None else [*found, shortcut[place]]

    def get_scale_bias_callable(self) -> functools.partial:
        """A function without arguments that computes the scales and biases of the norms from their buffers.

        From now on the forward takes what it computed last, and computes nothing by itself: call it whenever the
        buffers change. Both must be on their device by now.
        """
        norms, shape = self._norms(), (1, 1, 1, -1) if self.explicit_nhwc else (1, -1, 1, 1)
        made = [(torch.empty_like(norm.weight), torch.empty_like(norm.weight)) for norm in norms]
        self.w_scale, self.w_bias = (
            [numbers.reshape(shape) for numbers in of_all] for of_all in zip(*made, strict=True)
        )
        args = [
            (norm.weight, norm.bias, norm.running_mean, norm.running_var, *pair)
            for norm, pair in zip(norms, made, strict=True)
        ]
        return functools.partial(compute_scale_bias_method, self.explicit_nhwc, args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output of x, [batch, in_channels, height, width], or channels last with explicit_nhwc."""
        node = symbolic.leaf(self, x)
        if node is not None:
            return node
        if self.use_cudnn:
            numbers = (
                _scales_and_biases(self._norms()) if self.w_scale is None else (self.w_scale, self.w_bias)
            )
            return bottleneck_function(self.explicit_nhwc, self.stride, *numbers, x, *self.w_conv)
        if self.explicit_nhwc:
            raise RuntimeError("Bottleneck: explicit_nhwc goes with use_cudnn=True")
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


# Public apex has these here; they are made of what stands above.
from apex.contrib.bottleneck.spatial import (  # noqa: E402
    SpatialBottleneck as SpatialBottleneck,
)
from apex.contrib.bottleneck.spatial import (  # noqa: E402
    SpatialBottleneckFunction as SpatialBottleneckFunction,
)
from apex.contrib.bottleneck.spatial import (  # noqa: E402
    spatial_bottleneck_function as spatial_bottleneck_function,
)
