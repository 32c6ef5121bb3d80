"""What a baked image is tried with: FusedAdam fits a linear task, on a GPU where there is one."""

import torch

from apex.optimizers import FusedAdam

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
inputs = torch.randn(256, 8)
targets = inputs @ torch.linspace(-1, 1, 8).unsqueeze(1) + 0.5
model = torch.nn.Linear(8, 1).to(device)
optimizer = FusedAdam(model.parameters(), lr=0.05)
losses = []
for _ in range(200):
    loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if not losses[-1] < losses[0] / 1000:
    raise SystemExit(f"FusedAdam did not fit: loss {losses[0]:.4f} -> {losses[-1]:.4f} on {device}")
print(
    f"FusedAdam: loss {losses[0]:.4f} -> {losses[-1]:.6f} in {len(losses)} steps on {device}, torch {torch.__version__}"
)
