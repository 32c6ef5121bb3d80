"""Layers of megatron-core over apex, beside torch's own: python megatron_core_layers.py DEVICE prints what passed.

Megatron-core and the import names of public apex must be on the path.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

import apex

DEVICE = sys.argv[1]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def config(**options):
    return TransformerConfig(num_layers=1, hidden_size=1024, num_attention_heads=8, **options)


def near(found, wanted, unit):
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted.double(), rtol=unit, atol=unit * scale)


def random(*shape, dtype=F32):
    return torch.randn(*shape, dtype=F32, device=DEVICE).to(dtype)


def gradient_accumulation_fusion():
    """Weight gradients go to main_grad, a view of a flat buffer: float32 beside halves and floats, and bfloat16."""
    assert layers._grad_accum_fusion_available
    for dtype, main_dtype in ((BF16, F32), (F16, F32), (F32, F32), (BF16, BF16)):
        weight = random(24, 40, dtype=dtype).requires_grad_()
        weight.main_grad = torch.ones(3 + 24 * 40, dtype=main_dtype, device=DEVICE)[3:].view(24, 40)
        if DEVICE == "cuda":  # what Megatron then hands to autograd it makes on the current GPU
            weight.grad_added_to_main_grad = False
        x, g = random(5, 2, 40, dtype=dtype).requires_grad_(), random(5, 2, 24, dtype=dtype)
        for _ in range(2):
            run = layers.linear_with_grad_accumulation_and_async_allreduce
            run(x, weight, None, True, False, False).backward(g)
        wanted = 1 + 2 * g.double().reshape(10, 24).t() @ x.detach().double().reshape(10, 40)
        near(weight.main_grad, wanted, 2**-6 if main_dtype is BF16 else 2**-18)
        assert getattr(weight, "grad_added_to_main_grad", True) is True


def fused_layer_norm():
    """Persistent and not, zero-centred or not, memory-efficient or not."""
    for hidden, persist in ((1024, True), (1000, True), (1024, False)):
        for centred in (False, True):
            for efficient in (False, True):
                options = dict(layernorm_zero_centered_gamma=centred, memory_efficient_layer_norm=efficient)
                norm = FusedLayerNorm(config(persist_layer_norm=persist, **options), hidden).to(DEVICE)
                x = random(6, 2, hidden).requires_grad_()
                y = x.detach().clone().requires_grad_()
                weight = norm.weight.detach() + (1 if centred else 0)
                found, wanted = norm(x), F.layer_norm(y, (hidden,), weight, norm.bias.detach())
                near(found, wanted, 2**-18)
                g = random(6, 2, hidden)
                found.backward(g), wanted.backward(g)
                near(x.grad, y.grad, 2**-16)
                assert norm.weight.grad is not None and norm.bias.grad is not None


def masked(scores, mask):
    return scores.masked_fill(mask, -10000.0)


def fused_softmax():
    """Causal, masked, and neither."""
    for kind, mask in (
        (AttnMaskType.causal, None),
        (AttnMaskType.padding, torch.rand(2, 1, 32, 32, dtype=F32, device=DEVICE) > 0.7),
        (AttnMaskType.padding, None),
    ):
        results = []
        scores = random(2, 4, 32, 32, dtype=BF16)
        g = random(2, 4, 32, 32, dtype=BF16)
        for fused in (True, False):
            softmax = FusedScaleMaskSoftmax(False, True, kind, fused, masked, True, 0.5)
            assert softmax.is_kernel_available(mask, *scores.shape) == fused
            leaf = scores.clone().requires_grad_()
            own = torch.ones(32, 32, device=DEVICE, dtype=torch.bool).triu(1) if not fused else None
            given = own if kind == AttnMaskType.causal and not fused else mask
            output = softmax(leaf, given)
            output.backward(g)
            results.append((output, leaf.grad))
        for found, wanted in zip(*results, strict=True):
            near(found, wanted, 2**-6)


def clipped_gradients():
    """Norms and scaling of gradients are amp_C's."""
    assert optimizer.multi_tensor_scale_impl.__module__.endswith("amp_C")
    assert clip_grads.l2_norm_impl.__module__.endswith("amp_C")
    parameters = [torch.nn.Parameter(random(7, 5)), torch.nn.Parameter(random(11))]
    if DEVICE == "cuda":  # elsewhere Megatron asks for the current GPU
        for p in parameters:
            p.grad = random(*p.shape)
        before = [p.grad.clone() for p in parameters]
        norm = torch.cat([g.flatten() for g in before]).double().norm()
        clip_grads.clip_grad_by_total_norm_fp32(parameters, 0.5, float(norm))
        for p, g in zip(parameters, before, strict=True):
            near(p.grad, g * (0.5 / (norm.float() + 1e-6)), 2**-20)


def main():
    print("apex", apex.__file__)
    torch.manual_seed(1)
    for case in (gradient_accumulation_fusion, fused_layer_norm, fused_softmax, clipped_gradients):
        case()
        print("passed", case.__name__)


if __name__ == "__main__":
    main()
