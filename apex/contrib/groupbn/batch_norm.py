"""BatchNorm2d_NHWC and its autograd functions, with the names and arguments of public apex."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from apex import _symbolic as symbolic
from apex._legacy import bnp
from apex._once import differentiable_once
from apex._plain import contiguous
from apex._torch_build import check_if_rocm_pytorch  # noqa: F401  a public name of this module
from apex.parallel._batch_statistics import agree
from apex.parallel._group_batch_norm import is_channel_last, layer
from apex.parallel._neighbours import group_of

__all__ = ["BatchNorm2d_NHWC", "bn_NHWC_impl", "bn_addrelu_NHWC_impl"]


def check_and_convert_channels_last(tensor, torch_channels_last):
    """The tensor in torch.channels_last if that is asked for, else as it is."""
    return contiguous(tensor, torch.channels_last) if torch_channels_last else tensor


class bn_NHWC_impl(torch.autograd.Function):
    """Batch norm, and its ReLU, as code that was written against public apex calls it; the module does not."""

    @staticmethod
    def forward(
        ctx,
        x,
        s,
        b,
        rm,
        riv,
        mini_m,
        mini_riv,
        ret_cta,
        mom,
        epsilon,
        fuse_relu,
        is_train,
        torch_channels_last,
        bn_group,
        my_data,
        pair_data,
        magic,
        pair_data2,
        pair_data3,
        fwd_occup,
        fwd_grid_x,
        bwd_occup,
        bwd_grid_x,
        multi_stream,
    ):
        """The output; arguments as those of bnp.bn_fwd_nhwc. Raises ValueError and TypeError."""
        given, x = x, check_and_convert_channels_last(x, torch_channels_last)
        if not is_train:
            return bnp.bn_fwd_eval_nhwc(x, s, b, rm, riv, ret_cta, bn_group, mom, epsilon, fuse_relu)
        ctx.save_for_backward(given, s, b, rm, riv, mini_m, mini_riv)
        ctx.torch_channels_last = torch_channels_last
        pairs = (my_data, pair_data, pair_data2, pair_data3, bn_group, magic)
        ctx.others = (ret_cta, mom, epsilon, fuse_relu, *pairs, bwd_occup, bwd_grid_x, multi_stream)
        return bnp.bn_fwd_nhwc(
            x, s, b, rm, riv, mini_m, mini_riv, ret_cta, mom, epsilon, fuse_relu, *pairs, fwd_occup, fwd_grid_x,
            multi_stream,
        )  # fmt: skip

    @staticmethod
    @differentiable_once("batch norm")
    def backward(ctx, saved, grad_y):
        """Gradients of x, s and b."""
        x, *others = saved  # as it was given: a copy would have no history
        x = check_and_convert_channels_last(x, ctx.torch_channels_last)
        grad_y = check_and_convert_channels_last(grad_y, ctx.torch_channels_last)
        return *bnp.bn_bwd_nhwc(x, grad_y, *others, *ctx.others), *(None,) * 21


class bn_addrelu_NHWC_impl(torch.autograd.Function):
    """ReLU of batch norm and z, as code that was written against public apex calls it; the module does not."""

    @staticmethod
    def forward(
        ctx,
        x,
        z,
        s,
        b,
        rm,
        riv,
        mini_m,
        mini_riv,
        grid_dim_y,
        ret_cta,
        mom,
        epsilon,
        is_train,
        torch_channels_last,
        bn_group,
        my_data,
        pair_data,
        magic,
        pair_data2,
        pair_data3,
        fwd_occup,
        fwd_grid_x,
        bwd_occup,
        bwd_grid_x,
        multi_stream,
    ):
        """The output; arguments as those of bnp.bn_addrelu_fwd_nhwc. Raises ValueError and TypeError."""
        given, x = x, check_and_convert_channels_last(x, torch_channels_last)
        z = check_and_convert_channels_last(z, torch_channels_last)
        if not is_train:
            return bnp.bn_addrelu_fwd_eval_nhwc(x, z, s, b, rm, riv, ret_cta, bn_group, mom, epsilon)
        bitmask = torch.empty((x.numel() + 31) // 32, dtype=torch.int32, device=x.device)
        ctx.save_for_backward(given, s, b, rm, riv, mini_m, mini_riv, bitmask)
        ctx.torch_channels_last = torch_channels_last
        pairs = (my_data, pair_data, pair_data2, pair_data3, bn_group, magic)
        ctx.others = (ret_cta, mom, epsilon, *pairs, bwd_occup, bwd_grid_x, multi_stream)
        return bnp.bn_addrelu_fwd_nhwc(
            x, z, s, b, rm, riv, mini_m, mini_riv, bitmask, ret_cta, mom, epsilon, *pairs, fwd_occup, fwd_grid_x,
            multi_stream,
        )  # fmt: skip

    @staticmethod
    @differentiable_once("batch norm")
    def backward(ctx, saved, grad_y):
        """Gradients of x, z, s and b."""
        x, *others = saved  # as it was given: a copy would have no history
        x = check_and_convert_channels_last(x, ctx.torch_channels_last)
        grad_y = check_and_convert_channels_last(grad_y, ctx.torch_channels_last)
        return *bnp.bn_addrelu_bwd_nhwc(x, grad_y, *others, *ctx.others), *(None,) * 21


class BatchNorm2d_NHWC(_BatchNorm):
    """Batch norm of NHWC images: with `fuse_relu` and a residual z, relu(batch_norm(x) + z) in one pass.

    For the backward pass the ReLU leaves a bit for each element, so neither the output nor z is kept. Works on any
    device, for float16, bfloat16, float32 and float64; parameters stay float32 beside half inputs.

    Args:
        num_features: channels, any number; multiples of 8 are fastest.
        fuse_relu: ReLU of the result.
        bn_group: so many neighbouring ranks share statistics; divides the world size. Every rank must make its layers
            in the same order. The gradients of weight and bias are averages over the group.
        torch_channels_last: inputs are [N, C, H, W], and are brought into torch.channels_last. Without it they must
            be [N, H, W, C], or [N, C, H, W] in torch.channels_last.
        max_cta_per_sm, cta_launch_margin, multi_stream: taken for public apex's sake; the library finds launch
            configurations by itself, and any number of streams may run layers.

    Shape:
        x, z, output: as above; the output lies as the input does.

    Attributes:
        minibatch_mean, minibatch_riv: [num_features], float32: mean and 1 / standard deviation of the last batch that
            was trained on, over the group. Not in state_dict.

    Raises:
        ValueError: bn_group does not divide the world size.
        RuntimeError: bn_group > 1, and torch.distributed is not initialized.
        TypeError: torch_channels_last is a number: other versions of public apex have max_cta_per_sm in its place.
    """

    def __init__(
        self,
        num_features: int,
        fuse_relu: bool = False,
        bn_group: int = 1,
        torch_channels_last: bool = False,
        max_cta_per_sm: int = 2,
        cta_launch_margin: int = 12,
        multi_stream: bool = False,
    ) -> None:
        if not isinstance(torch_channels_last, bool):
            raise TypeError(
                f"BatchNorm2d_NHWC: torch_channels_last must be a bool, not {torch_channels_last!r}; pass "
                "max_cta_per_sm and what follows it by name"
            )
        if max_cta_per_sm <= 0:
            raise ValueError(f"BatchNorm2d_NHWC: max_cta_per_sm must be positive, not {max_cta_per_sm}")
        group_of(bn_group)
        super().__init__(num_features)
        self.fuse_relu = fuse_relu
        self.bn_group = bn_group
        self.torch_channels_last = torch_channels_last
        self.max_cta_per_sm = max_cta_per_sm
        self.cta_launch_margin = cta_launch_margin
        self.multi_stream = multi_stream
        for name in ("minibatch_mean", "minibatch_riv"):
            self.register_buffer(name, torch.zeros(num_features), persistent=False)

    def _check_input_dim(self, input):
        if input.dim() != 4:
            raise ValueError(f"expected 4D input (got {input.dim()}D input)")

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Normalizes x, adds z if given, and takes the ReLU if fuse_relu.

        Raises:
            ValueError: shapes, layouts or devices do not fit; one value a channel in training, and no other rank.
            TypeError: dtypes do not fit.
        """
        node = symbolic.leaf(self, x, z)
        if node is not None:
            return node
        self._check_input_dim(x)
        channel_last = is_channel_last("BatchNorm2d_NHWC", x, self.num_features, self.torch_channels_last)
        group = group_of(self.bn_group) if self.training else None
        agree(self, group, self.num_features, x)
        use_batch = self.training or self.running_mean is None
        batches = None
        if self.training and self.momentum is None:
            self.num_batches_tracked.add_(1)
            batches = self.num_batches_tracked
        y, mean, riv = layer(
            x,
            z,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
            self.fuse_relu,
            use_batch,
            channel_last,
            group,
            batches,
        )
        if self.training:
            self.minibatch_mean, self.minibatch_riv = mean, riv
        return y
