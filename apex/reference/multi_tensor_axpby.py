from apex.reference._multi_tensor import math_dtype, note_non_finite, store


def multi_tensor_axpby(x, y, outputs, noop_flag, a, b, arg_to_check=-1, a_tensor=None):
    """outputs[i] = a * x[i] + b * y[i]; noop_flag becomes 1 if a checked input is inf or nan.

    x, y, outputs: lists of equally many tensors, of one size for each index; float16, bfloat16 and float32 in
    any combination, or all float64. An output may be the tensor of one of its inputs. noop_flag: int32 tensor
    of one element, or None. arg_to_check: 0 checks x, 1 y, -1 both; results are not checked. a_tensor: float32
    tensor of one element that replaces `a`. Results are rounded once, from float32 (float64 for float64
    tensors).
    """
    for left, right, target in zip(x, y, outputs, strict=True):
        if arg_to_check != 1:
            note_non_finite(noop_flag, left)
        if arg_to_check != 0:
            note_non_finite(noop_flag, right)
        math = math_dtype(left, right, target)
        factor = a if a_tensor is None else a_tensor.reshape(()).to(math)
        store(target, factor * left.to(math) + b * right.to(math))
