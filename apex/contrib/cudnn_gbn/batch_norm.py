"""GroupBatchNorm2d on the kernels of BatchNorm2d_NHWC."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from apex import _symbolic as symbolic
from apex._functional import is_autocast_enabled
from apex.parallel._batch_statistics import agree
from apex.parallel._group_batch_norm import layer
from apex.parallel._neighbours import group_of


class GroupBatchNorm2d(_BatchNorm):
    """Batch norm whose statistics are those of `group_size` neighbouring ranks together.

    Takes any device, any number of channels, and float16, bfloat16, float32 and float64 in any memory format;
    torch.channels_last is fastest, and what the output has. Under autocast the input is cast to its dtype.

    Args:
        num_features: channels.
        group_size: ranks that share statistics; divides the world size. Every rank must make its layers in the same
            order. The gradients of weight and bias are averages over the group.
        eps: added to the variance.
        momentum: share of a batch in the running statistics; None: their plain average over all batches.
        affine: learn a weight and a bias.
        track_running_stats: keep running statistics, which eval mode uses; else it uses its own batch's.

    Shape:
        input, output: [N, C, H, W].

    Attributes:
        group_id, group_rank: which group this rank is in, and its place there.
        minibatch_mean, minibatch_inv_var: [num_features], float32: mean and 1 / standard deviation of the last batch
            that was trained on, over the group. Not in state_dict.

    Raises:
        ValueError: group_size does not divide the world size.
        RuntimeError: group_size > 1, and torch.distributed is not initialized.
    """

    def __init__(
        self,
        num_features: int,
        group_size: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        group_of(group_size)
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.group_size = group_size
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.group_id = rank // group_size
        self.group_rank = rank % group_size
        for name in ("minibatch_mean", "minibatch_inv_var"):
            self.register_buffer(name, torch.zeros(num_features), persistent=False)

    def _check_input_dim(self, input):
        if input.dim() != 4:
            raise ValueError(f"expected 4D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise ValueError(
                f"GroupBatchNorm2d({self.num_features}) got an input of shape {list(input.shape)}, with "
                f"{input.size(1)} channels"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes the input.

        Raises:
            ValueError: the shape does not fit; one value a channel in training, and no other rank.
            TypeError: dtypes do not fit.
        """
        node = symbolic.leaf(self, input)
        if node is not None:
            return node
        self._check_input_dim(input)
        device_type = input.device.type
        if is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))
        group = group_of(self.group_size) if self.training else None
        agree(self, group, self.num_features, input)
        running_mean, running_var = self.running_mean, self.running_var
        batches = None
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                batches = self.num_batches_tracked
        y, mean, inv_std = layer(
            input,
            None,
            self.weight,
            self.bias,
            running_mean,
            running_var,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
            False,
            self.training or running_mean is None,
            False,
            group,
            batches,
        )
        if self.training:
            self.minibatch_mean, self.minibatch_inv_var = mean, inv_std
        return y
