"""The functions of the public Transformer Engine's transformer_engine_extensions (1.0 to 1.6), later called
transformer_engine_torch. They record no gradients, as there.

Codes of FP8 are uint8 tensors, and a DType says which format they have; torch's FP8 dtypes are taken for either, too.
scale, amax, scale_inv: float32 of one element: x * scale is cast, amax becomes max(amax, max |x|), and scale_inv
1 / scale (which the public engine does from 1.8 on). Tensors without an element stand for none. sm_margin is not looked
at. Beyond the public engine: CPU tensors, any sizes. Errors: TypeError (dtypes), ValueError (shapes, devices), before
anything is written.
"""

from __future__ import annotations

import torch

from apex import _fp8
from apex._legacy import (
    _softmax,
    absent,
    fused_rotary_positional_embedding,
    scaled_masked_softmax_cuda,
    scaled_softmax_cuda,
    scaled_upper_triang_masked_softmax_cuda,
)
from apex._legacy.amp_C import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from apex._loader import bindings
from apex.transformer_engine.pytorch import _formats
from apex.transformer_engine.pytorch._tex import casts
from apex.transformer_engine.pytorch._tex.checks import raw as _raw
from apex.transformer_engine.pytorch._tex.norms import (
    layernorm_bwd,
    layernorm_fwd,
    layernorm_fwd_fp8,
    layernorm_fwd_fp8_noalloc,
    layernorm_fwd_noalloc,
    rmsnorm_bwd,
    rmsnorm_fwd,
    rmsnorm_fwd_fp8,
    rmsnorm_fwd_fp8_noalloc,
    rmsnorm_fwd_noalloc,
)
from apex.transformer_engine.pytorch._tex.products import te_gemm
from apex.transformer_engine.pytorch.constants import (
    DType,
    FP8BwdTensors,
    FP8FwdTensors,
    FP8TensorMeta,
    fp8_dtype,
    torch_dtype,
)
from apex.transformer_engine.pytorch.module.layernorm_mlp import ACTIVATIONS

bindings.load()
_ops = torch.ops.apex

__all__ = [
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "FP8TensorMeta",
    "cast_from_fp8",
    "cast_to_fp8",
    "cast_to_fp8_noalloc",
    "dgeglu",
    "dgelu",
    "dqgelu",
    "dreglu",
    "drelu",
    "dsrelu",
    "dswiglu",
    "fp8_transpose",
    "fp8_transpose_noalloc",
    "fp8_transpose_noalloc_noop",
    "fused_amax_and_scale_update_after_reduction",
    "fused_cast_transpose",
    "fused_cast_transpose_bgrad",
    "fused_cast_transpose_bgrad_dgelu",
    "fused_cast_transpose_noop",
    "fused_fp8_transpose_bgrad",
    "fused_multi_cast_transpose",
    "fused_rope_backward",
    "fused_rope_forward",
    "fused_rope_thd_backward",
    "fused_rope_thd_forward",
    "geglu",
    "gelu",
    "get_cudnn_version",
    "layernorm_bwd",
    "layernorm_fwd",
    "layernorm_fwd_fp8",
    "layernorm_fwd_fp8_noalloc",
    "layernorm_fwd_noalloc",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "qgelu",
    "reglu",
    "relu",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "rmsnorm_fwd_fp8",
    "rmsnorm_fwd_fp8_noalloc",
    "rmsnorm_fwd_noalloc",
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
    "srelu",
    "swiglu",
    "te_gemm",
    "userbuf_comm_available",
]

_ATTENTION = "attention runs by transformer_engine.pytorch.DotProductAttention"
_OVERLAP = "communication does not overlap with products here"
# What of the public module is not here, by how its names begin, and why.
_ABSENT = {
    "fused_attn_": _ATTENTION,
    "fa_prepare_": _ATTENTION,
    "get_fused_attn_backend": _ATTENTION,
    "NVTE_": _ATTENTION,
    "thd_": "there is no context parallelism here",
    "Ubuf": _OVERLAP,
    "ubuf": _OVERLAP,
    "Comm": _OVERLAP,
    "te_atomic_gemm": _OVERLAP,
    "multi_tensor_": "states of optimizers are float32; use transformer_engine.pytorch.optimizers",
    "te_grouped_gemm": "use transformer_engine.pytorch.GroupedLinear",
    "moe_": "permutations of experts' rows are not here",
    "quantize": "tensors and quantizers of 2.x are not here; use cast_to_fp8",
    "dequantize": "tensors and quantizers of 2.x are not here; use cast_from_fp8",
    "generic_gemm": "tensors and quantizers of 2.x are not here; use te_gemm",
}


def missing(name, frame):
    """What `frame` gets that asks for a name which is not here."""
    why = next((text for begin, text in _ABSENT.items() if name.startswith(begin)), None)
    told = f": {why}" if why else ""
    module = "transformer_engine_extensions"
    return absent.refused(f"module {module!r} has no attribute {name!r}{told}", module, frame)


# ---- casts and transposes --------------------------------------------------------------------------------------------


@_raw
def cast_to_fp8(input, scale, amax, scale_inv, otype):
    """The codes of input [...] * scale, of its shape."""
    output = torch.empty(input.shape, dtype=torch.uint8, device=input.device)
    cast_to_fp8_noalloc(input, scale, output, amax, scale_inv, otype)
    return output


@_raw
def cast_to_fp8_noalloc(input, scale, output, amax, scale_inv, otype):
    """The same, into output."""
    casts.cast_into("cast_to_fp8_noalloc", input, scale, amax, scale_inv, [(output, False)], otype)


@_raw
def cast_from_fp8(input, scale_inv, itype, otype):
    """The numbers of codes [...] of itype, times scale_inv, in otype: float32, float16 or bfloat16."""
    codes = casts.codes_of("cast_from_fp8", input, fp8_dtype(itype, input.device))
    return _fp8.dequantize(codes, scale_inv, torch_dtype(otype, input.device))


@_raw
def fused_cast_transpose(input, scale, amax, scale_inv, input_cast, input_transpose, otype):
    """Codes of input [rows, columns] into input_cast, and transposed into input_transpose."""
    fused_cast_transpose_noop(input, None, scale, amax, scale_inv, input_cast, input_transpose, otype)


@_raw
def fused_cast_transpose_noop(input, noop, scale, amax, scale_inv, input_cast, input_transpose, otype):
    """The same, unless noop, float32 of one element, is 1: then nothing is written. No host waits for it."""
    targets = [(input_cast, False), (input_transpose, True)]
    casts.cast_into("fused_cast_transpose", input, scale, amax, scale_inv, targets, otype, noop)


def _with_sums(x, scale, amax, scale_inv, otype, before=None, activation=None):
    """[sums of columns, codes, transposed codes] of x, or of the gradient of `before`."""
    dtype = fp8_dtype(otype, x.device)
    codes, turned, sums = _fp8.pass_over(
        x, scale, dtype, casts.given(amax), True, True, True, before, activation
    )
    casts.write_inverse(scale, scale_inv)
    return [sums, casts.as_bytes(codes), casts.as_bytes(turned)]


@_raw
def fused_cast_transpose_bgrad(grad_output, scale, amax, scale_inv, otype):
    """[sums of the columns of grad_output [rows, columns], its codes, their transpose]; sums of grad_output's dtype."""
    return _with_sums(grad_output, scale, amax, scale_inv, otype)


@_raw
def fused_cast_transpose_bgrad_dgelu(grad_output, gelu_input, scale, amax, scale_inv, otype):
    """The same of grad_output times the slope of gelu (its tanh form) at gelu_input."""
    return _with_sums(grad_output, scale, amax, scale_inv, otype, gelu_input, "gelu")


@_raw
def fused_fp8_transpose_bgrad(grad_output, scale, amax, scale_inv, otype, grad_bias_type):
    """[sums of the columns of codes grad_output [rows, columns] times scale_inv, the transposed codes]"""
    codes = casts.codes_of("fused_fp8_transpose_bgrad", grad_output, fp8_dtype(otype, grad_output.device))
    dtype = torch_dtype(grad_bias_type, grad_output.device)
    turned, sums = _fp8.transpose_bias_gradient(codes, scale_inv, dtype)
    return [sums, casts.as_bytes(turned)]


@_raw
def fused_multi_cast_transpose(
    input_list,
    scale_list,
    cast_output_list,
    transposed_output_list,
    amax_output_list,
    scale_inv_output_list,
    otype,
):
    """fused_cast_transpose of each of the lists, in one launch for each 64 of one dtype."""
    lists = scale_list, cast_output_list, transposed_output_list, amax_output_list, scale_inv_output_list
    if any(len(tensors) != len(input_list) for tensors in lists):
        raise ValueError("fused_multi_cast_transpose: the lists have different lengths")
    name = "fused_multi_cast_transpose"
    for x, codes, turned in zip(input_list, cast_output_list, transposed_output_list, strict=True):
        casts.check_targets(name, x, [(codes, False), (turned, True)])
    for dtype in dict.fromkeys(x.dtype for x in input_list):
        chosen = [i for i, x in enumerate(input_list) if x.dtype == dtype]
        inputs = [input_list[i] for i in chosen]
        scales = torch.stack([scale_list[i].reshape(()) for i in chosen])
        amaxes = torch.stack([amax_output_list[i].reshape(()) for i in chosen])
        rows, columns = _fp8.multi_quantize_transpose(inputs, scales, fp8_dtype(otype, scales.device), amaxes)
        for i, codes, turned, scale, amax in zip(chosen, rows, columns, scales, amaxes, strict=True):
            casts.write_codes(name, cast_output_list[i], codes)
            casts.write_codes(name, transposed_output_list[i], turned)
            amax_output_list[i].copy_(amax.reshape(amax_output_list[i].shape))
            casts.write_inverse(scale, scale_inv_output_list[i])


@_raw
def fp8_transpose(input, otype):
    """The transpose of codes [rows, columns]."""
    return casts.as_bytes(
        _fp8.transpose(casts.codes_of("fp8_transpose", input, fp8_dtype(otype, input.device)))
    )


@_raw
def fp8_transpose_noalloc(input, output, otype):
    """The same, into output."""
    casts.write_codes("fp8_transpose_noalloc", output, fp8_transpose(input, otype))


@_raw
def fp8_transpose_noalloc_noop(input, output, noop, otype):
    """The same, unless noop is 1."""
    casts.write_codes("fp8_transpose_noalloc_noop", output, fp8_transpose(input, otype), casts.given(noop))


# ---- activations -----------------------------------------------------------------------------------------------------


def _rows(tensor):
    return tensor.reshape(-1, tensor.shape[-1])


def _activation(name, kind, gated):
    def run(input, scale, amax, scale_inv, otype):
        x, dtype = _rows(input), torch_dtype(otype, input.device)
        if not casts.is_fp8(dtype):
            return _ops.bias_activation_forward(x, None, kind, gated).to(dtype)
        codes = _fp8.quantize(x, scale, dtype, casts.given(amax), kind, gated)
        casts.write_inverse(scale, scale_inv)
        return casts.as_bytes(codes)

    what = f"{kind} of one half of the columns times the other half" if gated else kind
    run.__name__ = run.__qualname__ = name
    run.__doc__ = (
        f"{what} of input [..., columns], as a matrix: codes, or numbers where otype is none of FP8."
    )
    return _raw(run)


def _slope(name, kind, gated):
    def run(grad, input, otype):
        x, y = _rows(input), _rows(grad)
        wide = torch.promote_types(x.dtype, y.dtype)
        found = _ops.bias_activation_backward(y.to(wide), x.to(wide), None, kind, gated, False)[0]
        return found.to(torch_dtype(otype, input.device))

    run.__name__ = run.__qualname__ = f"d{name}"
    run.__doc__ = (
        f"The gradient of {name}'s input [..., columns], as a matrix of otype, from that of what it gave."
    )
    return _raw(run)


_KINDS = {name: ACTIVATIONS[name] for name in ("gelu", "relu", "qgelu", "srelu", "geglu", "reglu", "swiglu")}
gelu, relu, qgelu, srelu, geglu, reglu, swiglu = (_activation(name, *kind) for name, kind in _KINDS.items())
dgelu, drelu, dqgelu, dsrelu, dgeglu, dreglu, dswiglu = (_slope(name, *kind) for name, kind in _KINDS.items())


# ---- scales, softmax, rotary positions -------------------------------------------------------------------------------


@_raw
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer, amax_histories, scales, scale_invs, amax_compute_algo, fp8_dtype, margin
):
    """Delayed scaling's new scales of several tensors' states, in one launch, in place.

    amax_reduction_buffer: float32 [all], the largest magnitudes of all ranks; where it is 0 or has no element, row 0 of
    a history counts. amax_histories, scales, scale_invs: lists of float32 [steps, n], [n], [n]. amax_compute_algo:
    "max" or "most_recent". Where the newest magnitude is 0, scale and history stay.
    """
    if len({history.shape[0] for history in amax_histories}) > 1:
        raise ValueError(
            "fused_amax_and_scale_update_after_reduction: the histories must have as many rows each"
        )
    sizes = [scale.numel() for scale in scales]
    history, scale = torch.cat(list(amax_histories), 1), torch.cat([s.reshape(-1) for s in scales])
    newest, reduced = history[0].clone(), casts.given(amax_reduction_buffer)
    if reduced is not None:
        newest = torch.where(reduced != 0, reduced, newest)
    rolled, made, inverse = history.clone(), scale.clone(), torch.empty_like(scale)
    largest = torch.full_like(scale, _formats.largest(torch_dtype(fp8_dtype, scale.device)))
    _fp8.update_scales(rolled, made, inverse, largest, margin, amax_compute_algo, newest)
    seen = newest != 0
    made, rolled = torch.where(seen, made, scale), torch.where(seen, rolled, history)
    for state, values in (
        (amax_histories, rolled),
        (scales, made),
        (scale_invs, torch.ones_like(made) / made),
    ):
        parts = values.split(sizes, values.dim() - 1)
        torch._foreach_copy_(
            list(state), [part.reshape(s.shape) for part, s in zip(parts, state, strict=True)]
        )


@_raw
def scaled_aligned_causal_masked_softmax_forward(input, scale_factor):
    """softmax(scale_factor * input) of (batch, heads, queries, keys), whose last query sees all keys."""
    _softmax.check("input", input, 4)
    return _softmax.forward(input, None, scale_factor, causal=True)


@_raw
def scaled_aligned_causal_masked_softmax_backward(output_grads, softmax_results, scale_factor):
    """The gradient of the input, a fresh tensor."""
    _softmax.check("output_grads", output_grads, 4)
    return _softmax.backward(output_grads, softmax_results, scale_factor, causal=True)


scaled_softmax_forward = scaled_softmax_cuda.forward
scaled_softmax_backward = scaled_softmax_cuda.backward
scaled_masked_softmax_forward = scaled_masked_softmax_cuda.forward
scaled_masked_softmax_backward = scaled_masked_softmax_cuda.backward
scaled_upper_triang_masked_softmax_forward = scaled_upper_triang_masked_softmax_cuda.forward
scaled_upper_triang_masked_softmax_backward = scaled_upper_triang_masked_softmax_cuda.backward
fused_rope_forward = fused_rotary_positional_embedding.forward
fused_rope_backward = fused_rotary_positional_embedding.backward
fused_rope_thd_forward = fused_rotary_positional_embedding.forward_thd
fused_rope_thd_backward = fused_rotary_positional_embedding.backward_thd


def get_cudnn_version():
    """The cuDNN that torch has, as a number (90100 is 9.1.0); 0 where there is none."""
    return torch.backends.cudnn.version() or 0


def userbuf_comm_available():
    """False: communication does not overlap with products here."""
    return False
