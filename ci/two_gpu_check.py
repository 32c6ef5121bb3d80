"""Tries a wheel on a machine with two GPUs: every test that is marked two_gpus, and the benchmarks of several GPUs.

usage: python ci/two_gpu_check.py WHEEL [--out FOLDER] [--tests EXPRESSION] [--only STEP ...] [--seconds 300]
           [--public FOLDER]

Installs the wheel as gpu_check.py does, asks `python -m apex` what serves every op, and then, each a step:
  1. the benchmarks: halo exchange, pipeline bubble (2 stages of one and of two parts), tensor parallel GPT, a wide one
     with a trace of its backward passes, sharded optimizers on GPT-2 355M, SyncBatchNorm. Each says what it is to
     reach;
  2. the tests, as many files at once as --processes says, but for those marked `alone`;
  3. those, one after the other.
All of it ends in --seconds: a step that is not done by then is ended, one that has not begun fails and says so. Exit
code 0 only if every step held; benchmarks hold when they run to their end. FOLDER receives what gpu_check.py writes,
each benchmark's output and figures, and traces; steps.json is whole after each step. --only: the steps whose name
contains one of these words. --public: for benchmarks/distributed_optimizers.py. The receipt says that it is of these
tests alone. NCCL runs without NVLink multicast.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from pathlib import Path

from gpu_check import ROOT, Check, files

RANKS = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
OF_A_BENCHMARK = 90  # seconds, at most
# Name of the step, whether it is started on each GPU, file and arguments; {out} is where results belong.
BENCHMARKS = (
    ("halo exchange", True, "halo_exchange", ""),
    (
        *("pipeline bubble", False, "pipeline_bubble"),
        "--device cuda --chunks 1 2 --steps 2 --json {out}/pipeline_bubble.json",
    ),
    ("tensor parallel GPT", True, "tensor_parallel", "--rounds 3 --json {out}/tensor_parallel.json"),
    (
        *("overlap in a wide GPT", True, "tensor_parallel"),
        "--layers 2 --width 4096 --heads 32 --rounds 3 --trace {out}/wide_trace.json"
        " --json {out}/wide_tensor_parallel.json",
    ),
    (
        *("sharded optimizers", True, "distributed_optimizers"),
        "--only GPT-2 --kernels --repeats 6 --json {out}/distributed_optimizers.json",
    ),
    ("SyncBatchNorm", False, "syncbn", "--layers --without-compile --json {out}/syncbn.json"),
)


class TwoGpuCheck(Check):
    marker = "two_gpus"
    processes = 10  # files of tests that run at once
    public = None  # folder of public apex's class

    def __init__(self, *given, seconds=300.0):
        super().__init__(*given)
        self.end = time.monotonic() + seconds
        self.junits.append(self.out / "L0-alone.xml")

    @property
    def limit(self):
        """Seconds that are left."""
        return max(self.end - time.monotonic(), 0.0)

    def step(self, name, function):
        super().step(name, function if self.limit else lambda: (False, "not run: the time is over"))

    def cards(self):
        """Two at least; without them every test would be skipped, which is no answer."""
        found = [d["name"] for d in self.machine["machine"]["devices"] if d["platform"] != "cpu"]
        return len(found) > 1, ", ".join(found) or "no GPU"

    def benchmark(self, name, on_each, file, arguments):
        """Runs one of BENCHMARKS; returns whether it came to its end, and what it printed."""
        said = self.out / (re.sub(r"\W+", "_", name) + ".txt")
        arguments = [a.format(out=self.out) for a in arguments.split()]
        if self.public and file == "distributed_optimizers":
            arguments += ["--public", self.public]
        launcher = RANKS if on_each else ()
        limit = min(self.limit, OF_A_BENCHMARK)
        script = ROOT / "benchmarks" / f"{file}.py"
        code, text = self.run(*launcher, script, *arguments, said=said, limit=limit)
        return code == 0, text

    def tests(self):
        beside = ["-n", self.processes, "--dist", "loadfile"] if importlib.util.find_spec("xdist") else []
        which = self.which(self.copy())
        return self.pytest(self.junits[0], f"{self.marker} and not alone", *which, *beside)

    def alone(self):
        return self.pytest(self.junits[1], f"{self.marker} and alone", *self.which(self.copy()))

    def which(self, tests):
        """The files that bear the marker."""
        files = sorted((tests / "L0").rglob("test_*.py"))
        return [path for path in files if self.marker in path.read_text(encoding="utf-8")]

    @property
    def narrowed(self):
        return " and ".join(filter(None, [self.marker, self.expression]))


def steps(check, words):
    """{name: function} of the benchmarks and tests whose name contains one of these words; none: all."""
    found = {name: lambda given=(name, *rest): check.benchmark(*given) for name, *rest in BENCHMARKS}
    found |= {"tests": check.tests, "tests, one after the other": check.alone}
    return {name: step for name, step in found.items() if not words or any(word in name for word in words)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path("two_gpu_check"))
    parser.add_argument("--tests", metavar="EXPRESSION")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--processes", type=int, default=TwoGpuCheck.processes)
    parser.add_argument("--public", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with files.temporary("gpu-check") as place:
        given = arguments.wheel.resolve(), place, out, arguments.tests
        check = TwoGpuCheck(*given, seconds=arguments.seconds)
        check.processes = arguments.processes
        check.public = arguments.public and arguments.public.resolve()
        for name, step in (("install", check.install), ("probe", check.probe), ("two GPUs", check.cards)):
            check.step(name, step)
        if check.steps["two GPUs"]["passed"]:
            for name, step in steps(check, arguments.only).items():
                check.step(name, step)
        return check.conclude()


if __name__ == "__main__":
    sys.exit(main())
