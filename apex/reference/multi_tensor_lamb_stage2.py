from apex.reference._multi_tensor import math_dtype, store, trust_ratio


def multi_tensor_lamb_stage2(
    params, updates, per_tensor_param_norm, per_tensor_update_norm, lr, weight_decay, use_nvlamb=False
):
    """params[i] -= lr * ratio * updates[i], in place.

    ratio is per_tensor_param_norm[i] / per_tensor_update_norm[i] (float32, one element a tensor) where neither
    is 0, and 1 elsewhere; always 1 where weight_decay is 0, unless use_nvlamb.
    """
    for i, (param, update) in enumerate(zip(params, updates, strict=True)):
        math = math_dtype(param)
        step_size = lr
        if use_nvlamb or weight_decay != 0:
            norms = per_tensor_param_norm[i].to(math), per_tensor_update_norm[i].to(math)
            step_size = lr * trust_ratio(*norms)
        store(param, param.to(math) - step_size * update.to(math))
