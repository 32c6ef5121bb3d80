"""FP8 casts by whatever serves them here: kernels, CPU variants or the reference; apex/reference/fp8.py says what each
computes. None has a derivative: an input that asks for a gradient is refused where gradients are recorded.

Public Transformer Engine's names: cast_to_fp8 is `quantize`, cast_from_fp8 `dequantize`; fused_cast_transpose and its
forms with a bias gradient and an activation's gradient are `quantize_transpose`, fp8_transpose `transpose`.
"""

import torch

from apex._functional import call, entry, is_traced
from apex._loader import library
from apex.reference.fp8 import rows_of

_ops = torch.ops.apex
_cast = entry("fp8_quantize")
_has_torch_function = torch.overrides.has_torch_function
_OCP = (torch.float8_e4m3fn, torch.float8_e5m2)
_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def formats(device):
    """(the e4m3 dtype, the e5m2 dtype) of a device's FP8 products: FNUZ on gfx942, OCP everywhere else."""
    device = torch.device(device)
    if device.type == "cuda" and torch.version.hip:
        name = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
        return _FNUZ if name.partition(":")[0] in ("gfx940", "gfx941", "gfx942") else _OCP
    return _OCP


def pass_over(
    x, scale, dtype, amax, rowwise, columnwise, bias_gradient, before=None, activation=None, gated=False
):
    """(q, its transpose, sums of columns), each without an element where it is not asked for.

    With none of them it is amax alone that is written. See apex.reference.fp8.quantize_transpose.
    """
    activation = activation or "none"
    return cast(x, scale, amax, dtype, rowwise, columnwise, bias_gradient, before, activation, gated)[:3]


def cast(*arguments):
    """All results of the op, whose arguments these are, all of them; see apex.reference.fp8_quantize."""
    if _cast is None or is_traced() or _has_torch_function(arguments):
        return call("fp8_quantize", _ops.fp8_quantize.default, 4, arguments)
    try:
        return _cast(*arguments)
    except RuntimeError as error:
        library.raise_stored(error)  # the probe's own exception, if it refused to choose
        raise


def quantize(x, scale, dtype, amax=None, activation=None, gated=False):
    """x * scale in FP8, or with `activation` that of f(x), gated f(x1) * x2; see apex.reference.fp8.quantize."""
    return pass_over(x, scale, dtype, amax, True, False, False, None, activation, gated)[0]


def quantize_transpose(
    x,
    scale,
    dtype,
    amax=None,
    bias_gradient=False,
    before=None,
    activation=None,
    gated=False,
    rowwise=True,
):
    """(q, its transpose), with bias_gradient the sums of the columns too; see apex.reference.fp8.quantize_transpose.

    rowwise=False: q has no element, and is not written.
    """
    found = pass_over(x, scale, dtype, amax, rowwise, True, bias_gradient, before, activation, gated)
    return found if bias_gradient else found[:2]


def dequantize(q, scale_inv, dtype):
    """q * scale_inv in float32, float16 or bfloat16."""
    return call("fp8_dequantize", _ops.fp8_dequantize.default, 1, (q, scale_inv, dtype))


def transpose(q):
    """[columns, rows] of an FP8 tensor [..., columns]."""
    return call("fp8_transpose", _ops.fp8_transpose.default, 2, (q, None, False, None))[0]


def transpose_bias_gradient(q, scale_inv, dtype):
    """(the transpose of q, the sums of the columns of q * scale_inv in `dtype`)."""
    return call("fp8_transpose", _ops.fp8_transpose.default, 2, (q, scale_inv, True, dtype))


def update_scales(amax_history, scale, scale_inv, fp8_max, margin=0, algorithm="max", reduced=None):
    """Delayed scaling's update in one launch, in place; see apex.reference.fp8.update_scales for the rule.

    amax_history: float32 [rows, n], whose rows or columns are contiguous; scale, scale_inv, fp8_max: float32 [n];
    reduced: float32 [n] or None, in the place of row 0.
    """
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f'update_scales: the algorithm must be "max" or "most_recent", not {algorithm!r}')
    most_recent = algorithm == "most_recent"
    arguments = (amax_history, scale, scale_inv, fp8_max, float(margin), most_recent, reduced)
    call("fp8_update_scales", _ops.fp8_update_scales.default, None, arguments)


def multi_update_scales(amax_histories, scales, fp8_max, margin=0, algorithm="max"):
    """(new scales, 1 / them) of many histories, of all tensors one behind the other, in one launch for each 120.

    Histories whose columns are contiguous, and lie one behind the other in memory as their scales do, count as one. See
    apex.reference.fp8_multi_update_scales. Histories move on in place; the old scales stay.
    """
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f'update_scales: the algorithm must be "max" or "most_recent", not {algorithm!r}')
    scale, scale_inv = torch.empty_like(fp8_max), torch.empty_like(fp8_max)
    arguments = (
        fp8_max, list(amax_histories), list(scales), scale, scale_inv, float(margin), algorithm == "most_recent",
    )  # fmt: skip
    call("fp8_multi_update_scales", _ops.fp8_multi_update_scales.default, None, arguments)
    return scale, scale_inv


def multi_quantize_transpose(inputs, scales, dtype, amaxes=None):
    """([q of each], [its transpose]) of a list of tensors in one launch for each 64 of them.

    inputs: [..., columns] of one dtype. scales, amaxes: float32 [n], as of `quantize`; amaxes may be None.
    """
    rows = [torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in inputs]
    columns = [
        torch.empty((x.shape[-1], rows_of(x)), dtype=dtype, device=x.device) for x in inputs
    ]  # fmt: skip
    _ops.fp8_multi_quantize(scales, amaxes, list(inputs), rows, columns)
    return rows, columns


def quantize_blocks(x, dtype, block=(1, 128), power_of_two=True, epsilon=0.0, rowwise=True, columnwise=False):
    """(q, scale_inv, its transpose, scale_inv of that): x in FP8, each block by a scale of its own.

    See apex.reference.fp8.quantize_blocks for the rule. block: (1, 128) or (128, 128). scale_inv: [rows, column
    blocks], whose columns lie one behind the other as products want them, or [row blocks, column blocks]. The
    transpose of a 1x128 cast is a cast of the transpose: its scale_inv is [columns, row blocks]; of 128x128, that of q
    turned. What rowwise and columnwise do not ask for has no element.
    """
    if tuple(block) not in ((1, 128), (128, 128)):
        raise ValueError(f"the block must be (1, 128) or (128, 128), not {tuple(block)}")
    square = block[0] == 128
    arguments = (x, dtype, square, rowwise, columnwise, power_of_two, epsilon)
    q, scale_inv, turned, turned_inv = call(
        "fp8_quantize_blocks", _ops.fp8_quantize_blocks.default, 4, arguments
    )
    if square:
        return q, scale_inv, turned, scale_inv.t()
    return q, scale_inv.t() if rowwise else scale_inv, turned, turned_inv.t() if columnwise else turned_inv


def layer_norm(x, weight, bias, eps, scale, dtype, amax=None, zero_centered_gamma=False):
    """(q, mean, rstd): layer norm of the last dimension times scale in FP8; see apex.reference.fp8_layer_norm."""
    arguments = (x, weight, bias, eps, scale, amax, dtype, zero_centered_gamma)
    return call("fp8_layer_norm", _ops.fp8_layer_norm.default, 3, arguments)


def rms_norm(x, weight, eps, scale, dtype, amax=None, zero_centered_gamma=False):
    """(q, rstd): RMS norm of the last dimension times scale in FP8; see apex.reference.fp8_rms_norm."""
    arguments = (x, weight, eps, scale, amax, dtype, zero_centered_gamma)
    return call("fp8_rms_norm", _ops.fp8_rms_norm.default, 2, arguments)
