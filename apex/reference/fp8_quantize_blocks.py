"""Block scaling's casts to FP8 in plain PyTorch: the op over apex/reference/fp8.py."""

import torch

from apex.reference import fp8

NO_DERIVATIVE = True


def fp8_quantize_blocks(
    input, dtype, square=False, rowwise=True, columnwise=False, power_of_two=True, epsilon=0.0
):
    """(rows, scale_inv, columns, scale_inv_turned): the input in FP8, a scale for each block.

    input: [..., columns] float32, float16 or bfloat16, whose leading dimensions make the rows. Blocks are 128x128
    (square) or 1x128. rows: the input's shape; scale_inv, float32: [row blocks, column blocks] of square blocks, of
    others [column blocks, rows]. columns: [columns, rows], the transpose: of the same codes and scales (transposed) if
    square, else a cast of its own, of blocks down 128 rows, with scale_inv_turned [row blocks, columns]. power_of_two:
    scales are rounded down to one. epsilon: the least amax. What nobody asked for is empty. Raises ValueError,
    TypeError, RuntimeError where the input asks for a gradient.
    """
    name = "fp8_quantize_blocks"
    fp8.format_of(name, dtype)
    fp8.check_input(name, input)
    wide = input.shape[-1]
    flat = input.reshape(-1, wide) if input.numel() else input.new_empty((fp8.rows_of(input), wide))
    none, no_scale = (
        torch.empty(0, dtype=dtype, device=input.device),
        torch.empty(0, dtype=torch.float32, device=input.device),
    )
    side = (fp8.BLOCK, fp8.BLOCK)
    if square:
        q, scale_inv = fp8.quantize_blocks(flat, dtype, side, power_of_two, epsilon)
        turned = fp8.transpose(q) if columnwise else none
        return (q.reshape(input.shape) if rowwise else none), scale_inv, turned, no_scale
    rows, scale_inv, columns, scale_inv_turned = none, no_scale, none, no_scale
    if rowwise:
        rows, scale_inv = fp8.quantize_blocks(flat, dtype, (1, fp8.BLOCK), power_of_two, epsilon)
        rows, scale_inv = rows.reshape(input.shape), scale_inv.t().contiguous()
    if columnwise:
        columns, scale_inv_turned = fp8.quantize_blocks(
            flat.t(), dtype, (1, fp8.BLOCK), power_of_two, epsilon
        )
        scale_inv_turned = scale_inv_turned.t().contiguous()
    return rows, scale_inv, columns, scale_inv_turned
