"""Trains a residual network with amp, on an image folder or on scikit-learn's handwritten digits.

usage: python main_amp.py [DIR] [--arch resnet50] [--opt-level O2] [--sync_bn] [--resume checkpoint.pth.tar] ...
       WORLD_SIZE=2 python -m apex.parallel.multiproc main_amp.py [DIR] ...             # or torchrun
DIR:   holds train/<class>/<image> and val/<class>/<image>; without it, the digits.
needs: torch, apex, rich, matplotlib (with pillow), scikit-learn for the digits; torchvision for its networks

Writes curve.png, checkpoint.pth.tar and model_best.pth.tar to --out.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

import data
import matplotlib
import resnet
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from apex import amp
from apex.optimizers import FusedSGD
from apex.parallel import DistributedDataParallel

matplotlib.use("Agg")
from matplotlib import pyplot


def parse():
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", metavar="DIR", nargs="?", help="image folder; left out: the digits")
    add(
        "-a",
        "--arch",
        help="small, resnet18, ..., or any of torchvision's (default: resnet18, digits: small)",
    )
    add("-j", "--workers", default=None, type=int, help="processes that load data (default: 4, digits: 0)")
    add("--epochs", default=None, type=int, help="default: 90, digits: 15")
    add("--start-epoch", default=0, type=int)
    add("-b", "--batch-size", default=None, type=int, help="per process (default: 256, digits: 64)")
    add("--image-size", default=224, type=int, help="of a folder's images")
    add(
        "--lr",
        "--learning-rate",
        default=None,
        type=float,
        help="for 256 images a step (default: 0.1, digits: 0.4)",
    )
    add("--momentum", default=0.9, type=float)
    add("--weight-decay", "--wd", default=1e-4, type=float)
    add("--resume", default="", metavar="PATH", help="checkpoint to go on from")
    add("-e", "--evaluate", action="store_true", help="validate and stop")
    add("--prof", default=-1, type=int, metavar="N", help="profile N steps, write trace.json and stop")
    add("--deterministic", action="store_true", help="the same weights and curve in every run")
    add("--local_rank", default=int(os.environ.get("LOCAL_RANK", 0)), type=int)
    add("--sync_bn", action="store_true", help="batch norms over all processes")
    add("--opt-level", default="O1" if cuda else "O0", help="O0 to O5 (default: O1, on a CPU O0)")
    add("--keep-batchnorm-fp32", default=None)
    add("--loss-scale", default=None)
    add("--channels-last", action="store_true")
    add("--out", type=Path, default=Path("out"), help="folder of what is written (default: out)")
    arguments = parser.parse_args()
    folder = arguments.data is not None
    defaults = {
        "arch": ("small", "resnet18"),
        "workers": (0, 4),
        "epochs": (15, 90),
        "batch_size": (64, 256),
        "lr": (0.4, 0.1),
    }
    for name, values in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, values[folder])
    return arguments


class Run:
    """A model in training, with everything that a checkpoint holds."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.ranks = int(os.environ.get("WORLD_SIZE", 1))
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", arguments.local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.ranks > 1:
            dist.init_process_group("nccl" if cuda else "gloo")
        self.rank = dist.get_rank() if self.ranks > 1 else 0
        torch.backends.cudnn.benchmark = not arguments.deterministic
        torch.manual_seed(0 if arguments.deterministic else time.time_ns() % 2**31)
        if arguments.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)

        train, test, classes = data.loaders(
            arguments.data, arguments.image_size, arguments.batch_size, arguments.workers, self.ranks > 1
        )
        self.train_loader, self.test_loader = train, test
        model = resnet.make(arguments.arch, classes)
        if arguments.sync_bn:
            from apex.parallel import convert_syncbn_model

            model = convert_syncbn_model(model)
        layout = torch.channels_last if arguments.channels_last else torch.contiguous_format
        model = model.to(self.device, memory_format=layout)
        self.lr = arguments.lr * arguments.batch_size * self.ranks / 256
        optimizer = FusedSGD(
            model.parameters(), self.lr, momentum=arguments.momentum, weight_decay=arguments.weight_decay
        )
        # First amp, then DistributedDataParallel.
        self.model, self.optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=arguments.opt_level,
            keep_batchnorm_fp32=arguments.keep_batchnorm_fp32,
            loss_scale=arguments.loss_scale,
            verbosity=int(self.rank == 0),
        )
        if self.ranks > 1:
            self.model = DistributedDataParallel(self.model)
        self.criterion = nn.CrossEntropyLoss().to(self.device)
        self.history = []  # (epoch, training loss, top-1 accuracy, top-5 accuracy)
        self.best = 0.0
        if arguments.resume:
            self.load(arguments.resume)

    @property
    def bare(self):
        """The model without its wrapper: checkpoints fit any number of processes."""
        return self.model.module if self.ranks > 1 else self.model

    def load(self, path):
        saved = torch.load(path, map_location=self.device)
        self.arguments.start_epoch = saved["epoch"]
        self.history, self.best = saved["history"], saved["best"]
        self.bare.load_state_dict(saved["state_dict"])
        self.optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])

    def save(self, epoch, is_best):
        path = self.arguments.out / "checkpoint.pth.tar"
        state = {
            "epoch": epoch,
            "arch": self.arguments.arch,
            "history": self.history,
            "best": self.best,
            "state_dict": self.bare.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
        torch.save(state, path)
        if is_best:
            shutil.copyfile(path, self.arguments.out / "model_best.pth.tar")

    def adjust_learning_rate(self, epoch, step, steps):
        """A tenth after 1/3, 2/3 and 8/9 of the epochs; rises linearly over the first 1/18, but 5 at most."""
        epochs = self.arguments.epochs
        passed = sum(epoch >= epochs * part for part in (1 / 3, 2 / 3, 8 / 9))
        warmup = min(5.0, epochs / 18) * steps
        rate = self.lr * 0.1**passed * min(1.0, (epoch * steps + step + 1) / max(warmup, 1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def mean(self, value):
        """The mean of a tensor over all processes."""
        if self.ranks > 1:
            dist.all_reduce(value)
        return value / self.ranks

    def train(self, epoch, tick):
        """One epoch; returns its mean loss."""
        if self.ranks > 1:
            self.train_loader.sampler.set_epoch(epoch)
        elif self.arguments.deterministic:
            torch.manual_seed(epoch + 1)  # a run that goes on sees the same batches
        self.model.train()
        steps, total = len(self.train_loader), torch.zeros((), device=self.device)
        for step, (images, labels) in enumerate(data.Prefetcher(self.train_loader, self.device)):
            if self.arguments.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            self.adjust_learning_rate(epoch, step, steps)
            loss = self.criterion(self.model(images), labels)
            self.optimizer.zero_grad()
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
            self.optimizer.step()
            total += loss.detach()
            tick()
            if step + 1 == self.arguments.prof:
                break
        return self.mean(total).item() / steps

    @torch.no_grad()
    def validate(self):
        """Accuracies in percent: (the first guess, among the first five)."""
        self.model.eval()
        found = torch.zeros(3, device=self.device, dtype=torch.float64)
        for images, labels in data.Prefetcher(self.test_loader, self.device):
            scores = self.model(images)
            guesses = scores.topk(min(5, scores.shape[1])).indices == labels[:, None]
            found += torch.stack(
                [guesses[:, 0].sum(), guesses.sum(), torch.tensor(len(labels)).to(self.device)]
            )
        if self.ranks > 1:
            dist.all_reduce(found)
        return (100 * found[0] / found[2]).item(), (100 * found[1] / found[2]).item()

    def draw(self):
        epochs, losses, first, _ = zip(*self.history, strict=True)
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
        left.plot(epochs, losses)
        left.set(xlabel="epoch", ylabel="training loss", yscale="log")
        right.plot(epochs, first)
        right.set(xlabel="epoch", ylabel="top-1 accuracy, %")
        figure.savefig(self.arguments.out / "curve.png")


def profile(run):
    """Some steps under torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as trace:
        run.train(run.arguments.start_epoch, tick=lambda: None)
    if run.rank == 0:
        trace.export_chrome_trace(str(run.arguments.out / "trace.json"))
        print(trace.key_averages().table(sort_by=f"self_{run.device.type}_time_total", row_limit=15))


def fit(run):
    arguments = run.arguments
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=run.rank != 0) as progress:
        steps = len(run.train_loader)
        task = progress.add_task(
            "", total=arguments.epochs * steps, completed=arguments.start_epoch * steps, epoch=0
        )
        for epoch in range(arguments.start_epoch, arguments.epochs):
            progress.update(task, epoch=epoch + 1)
            start = time.monotonic()
            loss = run.train(epoch, tick=lambda: progress.advance(task))
            seconds = time.monotonic() - start
            first, five = run.validate()
            run.history.append((epoch + 1, loss, first, five))
            is_best, run.best = first > run.best, max(first, run.best)
            images = steps * arguments.batch_size * run.ranks
            result = (
                f"loss {loss:.4f}  top-1 {first:.2f} %  top-5 {five:.2f} %  {images / seconds:.0f} images/s"
            )
            if run.rank == 0:
                progress.console.print(f"epoch {epoch + 1}: {result}", highlight=False)
                run.save(epoch + 1, is_best)
                run.draw()


def main():
    run = Run(parse())
    run.arguments.out.mkdir(parents=True, exist_ok=True)
    if run.arguments.prof > 0:
        profile(run)
    elif run.arguments.evaluate:
        first, five = run.validate()
        if run.rank == 0:
            print(f"top-1 {first:.2f} %  top-5 {five:.2f} %")
    else:
        fit(run)
        if run.rank == 0:
            print(f"best top-1 accuracy: {run.best:.2f} %")
    if run.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
