"""Tries a wheel on a GPU machine as a user would, and writes one receipt.

usage: python ci/gpu_check.py WHEEL [--out FOLDER] [--tests EXPRESSION] [--benchmarks NAME ...]

Installs the wheel into a temporary folder (pip --target, no dependencies: torch is used as it is), then
  1. asks `python -m apex` what serves every op: packs must;
and all at once
  2. runs the GPU tests of tests/L0 against the installed wheel, several at once where pytest-xdist is;
  3. computes one set of results by the packs, by JIT with the packs removed, and by PTX, and compares bits;
  4. with neither packs nor JIT, runs on the reference and sees that this is said;
then
  5. runs the benchmarks, one step each.
Exit code 0 only if all of it held. FOLDER receives receipt.json, which `python -m build_matrix receipts merge` takes
on any machine, L0.xml (JUnit), L0.txt, steps.json (what every step said) and the figures. EXPRESSION narrows the tests
as pytest's -k does, and such a receipt counts for nothing; NAMEs are files of benchmarks/, by default every one that
measures a single GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from build_matrix.check import receipts  # noqa: E402
from build_matrix.errors import ReceiptError  # noqa: E402
from build_matrix.spec import identity  # noqa: E402
from build_matrix.store import files  # noqa: E402
from build_matrix.wheels.wheel_file import WheelFile  # noqa: E402

BENCHMARKS = ["optimizers", "norms", "softmax", "rotary", "bias_swiglu", "xentropy"]
PROBE = Path(__file__).with_name("gpu_check_results.py")


class Check:
    marker = "gpu"  # which tests
    limit = None  # seconds that a command may take

    def __init__(self, wheel: Path, place: Path, out: Path, expression: str | None):
        self.wheel, self.place, self.out, self.expression = wheel, place, out, expression
        self.site, self.junits = place / "site", [out / "L0.xml"]
        self.steps, self.machine = {}, {}
        self.writing = threading.Lock()

    def run(self, *command, site=None, extra=(), said=None, limit=None, **variables):
        """A command in the temporary folder, where no checkout is importable; returns (exit code, output).

        said: a file for the output as it comes. limit: seconds; None: those of all commands. The code of a command that
        is ended then is a sentence.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith("APEX_")}
        paths = [str(site or self.site), *map(str, extra)]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "APEX_CACHE_DIR": str(self.place / "cache")}
        environment["NCCL_NVLS_ENABLE"] = "0"  # no multicast over NVLink
        limit = limit or self.limit
        with open(said, "w+b") if said else tempfile.TemporaryFile(dir=self.place) as file:
            with subprocess.Popen(
                [sys.executable, *map(str, command)], cwd=self.place, env=environment | variables, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            ) as process:  # fmt: skip
                try:
                    code = process.wait(limit)
                except subprocess.TimeoutExpired:  # what it said until then tells where it was
                    code = f"ended after {limit:.0f} s"
                    _end(process)
                except BaseException:
                    _end(process)
                    raise
            file.seek(0)
            return code, file.read().decode(errors="replace") + (code if isinstance(code, str) else "")

    def step(self, name, function):
        start = time.monotonic()
        try:
            ok, text = function()
        except Exception as error:  # a step that breaks is a failed step, and the others still run
            ok, text = False, f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start
        with self.writing:
            self.steps[name] = {"passed": ok, "seconds": round(seconds, 1), "says": text[-2000:]}
            print(f"{'ok  ' if ok else 'FAIL'} {name} ({seconds:.0f} s)\n{text.rstrip()}\n", flush=True)
            self.write_down()

    def beside(self, steps):
        """Steps of {name: function} that do not disturb each other, all at once."""
        self.without_packs()  # several of them use it
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.step, steps, steps.values()))

    def write_down(self):
        """What every step said so far, so that it stays when this program is ended early."""
        text = json.dumps({"wheel": self.wheel.name, "steps": self.steps, "probe": self.machine}, indent=1)
        (self.out / "steps.json").write_text(text)

    # ---- the steps -------------------------------------------------------------------------------------

    def install(self):
        options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--target", self.site]
        code, text = self.run("-m", "pip", "install", *options, self.wheel)
        return code == 0, text or f"installed {self.wheel.name}"

    def probe(self):
        with ThreadPoolExecutor() as pool:
            (code, text), (_, report) = pool.map(
                lambda more: self.run("-m", "apex", *more), ((), ("--json",))
            )
        self.machine = json.loads(report)
        return code == 0, text

    def tests(self):
        return self.pytest(self.junits[0], self.marker, *self.which(self.copy()))

    def copy(self):
        """The tests' folder, where no checkout is importable."""
        copy = self.place / "tests"
        if not copy.exists():
            shutil.copytree(ROOT / "tests", copy)
            shutil.copyfile(ROOT / "pyproject.toml", self.place / "pyproject.toml")  # the tests' markers
        return copy

    def pytest(self, junit, marker, *arguments):
        """Runs what is marked so; the output comes into a file beside `junit`."""
        options = ["-v", "--durations=30", "-p", "no:cacheprovider", "-m", marker, f"--junitxml={junit}"]
        options += ["-k", self.expression] if self.expression else []
        said = junit.with_suffix(".txt")
        # Each of many processes has one core.
        alone = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        code, text = self.run("-m", "pytest", *options, *arguments, extra=[self.copy()], said=said, **alone)
        return code == 0, "\n".join(text.splitlines()[-12:])

    def which(self, tests):
        """Arguments of pytest: what of the folder `tests` is collected, and how many run at once."""
        processes = str(max(4, os.cpu_count() or 1))
        beside = ["-n", processes, "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
        return [tests / "L0", "--ignore", tests / "L0/loader", "--ignore", tests / "L0/host", *beside]

    def same_bits(self):
        """Packs, JIT without packs, and PTX compute the same bits."""
        bare = self.without_packs()
        ways = {"packs": {}, "jit": {"site": bare}, "ptx": {"APEX_VARIANT": "compute_80"}}
        with ThreadPoolExecutor() as pool:
            found = pool.map(lambda name: self.run(PROBE, self.place / f"{name}.pt", **ways[name]), ways)
            runs = dict(zip(ways, found, strict=True))
        for name, (code, text) in runs.items():
            if code:
                return False, f"{name}: {text}"
        code, text = self.run(PROBE, "--compare", *(self.place / f"{name}.pt" for name in runs))
        return code == 0, "".join(f"{n}: {t.strip()}\n" for n, (_, t) in runs.items()) + text

    def reference(self):
        bare = self.without_packs()
        code, text = self.run(PROBE, self.place / "reference.pt", site=bare, APEX_JIT="0")
        probe_code, probe = self.run("-m", "apex", site=bare, APEX_JIT="0")
        said = "reference" in probe and probe_code == 1
        return code == 0 and said and "reference" in text, text + probe

    def benchmark(self, name):
        code, text = self.run(ROOT / "benchmarks" / f"{name}.py", "--json", self.out / f"{name}.json")
        return code == 0, text

    def receipt(self):
        """What receipts.py says a receipt is, and how every step went."""
        cards = [device for device in self.machine["machine"]["devices"] if device["platform"] != "cpu"]
        if not cards:
            raise ReceiptError(self.wheel.name, "no GPU is here: there is nothing to write down")
        cell = cards[0]["arch"]
        manifest = WheelFile(self.wheel).packs.get(cell)
        found = receipts.make(
            receipts.L0, cell, self.machine, self.junits, identity.wheel(self.wheel), self.wheel,
            identity.pack(manifest) if manifest else None, self.narrowed,
        )  # fmt: skip
        steps = {name: {k: step[k] for k in ("passed", "seconds")} for name, step in self.steps.items()}
        return receipts.sealed(found | {"steps": steps})

    @property
    def narrowed(self):
        """Which part of a GPU's tests ran, in words; nothing: all."""
        return self.expression or ""

    def conclude(self):
        """Writes what every step said, and the receipt. Returns the exit code."""
        failed = [name for name, step in self.steps.items() if not step["passed"]]
        self.write_down()
        try:
            receipts.write(self.receipt(), self.out / "receipt.json")
        except Exception as error:  # a step that failed left nothing to make it of
            failed.append("receipt")
            print(f"no receipt: {type(error).__name__}: {error}")
        print("failed: " + ", ".join(failed) if failed else "everything held")
        return bool(failed)

    def without_packs(self):
        bare = self.place / "bare"
        if not bare.exists():
            shutil.copytree(self.site, bare)
            shutil.rmtree(bare / "apex" / "packs")
        return bare


def _end(process, patience=15):
    """Ends a process that leads its session, with all of it. torchrun, asked first, ends its ranks, which have sessions
    of their own."""
    for signal_of, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_of)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gpu_check"))
    parser.add_argument("--tests", metavar="EXPRESSION")
    parser.add_argument("--benchmarks", nargs="*", default=BENCHMARKS, choices=BENCHMARKS, metavar="NAME")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with files.temporary("gpu-check") as place:
        check = Check(arguments.wheel.resolve(), place, out, arguments.tests)
        check.step("install", check.install)
        check.step("probe", check.probe)
        check.beside({
            "packs, JIT and PTX agree": check.same_bits,
            "reference where nothing else is left": check.reference,
            "tests": check.tests,
        })  # fmt: skip
        for name in arguments.benchmarks:
            check.step(f"benchmark {name}", lambda name=name: check.benchmark(name))
        return check.conclude()


if __name__ == "__main__":
    sys.exit(main())
