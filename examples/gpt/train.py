"""Trains a small GPT on the text of Python's reference manual, letter by letter, split over ranks as flags say.

usage: torchrun --nproc-per-node 4 train.py --tensor 2 --pipeline 2 [--virtual-pipeline 2] [--sequence-parallel]
needs: torch, apex, matplotlib, rich

Copies of the model on all ranks train on different samples: the data parallel size is ranks / (tensor x pipeline). On
GPUs NCCL connects them, on CPUs gloo. Writes loss.png and checkpoints, which any other split can go on from, to --out.
"""

import argparse
import os
import pydoc_data.topics
import time
from pathlib import Path

import checkpoints
import matplotlib
import torch
import torch.distributed as dist
from model import GPT, sum_shared_gradients
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from apex.optimizers import FusedAdam
from apex.transformer import parallel_state
from apex.transformer.amp import GradScaler
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func
from apex.transformer.pipeline_parallel.schedules.common import _get_params_for_weight_decay_optimization
from apex.transformer.pipeline_parallel.utils import setup_microbatch_calculator, unwrap_model

matplotlib.use("Agg")
from matplotlib import pyplot

WORDS = 128  # ASCII
PIECE = 4096  # letters; every tenth piece of the text is held out
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse(ranks):
    """The flags. Where they do not fit, every rank says why and ends."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tensor", type=int, default=1, help="ranks that share each layer")
    add("--pipeline", type=int, default=1, help="stages that share the layers")
    # torchrun takes --virtual for an option of its own.
    add("--virtual-pipeline", type=int, default=1, help="parts of the model on each stage, which take turns")
    add(
        "--sequence-parallel", action="store_true", help="split what is between the layers along the sequence"
    )
    add(
        "--recompute",
        action="store_true",
        help="run each layer again in the backward pass, in place of keeping what it needs",
    )
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--context", type=int, default=64, help="letters of a sample")
    add("--batch", type=int, default=32, help="samples of a step, over all ranks")
    add("--micro-batch", type=int, default=4, help="samples that go through the pipeline at a time")
    add("--steps", type=int, default=200)
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32", help="of products, by autocast")
    add("--text", type=Path, help="a text file (default: the topics of pydoc, which Python ships)")
    add("--out", type=Path, default=Path("out"), help="folder of what is written (default: out)")
    add(
        "--save-every",
        type=int,
        default=0,
        metavar="N",
        help="a checkpoint every N steps, beside the one at the end",
    )
    add(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="a checkpoint of any split to go on from: out/step-000200",
    )
    arguments = parser.parse_args()
    problems = misfits(arguments, ranks)
    if problems:
        parser.error("; ".join(problems))
    return arguments


def misfits(a, ranks):
    """What does not fit, in words."""
    names = (
        "tensor",
        "pipeline",
        "virtual_pipeline",
        "layers",
        "hidden",
        "heads",
        "context",
        "batch",
        "micro_batch",
        "steps",
    )
    found = [f"--{name.replace('_', '-')} must be positive" for name in names if getattr(a, name) < 1]
    if a.save_every < 0:
        found.append("--save-every must not be negative")
    if not 0 <= a.lr < float("inf"):
        found.append(f"--lr must be a number from 0 on, not {a.lr}")
    if abs(a.seed) > 2**31:
        found.append("--seed must be between -2**31 and 2**31")
    if found:
        return found
    data = max(1, ranks // (a.tensor * a.pipeline))
    divisions = [
        (ranks, a.tensor * a.pipeline, "the number of ranks", "--tensor x --pipeline"),
        (a.layers, a.pipeline * a.virtual_pipeline, "--layers", "--pipeline x --virtual-pipeline"),
        (a.hidden, a.heads, "--hidden", "--heads"),
        (a.heads, a.tensor, "--heads", "--tensor"),
        (WORDS, a.tensor, "the vocabulary", "--tensor"),
        (a.batch, a.micro_batch * data, "--batch", "--micro-batch x data parallel ranks"),
    ]
    if a.sequence_parallel:
        divisions.append((a.context, a.tensor, "--context", "--tensor, with --sequence-parallel,"))
    found = [
        f"{name}, {size}, is not divisible by {by}, {part}"
        for size, part, name, by in divisions
        if size % part
    ]
    if a.virtual_pipeline > 1 and a.pipeline == 1:
        found.append("--virtual-pipeline needs --pipeline")
    elif a.virtual_pipeline > 1 and a.batch // (a.micro_batch * data) % a.pipeline:
        found.append("with --virtual-pipeline, --pipeline must divide the number of microbatches")
    if a.text is not None and not a.text.is_file():
        found.append(f"--text {a.text}: there is no such file")
    return found


def text_of(path, context, device):
    """(letters to train on, held-out ones), int64 [letters]; what is no ASCII is a question mark."""
    try:
        text = "\n\n".join(pydoc_data.topics.topics.values()) if path is None else path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise SystemExit(f"--text {path}: it cannot be read as UTF-8: {error}") from None
    letters = torch.tensor(list(text.encode("ascii", "replace")), dtype=torch.int64, device=device)
    pieces = letters.split(PIECE)
    held_out = torch.cat(pieces[::10])
    training = torch.cat([letters[:0], *(piece for number, piece in enumerate(pieces) if number % 10)])
    if min(len(training), len(held_out)) < context + 2:
        raise SystemExit(
            f"--text: of {len(letters)} letters {len(training)} are for training and {len(held_out)} held out, and "
            f"--context {context} needs {context + 2} of each"
        )
    return training, held_out


def batch_of(letters, arguments, number):
    """This rank's samples of a step, [samples, context + 1]. All ranks together have the same ones at any split."""
    generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + number)
    starts = torch.randint(len(letters) - arguments.context - 1, (arguments.batch,), generator=generator)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = starts.chunk(ranks)[rank].to(letters.device)
    return letters[mine[:, None] + torch.arange(arguments.context + 1, device=letters.device)]


def forward_step(batch, model):
    """What a schedule asks for: the output of a stage, and a function that makes the loss of the last one's."""
    (letters,) = batch

    def loss_of(losses):
        loss = losses.mean()
        return loss, loss.detach()

    return model(letters[:, :-1], letters[:, 1:]), loss_of


def mean_loss(losses, device):
    """Of all microbatches and ranks, on every rank; `losses` is empty on all stages but the last one."""
    total = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
    dist.all_reduce(total)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return float(total) * stages / dist.get_world_size()


class Trainer:
    """A model over all ranks, its optimizer, and the schedule of its split."""

    def __init__(self, arguments, device):
        a, self.arguments, self.device = arguments, arguments, device
        virtual = a.virtual_pipeline if a.virtual_pipeline > 1 else None
        parallel_state.initialize_model_parallel(a.tensor, a.pipeline, virtual)
        self.data = parallel_state.get_data_parallel_world_size()
        setup_microbatch_calculator(dist.get_rank(), None, a.batch, a.micro_batch, self.data)
        self.sizes = dict(words=WORDS, hidden=a.hidden, heads=a.heads, layers=a.layers, context=a.context)
        options = dict(seed=a.seed, sequence_parallel=a.sequence_parallel, recompute=a.recompute)
        self.models = build_model(GPT, self.data > 1, virtual, **self.sizes, **options)
        self.parts = [unwrap_model(model) for model in self.models]
        groups = _get_params_for_weight_decay_optimization(self.parts)
        self.optimizer = FusedAdam(groups, lr=a.lr, weight_decay=0.01)
        self.scaler = GradScaler(enabled=a.dtype == "float16")
        self.run = get_forward_backward_func(virtual, a.pipeline)

    def pass_of(self, letters, forward_only):
        """The mean loss of a batch; the gradients of it, too, unless forward_only."""
        a, dtype = self.arguments, DTYPES[self.arguments.dtype]
        losses = self.run(
            forward_step,
            [letters],
            self.models,
            forward_only=forward_only,
            tensor_shape=(a.context, a.micro_batch, a.hidden),
            dtype=dtype,
            grad_scaler=self.scaler if self.scaler.is_enabled() else None,
            sequence_parallel_enabled=a.sequence_parallel,
        )
        return mean_loss(losses, self.device)

    def step(self, letters):
        self.optimizer.zero_grad()
        loss = self.pass_of(letters, forward_only=False)
        sum_shared_gradients(self.parts)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def save(self, losses):
        folder = self.arguments.out / f"step-{len(losses):06d}"
        checkpoints.save(folder, self.parts, self.optimizer, self.scaler, self.sizes, losses)
        return folder


def draw(losses, speed, path):
    pyplot.figure(layout="constrained")
    pyplot.plot(range(1, len(losses) + 1), losses)
    pyplot.xlabel("step")
    pyplot.ylabel("training loss [nats a letter]")
    pyplot.title(f"{speed:,.0f} tokens per second")
    pyplot.savefig(path)


def progress_bar():
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}, {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, disable=dist.get_rank() != 0)


def train(trainer, letters):
    """(losses of all steps, tokens per second of this run's)."""
    a, losses = trainer.arguments, []
    if a.resume is not None:
        losses = checkpoints.losses_of(a.resume, trainer.sizes)
        if len(losses) >= a.steps:
            raise SystemExit(
                f"--resume {a.resume}: it is of step {len(losses)}, and --steps {a.steps} is no more"
            )
        checkpoints.load(a.resume, trainer.parts, trainer.optimizer, trainer.scaler)
    speed, first = 0.0, len(losses)
    with progress_bar() as progress:
        task = progress.add_task("steps", total=a.steps, completed=first, loss=float("nan"), speed=0.0)
        begin = time.perf_counter()
        for number in range(first, a.steps):
            losses.append(trainer.step(batch_of(letters, a, number)))
            if number == first and a.steps > first + 1:
                begin, first = time.perf_counter(), first + 1  # the first step also warms up
            else:
                speed = (number + 1 - first) * a.batch * a.context / (time.perf_counter() - begin)
            progress.update(task, advance=1, loss=losses[-1], speed=speed)
            if a.save_every and (number + 1) % a.save_every == 0 and number + 1 < a.steps:
                trainer.save(losses)
    return losses, speed


def main():
    arguments = parse(int(os.environ.get("WORLD_SIZE", 1)))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:  # python train.py: one process
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)  # now, and not when all is trained
    except OSError as error:
        raise SystemExit(f"--out {arguments.out}: {error}") from None
    dist.init_process_group("nccl" if cuda else "gloo")
    letters, held_out = text_of(arguments.text, arguments.context, device)
    trainer = Trainer(arguments, device)
    losses, speed = train(trainer, letters)
    with torch.no_grad():
        held_out_loss = trainer.pass_of(batch_of(held_out, arguments, 0), forward_only=True)
    folder = trainer.save(losses)
    if dist.get_rank() == 0:
        draw(losses, speed, arguments.out / "loss.png")
        split = (
            f"tensor {arguments.tensor}, pipeline {arguments.pipeline}, virtual {arguments.virtual_pipeline}"
        )
        print(f"{dist.get_world_size()} rank(s) on {device.type}: {split}, data {trainer.data}")
        print(
            f"final loss {losses[-1]:.4f}, held-out loss {held_out_loss:.4f}, {speed:,.0f} tokens per second"
        )
        print(f"go on by --resume {folder} --steps {2 * len(losses)}")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
