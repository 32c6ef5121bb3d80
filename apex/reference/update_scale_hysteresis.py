import torch

LOWEST = 2.0**-126


def update_scale_hysteresis(
    current_scale,
    growth_tracker,
    hysteresis_tracker,
    found_inf,
    growth_factor,
    backoff_factor,
    growth_interval,
    hysteresis,
):
    """The loss scale of the next step, in place: torch's rule, but some overflows in a row are tolerated.

    current_scale, found_inf: float32 tensors of one element; growth_tracker, hysteresis_tracker: int32 ones,
    on the same device. Without overflow (found_inf 0) the scale is multiplied by growth_factor after
    growth_interval steps, unless that overflows float32, and hysteresis_tracker is set to hysteresis. With
    one, hysteresis_tracker counts down; the scale is multiplied by backoff_factor once it is 0 or below, unless that
    is less than 2**-126: what is less float32 cannot divide by.
    """
    scale, grown, left, found = (
        t.reshape(()) for t in (current_scale, growth_tracker, hysteresis_tracker, found_inf)
    )
    wide = scale if scale.device.type == "mps" else scale.to(torch.float64)
    overflow = found > 0
    left = left - overflow.to(left.dtype)
    tolerated = overflow & (left > 0)
    bad = found != 0
    grows = ~bad & (grown + 1 == growth_interval)
    larger = (wide * growth_factor).to(scale.dtype)
    scale = torch.where(grows & torch.isfinite(larger), larger, scale)
    smaller = (wide * backoff_factor).to(scale.dtype)
    scale = torch.where(bad & ~tolerated & (smaller >= LOWEST), smaller, scale)
    growth = torch.where(bad | grows, torch.zeros_like(grown), grown + 1)
    left = torch.where(found <= 0, torch.full_like(left, hysteresis), left)
    for target, value in ((hysteresis_tracker, left), (growth_tracker, growth), (current_scale, scale)):
        target.copy_(value.reshape(target.shape))
