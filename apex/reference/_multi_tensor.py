"""What the multi-tensor references share."""

import torch


def math_dtype(*tensors):
    """float64 if any tensor holds it, else float32: references compute no finer than the kernels."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def note_non_finite(noop_flag, *tensors):
    """Sets noop_flag to 1, without a host synchronisation, if any element is inf or nan."""
    for tensor in tensors:
        if noop_flag is not None and tensor.numel():
            bad = ~torch.isfinite(tensor).all()
            noop_flag.masked_fill_(bad.to(noop_flag.device), 1)


def skip_mask(found_inf, noop_flag):
    """A boolean tensor that says "leave everything as it is", or None if nothing can say so."""
    masks = []
    if found_inf is not None:
        masks.append(found_inf.reshape(()) != 0)
    if noop_flag is not None:
        masks.append(noop_flag.reshape(()) == 1)
    if not masks:
        return None
    return masks[0] if len(masks) == 1 else masks[0] | masks[1]


def store(target, value):
    """target[:] = value, converted first: torch's CPU copies between float16 and float32 pass over a negative bit."""
    target.copy_(value.to(target.dtype))


def write(target, value, skip):
    """target[:] = value, unless `skip` (see skip_mask) holds."""
    if skip is not None:
        value = torch.where(skip, target.to(value.dtype), value)
    store(target, value)


def this_step(step, step_tensor, advance_step, skip):
    """The number of this step: `step`, or of step_tensor, which with advance_step receives it unless `skip` holds."""
    if step_tensor is None:
        return step
    step = step_tensor.reshape(()) + int(advance_step)
    if advance_step:
        write(step_tensor, step.reshape(step_tensor.shape), skip)
    return step


def power(base, step, math):
    """base ** step in double where the device has it: 1 - base ** step loses digits in float32."""
    if not isinstance(step, torch.Tensor):
        return base**step
    return base ** step.to(math if step.device.type == "mps" else torch.float64)


def norm_of(value, order=2.0):
    """Of all elements, in value's dtype. The CPU adds long rows up one after the other, so it does that in float64."""
    wide = torch.float64 if value.device.type == "cpu" else None
    return torch.linalg.vector_norm(value, order, dtype=wide).to(value.dtype)


def trust_ratio(of_param, of_update):
    """LAMB's factor of a step, from two norms, tensors of one element: 1 where either is 0."""
    return (of_param / of_update).masked_fill((of_param == 0) | (of_update == 0), 1.0)
