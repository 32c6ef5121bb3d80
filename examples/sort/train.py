"""A small GPT learns to sort numbers: of the torch layers it is made of, flags put Transformer Engine's in their place.

A sample is a row of digits and the same digits in order; the model says the second half, digit by digit. At the end it
sorts rows that it has not seen. Flags have the names of the public engine's example.

usage: python train.py [--use-te] [--ln-mlp] [--use-fp8] [--use-amp] [--miters 3000] [--lr 2e-4] [--device cpu]
    --use-te    linear layers and norms of apex.transformer_engine; --ln-mlp and --use-fp8 say it, too
    --ln-mlp    a norm and the two layers behind it are one te.LayerNormMLP
    --use-fp8   in FP8, with delayed scaling; on the CPU, and on cards without it, emulated
    --use-amp   torch.autocast to bfloat16
needs: torch, apex, rich
"""

import argparse
import contextlib

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import apex.transformer_engine.pytorch as te
from apex.optimizers import FusedAdam
from apex.transformer_engine.common import recipe

console = Console()


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm: x [batch, length, width] -> the same."""

    def __init__(self, width, heads, asked):
        super().__init__()
        linear, norm = (te.Linear, te.LayerNorm) if asked.use_te else (nn.Linear, nn.LayerNorm)
        options = dict(device=asked.device)
        self.heads = heads
        self.norm1, self.qkv = norm(width, **options), linear(width, 3 * width, **options)
        self.proj = linear(width, width, **options)
        if asked.ln_mlp:
            self.mlp = te.LayerNormMLP(width, 4 * width, **options)
        else:
            self.mlp = nn.Sequential(
                norm(width, **options),
                linear(width, 4 * width, **options),
                nn.GELU(approximate="tanh"),
                linear(4 * width, width, **options),
            )

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """digits [batch, length] -> logits [batch, length, digits]."""

    def __init__(self, digits, length, asked):
        super().__init__()
        width, options = asked.width, dict(device=asked.device)
        self.digits = nn.Embedding(digits, width, **options)
        self.places = nn.Parameter(torch.zeros(length, width, **options))
        self.blocks = nn.Sequential(*(Block(width, asked.heads, asked) for _ in range(asked.layers)))
        self.norm = nn.LayerNorm(width, **options)
        self.output = nn.Linear(width, digits, bias=False, **options)  # too few outputs for FP8

    def forward(self, x):
        return self.output(self.norm(self.blocks(self.digits(x) + self.places[: x.shape[1]])))


def contexts(asked):
    """Of a forward pass."""
    stack = contextlib.ExitStack()
    if asked.use_amp:
        stack.enter_context(torch.autocast(asked.device.type, dtype=torch.bfloat16))
    of = recipe.DelayedScaling(amax_history_len=16, amax_compute_algo="max")
    stack.enter_context(te.fp8_autocast(enabled=asked.use_fp8, fp8_recipe=of))
    return stack


def draw(asked, count, seen, generator):
    """[count, length] rows of digits; a row is seen in training or not, which one of four is not, by its sum."""
    rows = torch.randint(asked.digits, (4 * count + 64, asked.length), generator=generator)
    places = torch.arange(1, asked.length + 1)
    rows = rows[((rows * places).sum(1) % 4 != 0) == seen]
    return rows[:count].to(asked.device)


def train(model, asked):
    optimizer = FusedAdam(model.parameters(), lr=asked.lr, weight_decay=0.1)
    generator = torch.Generator().manual_seed(asked.seed)
    with Progress(*Progress.get_default_columns(), "loss {task.fields[loss]:.4f}", console=console) as bar:
        task = bar.add_task("training", total=asked.miters, loss=float("nan"))
        for _ in range(asked.miters):
            rows = draw(asked, asked.batch, True, generator)
            whole = torch.cat((rows, rows.sort(1).values), 1)
            optimizer.zero_grad()
            with contexts(asked):
                logits = model(whole[:, :-1])
            said = logits[:, asked.length - 1 :].float()
            loss = nn.functional.cross_entropy(said.flatten(0, 1), whole[:, asked.length :].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bar.update(task, advance=1, loss=loss.item())
    return loss.item()


@torch.no_grad()
def sorted_rows(model, asked):
    """How many of 500 unseen rows the model sorts, digit after digit."""
    model.eval()
    rows = draw(asked, 500, False, torch.Generator().manual_seed(asked.seed + 1))
    whole = rows
    for _ in range(asked.length):
        with contexts(asked):
            said = model(whole)[:, -1].argmax(-1)
        whole = torch.cat((whole, said[:, None]), 1)
    return (whole[:, asked.length :] == rows.sort(1).values).all(1).double().mean().item()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag in ("--use-te", "--ln-mlp", "--use-fp8", "--use-amp"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--miters", type=int, default=3000, help="steps")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--digits", type=int, default=5, help="how many different ones")
    parser.add_argument("--length", type=int, default=12, help="of a row")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    asked = parser.parse_args()
    if asked.miters < 1 or asked.width % asked.heads:
        parser.error("--miters is 1 or more, --width a multiple of --heads")
    asked.use_te = asked.use_te or asked.ln_mlp or asked.use_fp8
    torch.manual_seed(asked.seed)
    model = GPT(asked.digits, 2 * asked.length, asked)
    loss = train(model, asked)
    kind = "Transformer Engine's layers" if asked.use_te else "torch's layers"
    print(f"{kind}, {'FP8' if asked.use_fp8 else 'bf16 autocast' if asked.use_amp else 'float32'}")
    print(f"final loss {loss:.4f}, {100 * sorted_rows(model, asked):.1f} % of unseen rows sorted")


if __name__ == "__main__":
    main()
