import torch

from apex.reference._multi_tensor import math_dtype, norm_of


def multi_tensor_l2norm(
    tensors,
    total,
    per_tensor=None,
    noop_flag=None,
    scale=1.0,
    inv_scale=None,
    check_noop=False,
    maximum=False,
    blend_new=1.0,
    blend_old=0.0,
    max_norm=0.0,
    clip_coefficient=None,
):
    """total = the L2 norm (or, with `maximum`, the largest magnitude) of all elements of all tensors together.

    tensors: float16, bfloat16, float32 or float64, each multiplied by scale (and by inv_scale, float32 of one
    element) first. total: float32 of one element. per_tensor: float32, one element a tensor, receives each
    tensor's norm n blended with the norm it holds: sqrt(blend_new * n^2 + blend_old * old^2), or for maxima
    blend_new * n + blend_old * old. noop_flag: int32 of one element, becomes 1 if the norm is inf or nan;
    check_noop: where it is not 0 before, all is left as it is. clip_coefficient: float32 of one element,
    receives min(1, max_norm / (total + 1e-6)), the factor by which torch.nn.utils.clip_grad_norm_ multiplies.
    """
    order = float("inf") if maximum else 2.0
    norms = [total.new_zeros(())]
    for tensor in tensors:
        value = tensor.to(math_dtype(tensor)) * scale
        if inv_scale is not None:
            value = value * inv_scale.reshape(()).to(value.dtype)
        norms.append(norm_of(value, order).to(total.dtype) if value.numel() else norms[0])
    result = norm_of(torch.stack(norms), order)
    skip = noop_flag.reshape(()) != 0 if check_noop and noop_flag is not None else None
    _write(total, result.reshape(total.shape), skip)
    if clip_coefficient is not None:
        factor = (max_norm / (result + 1e-6)).clamp(max=1.0)
        _write(clip_coefficient, factor.reshape(clip_coefficient.shape), skip)
    if per_tensor is not None and len(norms) > 1:
        new = torch.stack(norms[1:])
        if maximum and blend_old:
            new = blend_new * new + blend_old * per_tensor
        elif blend_old:
            new = (blend_new * new**2 + blend_old * per_tensor**2).sqrt()
        _write(per_tensor, new.reshape(per_tensor.shape), skip)
    if noop_flag is not None:
        noop_flag.masked_fill_(~torch.isfinite(result), 1)


def _write(target, value, skip):
    target.copy_(value if skip is None else torch.where(skip, target, value))
