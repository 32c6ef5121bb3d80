"""GroupNorm and its functions, with public apex's names and signatures.

Public apex has kernels for NHWC tensors in several versions ("one pass", "two pass", "v2"), for lists of channel
counts, and torch's group norm for the rest. Here one op serves every layout, shape and dtype and picks its kernels
by itself, so all of these functions do the same, and `passes` and the choice of a version change nothing.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import nn

from apex import _symbolic as symbolic
from apex._functional import call, entry, is_traced
from apex._loader import library

__all__ = ["GroupNorm"]

_ops = torch.ops.apex
_group_norm = entry("group_norm")
_has_torch_function = torch.overrides.has_torch_function_variadic
_HALF = (torch.float16, torch.bfloat16)


def is_silu(act):
    """Whether an activation's name, in any case, is SiLU's. Raises ValueError for what is none."""
    name = act.lower() if act else ""
    if name not in ("", "silu", "swish"):
        raise ValueError(f'group_norm: act must be "silu", "swish", "" or None, not {act!r}')
    return name != ""


def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5, act=None):
    """Group norm, then SiLU if asked for, in one op.

    Args:
        x: [batch, channels, ...], float16, bfloat16, float32 or float64, of any strides. Channels-last memory
            is the fast one; the output is channels last if x is, else contiguous.
        num_groups: divides the channels.
        weight, bias: [channels], or None, of any of these dtypes (float64 goes with float64 alone).
        eps: added to the variance.
        act: "silu" or "swish"; "" or None: nothing.

    Returns:
        A tensor of x's shape and dtype, under autocast too. Arithmetic is float32 (float64 for float64).
        Differentiable twice; the weights' gradients are sums in a fixed order, the same bits from run to run.

    Raises:
        ValueError, TypeError: shapes, devices, dtypes or an activation that do not fit.
    """
    arguments = x, num_groups, weight, bias, eps, act is not None and is_silu(act)
    if _group_norm is None or is_traced() or _has_torch_function(x, weight, bias):
        return call("group_norm", _ops.group_norm_forward.default, 1, arguments)
    try:
        return _group_norm(*arguments)
    except RuntimeError as error:
        library.raise_stored(error)  # the probe's own exception, if it refused to choose
        raise


def torch_group_norm(x, g, w, b, eps, act=""):
    """The same by torch's own ops: group norm in the weight's dtype, its result in x's."""
    y = F.group_norm(x if w is None else x.to(w.dtype), g, w, b, eps)
    return (F.silu(y) if is_silu(act) else y).to(x.dtype)


def _plain_group_norm(
    x, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, silu: bool
):
    """The op by torch's own, for torch.jit.script: in float32 (float64 for float64), the result in x's dtype."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if weight is not None:
        weight = weight.to(wide)
    if bias is not None:
        bias = bias.to(wide)
    y = F.group_norm(x.to(wide), groups, weight, bias, eps)
    if silu:
        y = F.silu(y)
    return y.to(x.dtype)


@functools.cache
def get_cc_and_sm_count(device_index):
    """((major, minor) compute capability, number of multiprocessors) of a CUDA device."""
    properties = torch.cuda.get_device_properties(device_index)
    return (properties.major, properties.minor), properties.multi_processor_count


def _check_passes(passes):
    if passes not in (1, 2):
        raise ValueError(f"group_norm: passes must be 1 or 2, not {passes}")


def sums_of(mean, rstd, eps, of_squares):
    """[2 * batch * groups] float32: of each group its mean, and the mean of its squares or its variance."""
    variance = (rstd.double().pow(-2) - eps).clamp_min(0)
    second = variance + mean.double().square() if of_squares else variance
    return torch.stack((mean.double(), second), -1).float().reshape(-1)


def statistics_of(sums, batch, groups, eps, dtype, of_squares):
    """(mean, rstd), [batch, groups] each, of what sums_of gives; `dtype` of the input.

    Raises TypeError, ValueError: the sums are not such.
    """
    if not sums.is_floating_point():
        raise TypeError(f"group_norm: sums must be a floating-point tensor, not {sums.dtype}")
    if sums.numel() != 2 * batch * groups:
        raise ValueError(
            f"group_norm: sums must hold two numbers for each image and group, {2 * batch * groups}, not {sums.numel()}"
        )
    mean, second = sums.double().reshape(batch, groups, 2).unbind(-1)
    variance = second - mean.square() if of_squares else second
    math = torch.float64 if dtype == torch.float64 else torch.float32
    return mean.to(math), torch.rsqrt(variance.clamp_min(0) + eps).to(math)


def group_norm_nhwc_fprop(x, G, weight, bias, eps, act=None, passes=1, use_group_norm_v2=False):
    """(y, sums): y as of `group_norm`, differentiable; sums as public apex's kernels give them.

    sums: [2 * batch * G] float32, of each group its mean and the mean of its squares, or with use_group_norm_v2
    its mean and variance. Raises ValueError and TypeError.
    """
    _check_passes(passes)
    y, mean, rstd = _ops.group_norm_forward(x, G, weight, bias, eps, is_silu(act))
    with torch.no_grad():
        return y, sums_of(mean, rstd, eps, of_squares=not use_group_norm_v2)


def group_norm_nhwc_bprop(
    grad_output, sums, x, G, weight, bias, eps, act=None, passes=1, use_group_norm_v2=False
):
    """(gradient of x, of weight, of bias); sums: of group_norm_nhwc_fprop with the same use_group_norm_v2."""
    _check_passes(passes)
    mean, rstd = statistics_of(sums, x.shape[0], G, eps, x.dtype, of_squares=not use_group_norm_v2)
    return _ops.group_norm_backward(grad_output, x, mean, rstd, G, weight, bias, eps, is_silu(act))


def cuda_group_norm_nhwc_one_pass(x, G, weight, bias, eps, act=None):
    """`group_norm`."""
    return group_norm(x, G, weight, bias, eps, act)


def cuda_group_norm_nhwc_two_pass(x, G, weight, bias, eps, act=None):
    """`group_norm`."""
    return group_norm(x, G, weight, bias, eps, act)


def cuda_group_norm_v2_nhwc(x, G, weight, bias, eps, act=None):
    """`group_norm`."""
    return group_norm(x, G, weight, bias, eps, act)


class _Counts:
    """The numbers of channels, or of groups, that are supported: all."""

    def __contains__(self, count):
        return isinstance(count, int) and count > 0


class GroupNorm(nn.Module):
    """torch.nn.GroupNorm for any layout, with SiLU fused if asked for.

    Takes every number of channels that the groups divide, channels-last and contiguous tensors of any number of
    dimensions, and weights of another dtype than the input's; see `group_norm`.

    Args:
        num_groups: divides num_channels.
        num_channels: of the input, its second dimension.
        eps: added to the variance.
        affine: with weight and bias, [num_channels], ones and zeros at first.
        device, dtype: of these.
        act: "silu" or "swish"; "" or None: nothing.

    Raises:
        ValueError: num_groups does not divide num_channels, or act is none of these.
    """

    __constants__ = ["act", "affine", "eps", "num_channels", "num_groups"]
    SUPPORTED_CHANNELS = _Counts()
    SUPPORTED_GROUPS = _Counts()
    # (input dtype, parameter dtype)
    SUPPORTED_DTYPES = frozenset(itertools.product((torch.float32, *_HALF), repeat=2))
    # Public apex's second version of its kernels is for some GPUs; here no GPU has kernels of its own.
    GN_V2_SUPPORTED_LOWER_BOUND_SM_COUNT = dict[str, int]()

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        act: str | None = None,
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups != 0:
            raise ValueError(
                f"num_channels must be divisible by num_groups, but {num_channels} is not by {num_groups}"
            )
        is_silu(act)
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self.act = act.lower() if act else act
        if affine:
            self.weight = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ones and the bias to zeros."""
        if self.affine:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[batch, num_channels, ...] -> the same shape and dtype."""
        if torch.jit.is_scripting():  # torch.jit.script compiles this branch, and leaves the other one alone
            silu = False
            if self.act is not None:
                silu = self.act == "silu" or self.act == "swish"
            return _plain_group_norm(input, self.num_groups, self.weight, self.bias, self.eps, silu)
        else:
            if type(input) is not torch.Tensor:
                node = symbolic.leaf(self, input)
                if node is not None:
                    return node
            parameters = self._parameters  # of which attributes take half a microsecond each
            if "weight" in parameters and "bias" in parameters:
                weight, bias = parameters["weight"], parameters["bias"]
            else:  # pruned, say, or made of others
                weight, bias = self.weight, self.bias
            return group_norm(input, self.num_groups, weight, bias, self.eps, self.act)

    def extra_repr(self) -> str:
        text = f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"
        return f"{text}, act={self.act}" if self.act else text
