"""accelerate trains a model in FP8 over apex-transformer-engine: python accelerate_training.py prints what passed."""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs, has_transformer_engine_layers
from torch import nn

F32 = torch.float32


def main():
    torch.manual_seed(0)
    handler = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=8, amax_compute_algo="max")
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])
    assert accelerator.fp8_backend == "TE"
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 32, dtype=F32, device="cpu")
    y = torch.randn(64, 16, dtype=F32, device="cpu")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert has_transformer_engine_layers(model)
    layers = accelerator.unwrap_model(model)
    assert [type(layers[i]) for i in (0, 2, 3)] == [te.Linear, te.LayerNorm, te.Linear]
    for name, value in before.items():
        assert torch.equal(layers.state_dict()[name], value), name
    losses = []
    for _ in range(8):
        for rows, wanted in loader:
            loss = nn.functional.mse_loss(model(rows).float(), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses
    scale = layers[0].fp8_meta["scaling_fwd"].scale
    assert scale[0] != 1 and scale[1] != 1
    narrow = model(x)
    model.eval()  # in evaluation accelerate multiplies without FP8
    assert not torch.equal(model(x), narrow)
    print("passed accelerate")


if __name__ == "__main__":
    main()
