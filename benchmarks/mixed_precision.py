"""A training step under apex.amp, beside torch.autocast and GradScaler with torch's fused optimizers.

usage: python benchmarks/mixed_precision.py [--only gpt2] [--quick] [--json FILE]

ResNet-50, 128 images of 224 x 224 in channels_last, and GPT-2 124M, 8 sequences of 1,024 tokens; made-up data, eager
mode. Each step is the plain script: zero_grad, forward, loss, backward of the scaled loss, step. torch.amp has float32
weights; one pair of rows has apex's layer norms in the same model.

- step: median time between two events of the GPU, one before and one after the step, steps queued back to back.
- host: median time until the calls of a step return, the GPU idle at its start.
- tail: the part of it after the backward pass (leaving scale_loss and optimizer.step(), or scaler.step() and
  scaler.update()), the GPU idle at its start.
- kernels, waits, to host: of one step, from a trace: kernels run, times the host waited for a stream or an event, and
  copies from the device to the host.
- memory: most that was allocated at once.
- loss: after the same number of steps in each row of a case.

--quick takes small models and few steps, on a CPU too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import statistics
import time
import warnings
from dataclasses import dataclass

import torch
from _measure import DEVICE, ON_GPU, synchronize
from _models import GPT2, ResNet50
from _report import Table, device_name
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import apex
from apex import amp, optimizers
from apex.normalization import FusedLayerNorm

# No step overflows from here: torch's fused SGD leaves momentum buffers unwritten where its first step is skipped.
FIRST_SCALE = 2.0**8


@dataclass
class Sizes:
    """Of models and of measurements; `resnet` and `gpt` are arguments of the models."""

    images: tuple[int, ...]
    resnet: dict
    sequences: tuple[int, int]
    gpt: dict
    warmup: int = 6
    steps: int = 20
    host_steps: int = 9
    traced: int = 2


FULL = Sizes((128, 3, 224, 224), {}, (8, 1024), {})
QUICK = Sizes(
    (4, 3, 64, 64), dict(width=4, classes=10), (2, 16), dict(width=16, heads=2, vocabulary=64, context=16),
    warmup=1, steps=3, host_steps=3, traced=1,
)  # fmt: skip


# ---- training --------------------------------------------------------------------------------------------


class TorchAmp:
    """torch.autocast over float32 weights; with float16, a GradScaler."""

    def __init__(self, model, make_optimizer, loss, dtype):
        self.model, self.loss, self.dtype = model, loss, dtype
        self.optimizer = make_optimizer(model.parameters())
        self.scaler = torch.amp.GradScaler(DEVICE, FIRST_SCALE) if dtype == torch.float16 else None

    def backward(self):
        """All of a step up to the end of the backward pass; returns the loss."""
        self.optimizer.zero_grad()
        with torch.autocast(DEVICE, self.dtype):
            loss = self.loss(self.model)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def finish(self):
        """The rest of the step."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


class ApexAmp:
    """apex.amp at one of its levels."""

    def __init__(self, model, make_optimizer, loss, level):
        self.loss = loss
        options = {"dynamic_init_scale": FIRST_SCALE} if level == "O2" else {}
        self.model, self.optimizer = amp.initialize(
            model, make_optimizer(model.parameters()), opt_level=level, verbosity=0, **options
        )
        self.scaling = contextlib.ExitStack()

    def backward(self):
        self.optimizer.zero_grad()
        loss = self.loss(self.model)
        self.scaling.enter_context(amp.scale_loss(loss, self.optimizer)).backward()
        return loss

    def finish(self):
        self.scaling.close()
        self.optimizer.step()


def cases(sizes):
    """(case, {implementation: function that makes a training})."""
    sgd = dict(lr=1e-4, momentum=0.9, weight_decay=1e-4)
    sgds = (
        functools.partial(torch.optim.SGD, fused=True, **sgd),
        functools.partial(optimizers.FusedSGD, **sgd),
    )
    adam = dict(lr=1e-4, weight_decay=0.1)
    adams = (
        functools.partial(torch.optim.AdamW, fused=True, **adam),
        functools.partial(optimizers.FusedAdam, **adam),
    )

    resnet, image_loss = functools.partial(_resnet, sizes), _image_loss(sizes)
    yield "resnet50 SGD", _trainings(resnet, image_loss, *sgds)
    yield "resnet50 AdamW", _trainings(resnet, image_loss, *adams)

    gpt, token_loss = functools.partial(_gpt, sizes), _token_loss(sizes)
    trainings = _trainings(gpt, token_loss, *adams)
    with_norms = _trainings(functools.partial(gpt, norm=FusedLayerNorm), token_loss, *adams)
    trainings.update({f"{name}, apex norms": make for name, make in with_norms.items() if "apex" in name})
    yield "gpt2 AdamW", trainings


def _trainings(make_model, loss, torch_optimizer, apex_optimizer):
    """Those of one case; a model is made, the same each time, when its turn comes."""

    def torch_amp(dtype):
        return lambda: TorchAmp(make_model(), torch_optimizer, loss, dtype)

    def apex_amp(level):
        return lambda: ApexAmp(make_model(), apex_optimizer, loss, level)

    return {
        "torch.amp fp16": torch_amp(torch.float16),
        "apex O2": apex_amp("O2"),
        "torch.amp bf16": torch_amp(torch.bfloat16),
        "apex O5": apex_amp("O5"),
    }


def _resnet(sizes):
    torch.manual_seed(0)
    return ResNet50(**sizes.resnet).to(DEVICE, memory_format=torch.channels_last)


def _image_loss(sizes):
    torch.manual_seed(1)
    images = torch.randn(sizes.images, device=DEVICE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, sizes.resnet.get("classes", 1000), sizes.images[:1], device=DEVICE)
    return lambda model: functional.cross_entropy(model(images), labels)


def _gpt(sizes, **options):
    torch.manual_seed(0)
    return GPT2(**sizes.gpt, **options).to(DEVICE)


def _token_loss(sizes):
    torch.manual_seed(1)
    batch, sequence = sizes.sequences
    tokens = torch.randint(0, sizes.gpt.get("vocabulary", 50257), (batch, sequence + 1), device=DEVICE)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    return lambda model: functional.cross_entropy(model(inputs).flatten(0, 1), targets)


# ---- measuring -------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One training: seconds, counts of a step, bytes; None is what only a GPU has."""

    case: str
    implementation: str
    step: float
    host: float
    tail: float
    kernels: float | None
    waits: float | None
    to_host: float | None
    memory: int | None
    loss: float

    HEADINGS = (
        "case", "implementation", "step ms", "host ms", "tail ms", "kernels", "waits", "to host", "GiB", "loss"
    )  # fmt: skip

    def cells(self):
        return (
            self.case,
            self.implementation,
            *(f"{1e3 * seconds:.3f}" for seconds in (self.step, self.host, self.tail)),
            *("-" if n is None else f"{n:g}" for n in (self.kernels, self.waits, self.to_host)),
            "-" if self.memory is None else f"{self.memory / 2**30:.2f}",
            f"{self.loss:.4f}",
        )


def measure(case, implementation, training, sizes):
    """The row of one training."""
    for _ in range(sizes.warmup):
        step(training)
    synchronize()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    seconds = step_seconds(training, sizes.steps)
    host = statistics.median(host_seconds(training, split=False) for _ in range(sizes.host_steps))
    tail = statistics.median(host_seconds(training, split=True) for _ in range(sizes.host_steps))
    memory = torch.cuda.max_memory_allocated() if ON_GPU else None
    counts = trace_counts(training, sizes.traced) if ON_GPU else (None, None, None)
    return Row(case, implementation, seconds, host, tail, *counts, memory, step(training).item())


def step(training):
    loss = training.backward()
    training.finish()
    return loss


def step_seconds(training, steps):
    """Median time of a step on the device, with no wait between steps; on a CPU, of the clock."""
    if not ON_GPU:
        return statistics.median(host_seconds(training, split=False) for _ in range(steps))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step(training)
        event.record()
    synchronize()
    return 1e-3 * statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))


def host_seconds(training, split):
    """Time until the calls of a step return; with split, of what comes after the backward pass."""
    synchronize()
    start = time.perf_counter()
    training.backward()
    if split:
        synchronize()
        start = time.perf_counter()
    training.finish()
    return time.perf_counter() - start


def trace_counts(training, steps):
    """(kernels, waits, copies to the host) of a step."""
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            step(training)
    kernels = waits = to_host = 0
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            to_host += "Memcpy DtoH" in event.name
            kernels += not (
                event.is_user_annotation or event.name.startswith(("Memcpy", "Memset", "Optimizer."))
            )
        else:
            waits += event.name in ("cudaStreamSynchronize", "cudaEventSynchronize")
    return kernels / steps, waits / steps, to_host / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models and few steps, on a CPU too")
    parser.add_argument("--only", default="", help="rows of which case and implementation contain this")
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    if not (ON_GPU or arguments.quick):
        parser.error("this measures a GPU, and torch.cuda.is_available() is False; --quick runs on a CPU")
    sizes = QUICK if arguments.quick else FULL
    torch.backends.cudnn.benchmark = True
    warnings.filterwarnings("ignore", "amp.initialize is called again")  # one training ends before the next
    facts = dict(card=device_name(), torch=torch.__version__, apex=apex.__version__, quick=arguments.quick)
    title = f"{device_name()}, torch {torch.__version__}, apex {apex.__version__}"
    table = Table(title, Row.HEADINGS, (15, 28), arguments.json, facts)
    for case, trainings in cases(sizes):
        for implementation, make in trainings.items():
            if arguments.only in f"{case} {implementation}":
                row = measure(case, implementation, make(), sizes)
                table.add(row, row.cells())
                gc.collect()  # models and optimizers that went through amp hold each other
                if ON_GPU:
                    torch.cuda.empty_cache()
    print("served by", sorted(set(apex.served().items())))


if __name__ == "__main__":
    main()
