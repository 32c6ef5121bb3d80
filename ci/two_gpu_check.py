"""Tries a wheel on a machine with two GPUs: every test that is marked two_gpus, in five minutes at most.

usage: python ci/two_gpu_check.py WHEEL [--out FOLDER] [--tests EXPRESSION]

Installs the wheel as gpu_check.py does, asks `python -m apex` what serves every op, and runs the tests, one after the
other: they measure what runs beside what. Exit code 0 only if all of it held; FOLDER receives what gpu_check.py
writes. The receipt says that it is of these tests alone. NCCL runs without NVLink multicast.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpu_check import Check, files


class TwoGpuCheck(Check):
    marker = "two_gpus"
    limit = 280  # seconds

    def cards(self):
        """Two at least; without them every test would be skipped, which is no answer."""
        found = [d["name"] for d in self.machine["machine"]["devices"] if d["platform"] != "cpu"]
        return len(found) > 1, ", ".join(found) or "no GPU"

    def which(self, tests):
        """The files that bear the marker, without pytest-xdist."""
        files = sorted((tests / "L0").rglob("test_*.py"))
        return [path for path in files if self.marker in path.read_text(encoding="utf-8")]

    @property
    def narrowed(self):
        return " and ".join(filter(None, [self.marker, self.expression]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path("two_gpu_check"))
    parser.add_argument("--tests", metavar="EXPRESSION")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with files.temporary("gpu-check") as place:
        check = TwoGpuCheck(arguments.wheel.resolve(), place, out, arguments.tests)
        for name, step in (
            ("install", check.install),
            ("probe", check.probe),
            ("two GPUs", check.cards),
            ("tests", check.tests),
        ):
            check.step(name, step)
            if name == "two GPUs" and not check.steps[name]["passed"]:
                break
        return check.conclude()


if __name__ == "__main__":
    sys.exit(main())
