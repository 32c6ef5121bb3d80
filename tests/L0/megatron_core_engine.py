"""megatron-core's GPT of Transformer Engine's layers over apex-transformer-engine, on the CPU.

python megatron_core_engine.py prints what passed. Megatron-core and apex-transformer-engine must be on the path.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from megatron.core.enums import Fp8Recipe
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import Adam, clip_grads
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

# Its other ways to run again ask for CUDA's random state.
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def gpt(norm, fp8, **options):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        normalization=norm,
        add_bias_linear=norm == "LayerNorm",
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        attention_backend=AttnBackend.auto,
        fp8="hybrid" if fp8 else None,
        fp8_recipe=Fp8Recipe.delayed,
        fp8_amax_history_len=4,
        fp8_amax_compute_algo="max",
        **options,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_with_transformer_engine_spec()
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=16)
    assert isinstance(model.decoder.layers[0].mlp.linear_fc1, te.LayerNormLinear)
    assert isinstance(model.decoder.final_layernorm, getattr(te, norm))
    return model


def train(model, steps=8):
    """(losses, gradients of the last step)"""
    optimizer = Adam(model.parameters(), lr=1e-2, adam_w_mode=False)
    generator = torch.Generator(device="cpu").manual_seed(1)
    tokens = torch.randint(64, (2, 16), generator=generator, dtype=torch.int64, device="cpu")
    places = torch.arange(16, dtype=torch.int64, device="cpu").expand(2, 16)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens, places, None, labels=tokens).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in model.parameters()]


def main():
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        assert HAVE_TE and Adam is te.optimizers.FusedAdam
        assert clip_grads.l2_norm_impl is te.optimizers.multi_tensor_l2norm
        for norm in ("LayerNorm", "RMSNorm"):
            wide, _ = train(gpt(norm, False))
            model = gpt(norm, True)
            narrow, grads = train(model)
            assert narrow[-1] < 0.7 * narrow[0], narrow
            assert abs(narrow[-1] - wide[-1]) < 0.1 * wide[-1] and narrow != wide
            assert (model.decoder.layers[1].mlp.linear_fc1.fp8_meta["scaling_fwd"].scale[:2] != 1).all()
            again, same = train(gpt(norm, True, **FULL))
            assert again == narrow and all(map(torch.equal, same, grads))
            print(f"passed {norm}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
