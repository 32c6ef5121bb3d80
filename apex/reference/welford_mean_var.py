"""Mean and variance of each channel, in plain PyTorch."""

import torch

from apex.reference import _channels


def welford_mean_var(input, channel_last=False):
    """[2 * channels + 1] numbers: each channel's mean, then its biased variance, then how many elements it has.

    That is what one rank tells the others. input: float16, bfloat16, float32 or float64, [batch, channels, ...],
    in any memory format; channel_last: [..., channels]. The result is float32 (float64 for float64). Without
    elements all of it is 0. Raises ValueError and TypeError.
    """
    _channels.check_input("welford_mean_var", input)
    math = _channels.math_dtype(input.dtype)
    channels = input.shape[_channels.axis(input, channel_last)]
    statistics = torch.zeros(2 * channels + 1, dtype=math, device=input.device)
    if input.numel():
        over = _channels.others(input, channel_last)
        x = input.to(math)
        mean = x.mean(over)
        centred = x - mean.view(_channels.shape(input, channel_last))
        # The mean was rounded: what is left of it comes out of the deviations.
        rest = centred.mean(over)
        statistics[:channels] = mean + rest
        statistics[channels:-1] = centred.square().mean(over) - rest.square()
        statistics[-1] = input.numel() // channels
    return statistics
