"""What batch norm's references share: where a tensor's channels are, and checks.

Kernels (csrc/bindings/channel.h) and references take the same layouts and refuse the same.
"""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def math_dtype(dtype):
    """float64 for itself, float32 for the rest: the dtype of statistics."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def axis(input, channel_last):
    """The dimension that holds the channels."""
    return input.dim() - 1 if channel_last or input.dim() == 2 else 1


def others(input, channel_last):
    """The dimensions that statistics are taken over."""
    return [d for d in range(input.dim()) if d != axis(input, channel_last)]


def shape(input, channel_last):
    """As numbers of channels are shaped to broadcast against the input."""
    at = axis(input, channel_last)
    return [-1 if d == at else 1 for d in range(input.dim())]


def format_of(input, channel_last):
    """The memory format of outputs: the input's if it is dense, else contiguous."""
    if not channel_last and not input.is_contiguous():
        for dims, format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if input.dim() == dims and input.is_contiguous(memory_format=format):
                return format
    return torch.contiguous_format


def check_input(op, input):
    """Raises ValueError or TypeError, as the bindings do."""
    if input.dim() < 2:
        raise ValueError(
            f"{op}: the input has {input.dim()} dimensions; it must have at least 2, batch and channels"
        )
    if input.dtype not in DTYPES:
        raise TypeError(f"{op} takes float32, float16, bfloat16 and float64, not {input.dtype}")


def check(op, input, channel_last, statistics=(), affine=(), like=()):
    """Likewise; each of the lists holds (name, tensor or None)."""
    check_input(op, input)
    channels = input.shape[axis(input, channel_last)]
    for name, tensor in (*statistics, *affine):
        if tensor is not None and tuple(tensor.shape) != (channels,):
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)} but the input has {channels} channels"
            )
    math = math_dtype(input.dtype)
    for name, tensor in statistics:
        if tensor is not None and tensor.dtype != math:
            raise TypeError(f"{op}: {name} must be {math}, not {tensor.dtype}")
    dtypes = [tensor.dtype for _, tensor in affine if tensor is not None]
    if any((dtype == torch.float64) != (input.dtype == torch.float64) for dtype in dtypes):
        raise TypeError(f"{op}: float64 goes with float64 alone: input, weight and bias alike, not {dtypes}")
    if len(set(dtypes)) > 1:
        raise TypeError(f"{op}: weight and bias must have one dtype")
    for name, tensor in like:
        if tensor is None:
            continue
        if tensor.shape != input.shape:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}, not the input's {list(input.shape)}"
            )
        if tensor.dtype != input.dtype:
            raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, not the input's {input.dtype}")


def normalized(input, z, mean, inv_std, weight, shift, channel_last):
    """(input - mean) * inv_std * weight + shift + z, in the dtype of the statistics."""
    sizes, math = shape(input, channel_last), math_dtype(input.dtype)
    scale = inv_std if weight is None else inv_std * weight.to(math)
    y = (input.to(math) - mean.view(sizes)) * scale.view(sizes)
    if shift is not None:
        y = y + shift.to(math).view(sizes)
    return y if z is None else y + z.to(math)


def check_nhwc(op, input, channel_last):
    """Raises ValueError where the channels are neither the last dimension nor the second of four."""
    if not channel_last and input.dim() not in (2, 4):
        raise ValueError(
            f"{op}: the input has {input.dim()} dimensions; without channel_last it must have 4, [batch, channels, "
            "height, width]"
        )


def check_bitmask(op, bitmask, input):
    """Raises TypeError or ValueError where it is not a bit for each element."""
    if bitmask is None:
        return
    if bitmask.dtype != torch.uint8:
        raise TypeError(f"{op}: bitmask must be uint8, not {bitmask.dtype}")
    wanted = (input.numel() + 7) // 8
    if tuple(bitmask.shape) != (wanted,):
        raise ValueError(
            f"{op}: bitmask must hold {wanted} bytes, a bit for each element, not {list(bitmask.shape)}"
        )


def _in_memory(tensor, channel_last):
    """A view of an NHWC tensor whose indices go in the order of memory."""
    return tensor if channel_last or tensor.dim() == 2 else tensor.movedim(1, -1)


def pack(flags, channel_last):
    """Bits of a bool tensor in the order of NHWC memory: bit i % 8 of byte i // 8."""
    flat = _in_memory(flags, channel_last).flatten()
    flat = torch.nn.functional.pad(flat.to(torch.uint8), (0, -flat.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=flat.device)).sum(1, dtype=torch.uint8)


def unpack(bitmask, input, channel_last):
    """The bool tensor of the input's shape that `pack` made the mask of."""
    shape = _in_memory(input, channel_last).shape
    bits = bitmask.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=bitmask.device) & 1
    flags = bits.flatten()[: input.numel()].view(shape).bool()
    return flags if channel_last or input.dim() == 2 else flags.movedim(-1, 1)


def output(value, input, channel_last, format=None):
    """In the input's dtype, laid out as outputs are, or in another format."""
    format = format or format_of(input, channel_last)
    return torch.empty(input.shape, dtype=input.dtype, device=input.device, memory_format=format).copy_(value)
