"""The transpose of FP8 matrices in plain PyTorch: the op over apex/reference/fp8.py."""

import torch

from apex.reference import fp8

NO_DERIVATIVE = True


def fp8_transpose(input, scale_inv=None, bias_gradient=False, dtype=None):
    """(columns, grad_bias): the transpose of an FP8 matrix, and the sums of the columns of input * scale_inv.

    input: [..., columns] FP8, whose leading dimensions make the rows. columns: [columns, rows]. With bias_gradient,
    grad_bias is [columns] of `dtype` (None: float32), and scale_inv float32 of one element; else it is empty. Raises
    ValueError and TypeError.
    """
    name = "fp8_transpose"
    fp8.format_of(name, input.dtype)
    fp8.check_tensor(name, input)
    dtype = dtype or torch.float32
    if not bias_gradient:
        return fp8.transpose(input), torch.empty(0, dtype=dtype, device=input.device)
    if scale_inv is None:
        raise ValueError(f"{name}: a bias gradient needs scale_inv")
    return fp8.transpose(input), fp8.column_sums(fp8.dequantize(input, scale_inv, torch.float32)).to(dtype)
