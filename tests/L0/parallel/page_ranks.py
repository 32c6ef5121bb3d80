"""What each rank of test_pages.py runs: the examples of pages of docs/ as they stand, on gloo.

Of what they say, `.cuda()` and torch.cuda.set_device go, "nccl" is gloo, and `...` is one more layer.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import traceback

import torch
import torch.distributed as dist

import apex.parallel

ROOT = pathlib.Path(__file__).parents[3]
PLACES = (
    (".cuda()", ""),
    ('"nccl"', '"gloo"'),
    ("nn.Sequential(...)", "nn.Sequential(nn.Linear(hidden, hidden))"),
)


def blocks(page):
    """The indented parts of a page."""
    found = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE)
    return [re.sub("^ {4}", "", block, flags=re.MULTILINE) for block in found]


def run(page, number, names):
    """An example, in the namespace `names`."""
    text = blocks(page)[number]
    for old, new in PLACES:
        text = text.replace(old, new)
    lines = [
        line for line in text.splitlines() if not re.match(r"torch\.cuda\.set_device|.*python -m ", line)
    ]
    exec(compile("\n".join(lines), f"docs/{page}, example {number}", "exec"), names)  # as a reader would


def _names():
    """What a reader has imported and made before."""
    names = {"torch": torch, "dist": dist}
    exec(
        "import os; from torch import nn; import torch.nn.functional as F\n"
        "torch.manual_seed(0)\n"
        "class Net(nn.Linear):\n    def __init__(self): super().__init__(4, 4, dtype=torch.float32, device='cpu')\n"
        "def loss_fn(y, target): return (y - target).square().mean()\n"
        "def ones(*shape): return torch.ones(shape, dtype=torch.float32, device='cpu')",
        names,
    )
    names["model"] = names["Net"]()
    return names


def _parallel():
    names = _names()
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    text_model = names["model"]
    names["Net"] = lambda: text_model  # the optimizer's
    run("parallel.md", 0, names)
    names = _names()
    model = apex.parallel.DistributedDataParallel(names["model"])
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    names["batches"] = [names["ones"](2, 4)] * 2
    names["model"] = lambda batch: model(batch).square().mean()
    before = model.module.weight.detach().clone()
    run("parallel.md", 1, names)
    assert (model.module.weight != before).any()


def _tensor_parallel():
    names = _names()
    run("tensor_parallel.md", 0, names)
    x = names["ones"](4, 2, 8)
    assert names["MLP"](8)(x).shape == x.shape
    names.update(h=8, model=names["MLP"](8), **vars(names["tensor_parallel"]))
    run("tensor_parallel.md", 1, names)
    part = names["down"](names["up"](x)[0])[0]
    part.sum().backward()
    names["model"] = torch.nn.ModuleList([names["up"], names["down"]])
    run("tensor_parallel.md", 2, names)
    names["parallel_state"].destroy_model_parallel()


def _pipeline():
    names = _names()
    words = torch.zeros(32, 8, dtype=torch.int64, device="cpu")
    names.update(batch=[words, words], sequence=8)
    run("pipeline_parallel.md", 0, names)
    assert len(names["losses"]) == 8 * (dist.get_rank() == dist.get_world_size() - 1)
    names["parallel_state"].destroy_model_parallel()


def _sharded(number, then):
    names = _names()
    x = names["ones"](2, 4)
    names.update(batches=[(x, x)] * 2, x=x, y=x)
    run("distributed_optimizers.md", number, names)
    names["scaler"] = torch.amp.GradScaler("cpu")
    names["loss"] = loss = names["loss_fn"](names["model"](x), x + 1)
    before = [p.detach().clone() for p in names["model"].parameters()]
    assert loss.isfinite()
    names["optimizer"].zero_grad()
    run("distributed_optimizers.md", then, names)
    assert any((old != p).any() for old, p in zip(before, names["model"].parameters(), strict=True))


def _contrib():
    names = _names()
    x = names["ones"](2, 4)
    dist.init_process_group("gloo")
    names["loss"] = names["model"](x).sum()
    names["masters"] = names["model_parameters"] = [p.detach().clone() for p in names["model"].parameters()]
    names["gradients"] = [p + 1 for p in names["masters"]]
    run("distributed_optimizers.md", 4, names)


def _spatial():
    names = _names()
    dist.init_process_group("gloo")
    names["strip"] = names["ones"](1, 256, 4, 4)
    run("spatial.md", 0, names)
    assert names["y"].shape == names["strip"].shape
    halo = names["ones"](1, 4, 1, 4)
    names.update(
        dict.fromkeys(("left_output", "right_output"), halo), left_input=halo + 0, right_input=halo + 0
    )
    run("spatial.md", 1, names)
    names["y"] = names["ones"](1, 4, 6, 4)
    run("spatial.md", 2, names)
    names["pool"].close()


CASES = {
    "parallel.md": _parallel,
    "tensor_parallel.md": _tensor_parallel,
    "pipeline_parallel.md": _pipeline,
    "distributed_optimizers.md, Adam": functools.partial(_sharded, 0, 1),
    "distributed_optimizers.md, LAMB": functools.partial(_sharded, 2, 3),
    "distributed_optimizers.md, contrib": _contrib,
    "spatial.md": _spatial,
}


def run_rank(rank, ranks, folder):
    """Each case's error, if any, goes to a file of this rank."""
    initialize, results = dist.init_process_group, {}
    for number, (name, case) in enumerate(CASES.items()):
        dist.init_process_group = functools.partial(
            initialize, init_method=f"file://{folder}/store{number}", rank=rank, world_size=ranks
        )
        try:
            case()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
    pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
