"""Trains a small GPT on the text of Python's reference manual, letter by letter, in bfloat16 and in FP8, by seeds.

Both begin with the same weights and see the same samples. Prints the loss on text that is held out, for each seed and
recipe, and how far FP8's is from bfloat16's, and saves a plot of all curves. On the CPU, and on cards without FP8
products, FP8 is emulated: the same numbers, slower.

usage: python train.py [--recipes delayed current] [--seeds 3] [--steps 300] [--device cpu] [--plot losses.png]
needs: torch, apex, matplotlib, rich
"""

import argparse
import pydoc_data.topics

import matplotlib
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import apex.transformer_engine.pytorch as te
from apex.optimizers import FusedAdam
from apex.transformer_engine.common import recipe

matplotlib.use("Agg")
from matplotlib import pyplot

console = Console()
RECIPES = {
    "bf16": None,
    "delayed": recipe.DelayedScaling(amax_history_len=16),
    "current": recipe.Float8CurrentScaling(),
    "blocks": recipe.Float8BlockScaling(),
}
LETTERS = 128
BF16 = torch.bfloat16


class GPT(nn.Module):
    """letters [context, batch] -> logits [context, batch, LETTERS]."""

    def __init__(self, context, hidden, heads, layers, device):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, hidden, dtype=BF16, device=device)
        self.places = nn.Embedding(context, hidden, dtype=BF16, device=device)
        options = dict(hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, device=device)
        self.layers = nn.ModuleList(
            te.TransformerLayer(hidden, 4 * hidden, heads, self_attn_mask_type="causal", **options)
            for _ in range(layers)
        )
        self.output = te.LayerNormLinear(hidden, LETTERS, params_dtype=BF16, device=device)

    def forward(self, letters):
        places = torch.arange(len(letters), device=letters.device)
        x = self.letters(letters) + self.places(places)[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def text(device):
    """(letters to learn from, letters held out)"""
    whole = "\n\n".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    letters = torch.tensor(list(whole), dtype=torch.int64, device=device)
    return letters[: -len(letters) // 10], letters[-len(letters) // 10 :]


def samples(letters, context, batch, generator):
    """[context + 1, batch]"""
    starts = torch.randint(len(letters) - context - 1, (batch,), generator=generator).to(letters.device)
    return letters[starts + torch.arange(context + 1, device=letters.device)[:, None]]


def loss_of(model, of, drawn):
    with te.fp8_autocast(enabled=of is not None, fp8_recipe=of):
        logits = model(drawn[:-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), drawn[1:].flatten())


def train(of, name, seed, letters, held_out, asked):
    """(the loss of each step, the loss on what is held out)"""
    torch.manual_seed(seed)
    model = GPT(asked.context, asked.hidden, asked.heads, asked.layers, asked.device)
    optimizer = FusedAdam(model.parameters(), lr=asked.lr, master_weights=True)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in track(range(asked.steps), f"seed {seed}, {name}", console=console, transient=True):
        optimizer.zero_grad()
        loss = loss_of(model, of, samples(letters, asked.context, asked.batch, generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        kept = [
            loss_of(model, of, samples(held_out, asked.context, asked.batch, generator)) for _ in range(20)
        ]
    return losses, torch.stack(kept).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES][1:], default=["delayed", "current"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--context", type=int, default=64, help="letters of a sample")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--plot", default="losses.png")
    asked = parser.parse_args()
    if min(asked.seeds, asked.steps) < 1 or asked.hidden % asked.heads:
        parser.error("--seeds and --steps are 1 or more, --hidden a multiple of --heads")
    served = te.served(asked.device)
    console.print(f"FP8: {served['formats']} formats, products: {served['products']}")
    letters, held_out = text(asked.device)
    names = ["bf16", *asked.recipes]
    table, apart = Table("seed", *names), {name: [] for name in asked.recipes}
    for seed in range(asked.seeds):
        found = {}
        for name in names:
            losses, found[name] = train(RECIPES[name], name, seed, letters, held_out, asked)
            color = f"C{names.index(name)}"
            pyplot.plot(losses, color=color, linewidth=0.8, label=name if seed == 0 else None)
        cells = [f"{found[name]:.4f}" for name in names]
        for i, name in enumerate(asked.recipes, 1):
            apart[name].append(100 * (found[name] / found["bf16"] - 1))
            cells[i] += f" ({apart[name][-1]:+.2f} %)"
        table.add_row(str(seed), *cells)
    console.print(table)
    for name, differences in apart.items():
        mean = sum(differences) / len(differences)
        print(f"{name}: held-out loss {mean:+.3f} % of bf16's, mean of {len(differences)} seeds")
    pyplot.xlabel("step")
    pyplot.ylabel("training loss")
    pyplot.legend()
    pyplot.savefig(asked.plot, dpi=120)
    print(f"curves: {asked.plot}")


if __name__ == "__main__":
    main()
