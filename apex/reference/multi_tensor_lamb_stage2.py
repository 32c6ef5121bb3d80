import torch

from apex.reference._multi_tensor import math_dtype, skip_mask, trust_ratio, write


def multi_tensor_lamb_stage2(
    params,
    updates,
    model_params,
    per_tensor_param_norm,
    per_tensor_update_norm,
    lr,
    weight_decay,
    use_nvlamb=False,
    lr_tensor=None,
    found_inf=None,
    noop_flag=None,
    per_tensor_decay=None,
):
    """params[i] -= lr * ratio * updates[i], in place.

    ratio is per_tensor_param_norm[i] / per_tensor_update_norm[i] (float32, one element a tensor) where neither
    is 0, and 1 elsewhere; always 1 where weight_decay is 0, unless use_nvlamb. per_tensor_decay (float32, one element
    a tensor) replaces weight_decay, lr_tensor (float32 of one element) lr. model_params: empty, or as many
    lower-precision copies of params. Nothing changes if found_inf (float32) or noop_flag (int32) is not 0.
    """
    skip = skip_mask(found_inf, noop_flag)
    rate = lr if lr_tensor is None else lr_tensor.reshape(())
    for i, (param, update) in enumerate(zip(params, updates, strict=True)):
        math = math_dtype(param)
        step_size = rate
        if use_nvlamb or per_tensor_decay is not None or weight_decay != 0:
            ratio = trust_ratio(per_tensor_param_norm[i].to(math), per_tensor_update_norm[i].to(math))
            if per_tensor_decay is not None and not use_nvlamb:
                ratio = torch.where(per_tensor_decay[i] != 0, ratio, torch.ones_like(ratio))
            step_size = rate * ratio
        value = param.to(math) - step_size * update.to(math)
        write(param, value, skip)
        if model_params:
            write(model_params[i], value, skip)
