"""Tries a wheel for aarch64 in an emulated process: its doctor, and tests of its CPU variants in NEON and in SVE.

usage: python ci/aarch64_check.py WHEEL [--root FOLDER] [--torch 2.8.0] [--tests EXPRESSION] [FILE ...]

On Debian or Ubuntu with qemu-user, of which apt-get brings Debian's Python for arm64 into FOLDER, and pip torch for
aarch64; both stay there for the next run. No root is needed, nothing of the machine is changed. FILEs are of tests/L0;
the default is one of each kind of op, about ten minutes of a free core. Exit code 0 only if all of it held, 3 where
there is no qemu; with 0 the binding of this torch and Python is written down as loaded under qemu
(build_matrix/parts/loads.py), which is less than a run on such a processor.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
from build_matrix.errors import BuildError, ToolchainMissing  # noqa: E402
from build_matrix.parts import bindings, loads  # noqa: E402
from build_matrix.spec import identity, matrix  # noqa: E402
from build_matrix.wheels.wheel_file import WheelFile  # noqa: E402

PLATFORM = "linux_aarch64"
PYTHON = "cp311"  # Debian's
DEBIAN = (
    "python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 zlib1g "
    "libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libuuid1 libgomp1 libcrypt1"
)
BESIDE = (
    "typing_extensions sympy mpmath networkx jinja2 markupsafe filelock fsspec numpy pytest pluggy iniconfig "
    "packaging pygments"
)
FILES = (
    "test_multi_tensor_adam test_multi_tensor_l2norm test_layer_norm test_rms_norm test_scaled_masked_softmax "
    "test_rope test_xentropy test_bias_activation test_group_norm test_reduce_bn test_focal_loss test_fp8_quantize "
    "test_index_mul_2d"
)
PROCESSORS = {"cortex-a72": "cpu-v1", "max": "cpu-v2"}  # NEON alone; SVE


def check(path: Path, torch: str) -> None:
    """Raises BuildError for a wheel that has no binding of that torch and of Debian's Python for this platform, or is
    of other sources: what ran then would not be what is written down."""
    wheel, minor = WheelFile(path), matrix.minor(torch)
    bindings_of = {(row["torch"], row["python"]) for row in wheel.json("apex/lib/bindings.json")}
    again = f"nox -s build-cpu -- --platform {PLATFORM} --python 3.11 --torch {torch}"
    if wheel.platform != PLATFORM or (minor, PYTHON) not in bindings_of:
        raise BuildError(
            f"{path.name} has no binding of torch {minor} and Python 3.11 for {PLATFORM}. Run: {again}"
        )
    if wheel.facts["source_sha256"] != identity.compiled():
        raise BuildError(f"{path.name} was made of other sources than this checkout's. Run: {again}")


class Emulated:
    """A Python for arm64, and what is installed for it."""

    def __init__(self, root: Path, torch: str):
        self.root, self.site, self.torch = root, root / f"site-{torch}", torch
        self.qemu = shutil.which("qemu-aarch64")
        if not self.qemu:
            raise ToolchainMissing("qemu-aarch64", "apt-get install qemu-user")

    def prepare(self) -> None:
        """Brings Python and torch, each whole or not at all."""
        if not (self.root / "debian").is_dir():
            self._bring_python(self.root / "debian")
        if not self.site.is_dir():
            tags = [f"--platform=manylinux{n}_aarch64" for n in ("_2_28", "_2_17", "2014")]
            self._pip(self.site, *tags, f"torch=={self.torch}", *BESIDE.split())

    def _bring_python(self, place: Path) -> None:
        lists, partial = self.root / "lists", self.root / ".partial-debian"
        shutil.rmtree(partial, ignore_errors=True)
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        partial.mkdir(parents=True)
        of = [f"-oAPT::Architecture{s}=arm64" for s in ("", "s")] + [f"-oDir::State::Lists={lists.resolve()}"]
        subprocess.run(["apt-get", *of, "--quiet", "update"], check=True)
        subprocess.run(["apt-get", *of, "--quiet", "download", *DEBIAN.split()], check=True, cwd=partial)
        for package in partial.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, partial], check=True)
            package.unlink()
        partial.rename(place)

    def _pip(self, place: Path, *what: str) -> None:
        partial = place.with_name(f".partial-{place.name}")
        shutil.rmtree(partial, ignore_errors=True)
        of = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.11", "--implementation=cp"]
        subprocess.run([sys.executable, "-m", "pip", "install", *of, "--target", partial, *what], check=True)
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)

    def install(self, wheel: Path) -> None:
        tags = WheelFile(wheel).tag.rpartition("-")[2].split(".")
        self._pip(self.root / "wheel", *(f"--platform={tag}" for tag in tags), str(wheel))

    def run(self, processor: str, *command: str | Path) -> None:
        """Python with these arguments. Raises BuildError where it ends otherwise than with 0."""
        debian = self.root / "debian"
        paths = os.pathsep.join(map(str, (self.root / "wheel", self.site)))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("APEX_")}
        environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        python = [self.qemu, "-cpu", processor, "-L", debian, debian / "usr/bin/python3.11"]
        # Where no checkout is importable: the wheel is what is tried.
        done = subprocess.run([*python, *command], env=environment, cwd=self.root)
        if done.returncode:
            raise BuildError(f"{' '.join(map(str, command))} on {processor} ended with {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("files", nargs="*", default=FILES.split(), metavar="FILE")
    parser.add_argument("--root", type=Path, default=REPOSITORY / "build/aarch64", metavar="FOLDER")
    parser.add_argument("--torch", default="2.8.0")
    parser.add_argument("--tests", default="", metavar="EXPRESSION", help="narrows them, as pytest's -k")
    options = parser.parse_intermixed_args()
    emulated = Emulated(options.root.resolve(), options.torch)
    check(options.wheel, options.torch)
    emulated.prepare()
    emulated.install(options.wheel.resolve())
    tests = emulated.root / "tests"
    shutil.rmtree(tests, ignore_errors=True)
    shutil.copytree(REPOSITORY / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(REPOSITORY / "pyproject.toml", emulated.root / "pyproject.toml")  # the tests' markers
    files = [tests / "L0" / f"{name}.py" for name in options.files]
    for processor, variant in PROCESSORS.items():
        emulated.run(processor, "-m", "apex")
        chosen = f"{variant} and ({options.tests})" if options.tests else variant
        emulated.run(processor, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files)
    if not options.tests:
        print(loads.write(options.torch, PYTHON, bindings.source_identity(), platform=PLATFORM))


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        print(f"aarch64_check: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (OSError, subprocess.CalledProcessError) as error:  # apt-get, dpkg or pip, which have said why
        sys.exit(f"aarch64_check: {error}")
