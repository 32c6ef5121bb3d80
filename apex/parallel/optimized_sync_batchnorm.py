"""SyncBatchNorm on fused kernels."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from apex import _symbolic as symbolic
from apex.parallel._batch_statistics import agree, others_in
from apex.parallel.optimized_sync_batchnorm_kernel import batch_norm


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics are those of the batches of all ranks together.

    Works with and without torch.distributed, on batches that differ in size over the ranks (one may be empty), on any
    device, for float16, bfloat16, float32 and float64; float32 weights go with half inputs. The output has the input's
    dtype, also under autocast. In eval mode no rank waits for another.

    Args:
        num_features: channels.
        eps: added to the variance.
        momentum: share of a batch in the running statistics; None: their plain average over all batches.
        affine: learn a weight and a bias.
        track_running_stats: keep running statistics, which eval mode uses; else it uses its own batch's.
        process_group: the ranks that share statistics; None: all.
        channel_last: the channels are the input's last dimension. Not needed for torch.channels_last, which is seen.
        fuse_relu: ReLU of the result.

    Shape:
        input, z, output: [N, C], [N, C, L], [N, C, H, W], [N, C, D, H, W] or, with channel_last, [N, ..., C].
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def _specify_process_group(self, process_group):
        self.process_group = process_group

    def _specify_channel_last(self, channel_last):
        self.channel_last = channel_last

    def _check(self, input, z, weight, running_mean):
        """Before anything is counted or sent."""
        self._check_input_dim(input)
        dtype = input.dtype
        if z is not None and (z.shape != input.shape or z.dtype != dtype):
            raise ValueError(
                f"SyncBatchNorm: z must be as the input, {list(input.shape)} {dtype}, not "
                f"{list(z.shape)} {z.dtype}"
            )
        for name, tensor in (("weight", weight), ("running_mean", running_mean)):
            if tensor is not None and tensor.dtype is not dtype and torch.float64 in (tensor.dtype, dtype):
                raise TypeError(
                    f"SyncBatchNorm: float64 goes with float64 alone: the input is {dtype}, {name} is "
                    f"{tensor.dtype}; use .to({dtype}) on the module"
                )

    def _check_input_dim(self, input):
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        channels = input.size(-1 if self.channel_last else 1)
        if channels != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) got an input of shape {list(input.shape)}, with {channels} "
                f"channels; channel_last is {self.channel_last}"
            )

    def forward(self, input: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Normalizes the input, adds z if given, and takes the ReLU if fuse_relu.

        Raises:
            ValueError: shapes do not fit; one value a channel in training, and no other rank; another rank has
                another number of channels.
            TypeError: dtypes do not fit.
        """
        if z is not None or type(input) is not torch.Tensor:
            node = symbolic.leaf(self, input, z)
            if node is not None:
                return node
        training, channel_last = self.training, self.channel_last or input.dim() == 2
        parameters, buffers = self._parameters, self._buffers
        try:  # as attributes they take half a microsecond each
            weight, bias = parameters["weight"], parameters["bias"]
            running_mean, running_var = buffers["running_mean"], buffers["running_var"]
            counted = buffers["num_batches_tracked"]
        except KeyError:  # pruned, say, or made of others
            weight, bias, counted = self.weight, self.bias, self.num_batches_tracked
            running_mean, running_var = self.running_mean, self.running_var
        self._check(input, z, weight, running_mean)
        group = others_in(self.process_group) if training else None
        agree(self, group, self.num_features, input)
        uses_batch = training or running_mean is None
        if (
            not uses_batch
            and not self.fuse_relu
            and z is None
            and (not self.channel_last or input.dim() == 2)
        ):
            # What F.batch_norm calls, after a microsecond of its own.
            return torch.batch_norm(
                input,
                weight,
                bias,
                running_mean,
                running_var,
                False,
                0.0,
                self.eps,
                torch.backends.cudnn.enabled,
            )
        momentum, batches = self.momentum, None
        if training and not self.track_running_stats:
            running_mean = running_var = None
        elif training and counted is not None:
            counted.add_(1)
            if momentum is None:
                batches = counted
        return batch_norm(
            input,
            z,
            weight,
            bias,
            running_mean,
            running_var,
            self.eps,
            uses_batch,
            0.0 if momentum is None else momentum,
            group,
            channel_last,
            self.fuse_relu,
            batches,
        )
