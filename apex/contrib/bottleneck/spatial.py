"""SpatialBottleneck, a Bottleneck of images whose rows are split among ranks, with public apex's names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from apex import _symbolic as symbolic
from apex._functional import Function, is_traced
from apex.contrib.bottleneck import _exchange
from apex.contrib.bottleneck.bottleneck import Bottleneck, _scales_and_biases, bottleneck_function
from apex.contrib.bottleneck.halo_exchangers import HaloExchangerNoComm
from apex.contrib.conv_bias_relu.conv_bias_relu import _conv

WIDE, PADDED, CORRECTED = 1, 2, 3  # spatial_method: how rows at the edges get the neighbours' part


def _in_layout(nhwc, tensor):
    """[batch, channels, height, width] as the user's images are."""
    return tensor.permute(0, 2, 3, 1) if nhwc else tensor


def _neighbours(exchanger, nhwc, beside, out1):
    """(row from above, row from below) of the first convolution's output; on a stream of its own if `beside`."""
    rows = [_in_layout(nhwc, row) for row in (out1[:, :, :1], out1[:, :, -1:])]
    if not (beside and out1.is_cuda and exchanger.stream1 is not None and not is_traced()):
        found = _exchange.exchanged(exchanger, *rows)
    else:
        stream, here = exchanger.stream1, torch.cuda.current_stream()
        stream.wait_stream(here)
        out1.record_stream(stream)
        with torch.cuda.stream(stream):
            found = _exchange.exchanged(exchanger, *rows)
        for row in found:
            row.record_stream(here)
    return [row.permute(0, 3, 1, 2) if nhwc else row for row in found]


def _arrived(exchanger, beside, out1):
    """From here on the current stream may read the neighbours' rows."""
    if beside and out1.is_cuda and exchanger.stream1 is not None and not is_traced():
        torch.cuda.current_stream().wait_stream(exchanger.stream1)


def _padded(out1, weight, scale, bias, above, below):
    """One convolution of the strip with the neighbours' rows around it."""
    around = torch.cat([above, out1, below], 2)
    return _conv(around, weight, scale, bias, None, None, 1, 1, True)[:, :, 1:-1]


def _wide(out1, weight, scale, bias, middle, above, below):
    """`middle`, all rows computed without the neighbours, with those at the edges anew, each from three rows. A row
    from beyond the image is None."""
    top, bottom = middle[:, :, :1], middle[:, :, -1:]
    if above is not None:
        three = torch.cat([above, out1[:, :, :2]], 2)
        top = _conv(three, weight, scale, bias, None, None, 1, 1, True)[:, :, 1:2]
    if below is not None:
        three = torch.cat([out1[:, :, -2:], below], 2)
        bottom = _conv(three, weight, scale, bias, None, None, 1, 1, True)[:, :, 1:2]
    return torch.cat([top, middle[:, :, 1:-1], bottom], 2)


def _corrected(part, weight, scale, bias, above, below):
    """`part`, the convolution without the neighbours, with what their rows add at the edges; then norm and ReLU."""
    edges = [
        F.conv2d(above, weight[:, :, :1], padding=(0, 1)),
        F.conv2d(below, weight[:, :, 2:], padding=(0, 1)),
    ]
    if part.shape[2] == 1:
        part = part + edges[0] + edges[1]
    else:
        part = torch.cat([part[:, :, :1] + edges[0], part[:, :, 1:-1], part[:, :, -1:] + edges[1]], 2)
    wide = part.to(torch.promote_types(part.dtype, torch.float32))
    return torch.relu(wide * scale.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)).to(part.dtype)


def _second(method, exchanger, nhwc, out1, weight, scale, bias):
    """relu(norm(conv3x3(out1))) of this rank's rows of the whole image."""
    beside = method != PADDED
    above, below = _neighbours(exchanger, nhwc, beside, out1)
    if method == PADDED:
        return _padded(out1, weight, scale, bias, above, below)
    if method == WIDE and out1.shape[2] > 1:
        middle = _conv(out1, weight, scale, bias, None, None, 1, 1, True)
        _arrived(exchanger, beside, out1)
        above, below = None if exchanger.left_zero else above, None if exchanger.right_zero else below
        return _wide(out1, weight, scale, bias, middle, above, below)
    # A strip of one row, whose both sides are edges, is corrected too.
    part = F.conv2d(out1, weight, padding=1)
    _arrived(exchanger, beside, out1)
    return _corrected(part, weight, scale, bias, above, below)


class SpatialBottleneckFunction(Function):
    """apply(group_size, group_rank, communicator, halo_exchanger, method, use_delay_kernel, nhwc, stride_1x1, scale,
    bias, thresholdTop, thresholdBottom, x, *weights): BottleneckFunction of strips, differentiable any number of times.

    The first six are SpatialBottleneck's spatial_parallel_args. Thresholds, which rows are at an edge, are taken for
    public apex's sake.
    """

    @staticmethod
    def forward(
        ctx,
        spatial_group_size,
        spatial_group_rank,
        spatial_communicator,
        spatial_halo_exchanger,
        spatial_method,
        use_delay_kernel,
        explicit_nhwc,
        stride_1x1,
        scale,
        bias,
        thresholdTop,
        thresholdBottom,
        x,
        *conv,
    ):
        if spatial_group_size <= 1:
            return bottleneck_function(explicit_nhwc, stride_1x1, scale, bias, x, *conv)
        if spatial_method not in (WIDE, PADDED, CORRECTED):
            raise ValueError(f"SpatialBottleneck: spatial_method must be 1, 2 or 3, not {spatial_method}")
        if explicit_nhwc:
            x, *conv = (t.permute(0, 3, 1, 2) for t in (x, *conv))
        scale, bias = ([t.detach().reshape(-1) for t in numbers] for numbers in (scale, bias))
        out = _conv(x, conv[0], scale[0], bias[0], None, None, 0, stride_1x1, True)
        if use_delay_kernel and x.is_cuda and spatial_method != PADDED:
            from apex._legacy import nccl_p2p_cuda

            nccl_p2p_cuda.add_delay(10)
        out = _second(spatial_method, spatial_halo_exchanger, explicit_nhwc, out, conv[1], scale[1], bias[1])
        if len(conv) > 3:
            x = _conv(x, conv[3], scale[3], bias[3], None, None, 0, stride_1x1, False)
        out = _conv(out, conv[2], scale[2], bias[2], x, None, 0, 1, True)
        return out.permute(0, 2, 3, 1) if explicit_nhwc else out


spatial_bottleneck_function = SpatialBottleneckFunction.apply


class SpatialBottleneck(Bottleneck):
    """Bottleneck of images that are split by height: this rank's strip in, the same strip of the output out.

    Output and the input's gradient are those of Bottleneck on the whole image; the gradients of the weights are this
    strip's part of them: add them over the group.

    Args:
        in_channels ... explicit_nhwc: as Bottleneck's. Strips are computed in fused passes whatever use_cudnn says.
        spatial_parallel_args: (spatial_group_size, spatial_group_rank, spatial_communicator, spatial_halo_exchanger,
            spatial_method, use_delay_kernel). The communicator is not used. The exchanger is one of
            apex.contrib.bottleneck.halo_exchangers. Method 1 computes the rows at the edges anew from three rows each,
            2 the whole strip once its neighbours' rows are there, 3 adds what these rows bring; 1 and 3 exchange while
            the strip is convolved. use_delay_kernel: waits 10 ns on the device first. None: a Bottleneck, which is
            (1, 0, None, None, 0, False).

    Raises:
        RuntimeError: as Bottleneck.
        ValueError: spatial_parallel_args do not fit each other. Of the forward: strips of the ranks differ in shape or
            dtype, or their height is no multiple of the stride; on every rank.
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
        spatial_parallel_args: tuple | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            bottleneck_channels,
            out_channels,
            stride,
            groups,
            dilation,
            norm_func,
            use_cudnn,
            explicit_nhwc,
        )
        self.spatial_parallel_args = _checked(spatial_parallel_args or (1, 0, None, None, 0, False))
        self._agreed: set = set()
        if self.spatial_parallel_args[0] > 1:
            _exchange.number_of(self.spatial_parallel_args[3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The strip's output of x, [batch, in_channels, rows of this rank, width], or channels last."""
        if self.spatial_parallel_args[0] <= 1:
            return super().forward(x)
        node = symbolic.leaf(self, x)
        if node is not None:
            return node
        if self.explicit_nhwc and not self.use_cudnn:
            raise RuntimeError("SpatialBottleneck: explicit_nhwc goes with use_cudnn=True")
        if not is_traced() and (tuple(x.shape), x.dtype) not in self._agreed:
            _agree(self, x)
            self._agreed.add((tuple(x.shape), x.dtype))
        numbers = _scales_and_biases(self._norms()) if self.w_scale is None else (self.w_scale, self.w_bias)
        arguments = (self.explicit_nhwc, self.stride, *numbers, None, None, x, *self.w_conv)
        return spatial_bottleneck_function(*self.spatial_parallel_args, *arguments)


def _checked(arguments):
    """spatial_parallel_args. Raises ValueError."""
    if len(arguments) != 6:
        raise ValueError(
            "SpatialBottleneck: spatial_parallel_args are (group size, group rank, communicator, halo exchanger, "
            f"method, use_delay_kernel), not {len(arguments)} values"
        )
    size, rank, _, exchanger, method, _ = arguments
    if size <= 1:
        return arguments
    place = (getattr(exchanger, "group_size", None), getattr(exchanger, "rank_in_group", None))
    if place != (size, rank):
        raise ValueError(
            f"SpatialBottleneck: this is rank {rank} of {size} in spatial_parallel_args, and the halo exchanger "
            f"({type(exchanger).__name__}) says rank {place[1]} of {place[0]}"
        )
    if method not in (WIDE, PADDED, CORRECTED):
        raise ValueError(f"SpatialBottleneck: spatial_method must be 1, 2 or 3, not {method}")
    return arguments


@torch.no_grad()
def _agree(module, x):
    """Raises ValueError on every rank unless all strips are alike and divide by the stride.

    What a rank knows goes on to the next one until it has met all: one that is alone with its shape would else wait for
    ever. A rank beyond the image's edge reads as zeros.
    """
    size, rank, _, exchanger, *_ = module.spatial_parallel_args
    nhwc = module.explicit_nhwc
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    kind = 1 + dtypes.index(x.dtype) if x.dtype in dtypes else 9
    mine = torch.tensor([*x.shape, kind], dtype=torch.int32, device=x.device).view(1, 1, 1, 5)
    above = below = mine
    found = {rank: mine}
    for step in range(1, size):
        above, below = exchanger.left_right_halo_exchange(below, above)
        found.update({r: t for r, t in ((rank - step, above), (rank + step, below)) if 0 <= r < size})
    rows = [tuple(found[r].flatten().tolist()) for r in range(size)]
    height = 1 if nhwc else 2
    if not isinstance(exchanger, HaloExchangerNoComm) and len(set(rows)) > 1:
        shown = ", ".join(f"rank {r}: {list(row[:4])}" for r, row in enumerate(rows))
        raise ValueError(
            f"SpatialBottleneck: the strips of all ranks must have one shape and dtype (height is dimension {height}); "
            f"they are {shown}"
        )
    if x.shape[height] % module.stride:
        raise ValueError(
            f"SpatialBottleneck: a strip of {x.shape[height]} rows does not divide by the stride {module.stride}: the "
            "whole image's rows would be other ones; pad the image"
        )
