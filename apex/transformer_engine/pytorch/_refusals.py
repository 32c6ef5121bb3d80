"""Arguments and names of the public engine that ask for what is not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OVERLAPS = (
    "skip_weight_param_allocation",
    "ub_split_rs",
    "ub_split_ag",
    "ub_bulk_wgrad",
    "ub_bulk_dgrad",
    "ub_atomic_gemm_rs",
    "ub_atomic_gemm_ag",
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_tp_comm_overlap",
    "delay_wgrad_compute",
)
_NOTES = ("ub_name", "name", "symmetric_ar_type")


def check_overlaps(layer: str, arguments: Mapping[str, Any]) -> None:
    """Raises TypeError for a name that there is not, NotImplementedError for one that asks for something."""
    for name, value in arguments.items():
        if name in _NOTES:
            continue
        if name not in _OVERLAPS:
            raise TypeError(f"{layer} got an unexpected argument {name!r}")
        if value:
            raise NotImplementedError(
                f"{layer}: {name}={value!r} is not supported: leave it False (communication is not overlapped with "
                "products here)"
            )


_FP4 = "NVFP4 and MXFP8 are not here"
_QUANTIZERS = "tensors and quantizers of 2.x are not here; Float8Tensor is"
# Of names, and of those that begin or end so, why they are not here.
_ABSENT = {
    "initialize_ub": "communication does not overlap with products here",
    "destroy_ub": "communication does not overlap with products here",
    "UserBufferQuantizationMode": "communication does not overlap with products here",
    "moe_": "permutations of experts' rows are not here",
    "get_cpu_offload_context": "activations are not taken to the CPU; torch.autograd.graph.save_on_cpu does that",
    "mark_not_offload": "activations are not taken to the CPU; torch.autograd.graph.save_on_cpu does that",
    "ManualOffloadSynchronizer": "activations are not taken to the CPU; torch.autograd.graph.save_on_cpu does that",
    "parallel_cross_entropy": "use apex.transformer.tensor_parallel.vocab_parallel_cross_entropy",
    "FusedMLAQUpProjRopeQuant": "attention is not made in FP8",
    "NVFP4": _FP4,
    "MXFP8": _FP4,
    "is_nvfp4": _FP4,
    "Float8": _QUANTIZERS,
    "Quantize": _QUANTIZERS,
    "Hybrid": _QUANTIZERS,
    "Identity": _QUANTIZERS,
    "DelayedScalingRequest": _QUANTIZERS,
    "prepare_for_saving": _QUANTIZERS,
    "restore_from_": _QUANTIZERS,
    "CusolverMpCtx": "Newton-Schulz iterations are not here",
    "newton_schulz": "Newton-Schulz iterations are not here",
    "get_cudnn_version": "use torch.backends.cudnn.version()",
    "get_device_compute_capability": "use torch.cuda.get_device_capability()",
    "is_bf16_available": "bfloat16 is taken on every device",
    "deinterleave_glu_tensor": "halves of gated activations are not interleaved",
    "interleave_glu_tensor": "halves of gated activations are not interleaved",
}


def why_absent(name: str) -> str:
    """ ": " and why a name of the public engine is not here; "" for a name that is none of its."""
    return next((f": {why}" for begin, why in _ABSENT.items() if name.startswith(begin)), "")
