from apex.reference._multi_tensor import math_dtype, note_non_finite, store


def multi_tensor_scale(inputs, outputs, noop_flag, scale, scale_tensor=None, skip_one=False):
    """outputs[i] = scale * inputs[i]; noop_flag becomes 1 if an input or a result is inf or nan.

    inputs, outputs: lists of equally many tensors, pairwise of one size; float16, bfloat16, float32 or float64.
    noop_flag: int32 tensor of one element, or None. scale_tensor: float32 tensor of one element that replaces
    `scale`. skip_one: scaling in place by exactly 1 may leave everything unread (here it makes no difference
    but to noop_flag, which only speed depends on). Results are rounded once, from float32 (float64 for float64 inputs).
    """
    for source, target in zip(inputs, outputs, strict=True):
        value = source.to(math_dtype(source, target))
        value = value * (scale if scale_tensor is None else scale_tensor.reshape(()).to(value.dtype))
        note_non_finite(noop_flag, source, value)
        store(target, value)
