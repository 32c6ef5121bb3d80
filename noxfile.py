"""Everything that is done with this repository: `nox -l` lists it.

Sessions share one environment (.nox/cp311, of the Python that runs nox), which also sees the packages of that Python:
torch, which is large, is used from there and not installed again.
"""

import contextlib
import fcntl
import os
import site
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036  nox is found on any Python, and would prepare an environment of it
    have = ".".join(map(str, sys.version_info[:2]))
    other = "python3.11 -m pip install nox && python3.11 -m nox"
    sys.exit(f"noxfile.py: nox runs on Python {have}, where apex cannot. Use Python 3.10 or newer: {other}")

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # the sessions are named after the matrix
from build_matrix.check import cards  # noqa: E402
from build_matrix.check import lint as lint_commands  # noqa: E402
from build_matrix.spec import matrix, toml  # noqa: E402

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "none"  # nox would make an environment for each session
GROUPS = toml.read(ROOT / "pyproject.toml")["dependency-groups"]
ENVIRONMENT = ROOT / f".nox/cp{sys.version_info[0]}{sys.version_info[1]}"
# A list is for reading: what there is for each arch stands there once. One that names sessions, or is for programs, is
# of all of them.
_given = {argument.partition("=")[0] for argument in sys.argv}
LISTED = bool(_given & {"-l", "--list", "--list-sessions"}) and not _given & {
    "-s", "-e", "--session", "--sessions", "-k", "--keywords", "--json",
}  # fmt: skip


def prepare(session, *groups):
    """The environment of all sessions, with what `groups` name, is made where it is not, and found on PATH: `python` is
    its own from here on."""
    with alone():
        if not (ENVIRONMENT / "made").is_file() or not (ENVIRONMENT / "bin/python").exists():
            session.run_install(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(ENVIRONMENT))
            (ENVIRONMENT / "made").touch()
        (packages,) = ENVIRONMENT.glob("lib/python3.*/site-packages")
        seen = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
        (packages / "visible.pth").write_text("".join(f"{folder}\n" for folder in seen))
        wanted = [name for group in groups for name in GROUPS[group]]
        session.run_install(str(ENVIRONMENT / "bin/python"), "-m", "pip", "install", "--quiet", *wanted)
    os.environ["VIRTUAL_ENV"] = str(ENVIRONMENT)
    if (first := str(ENVIRONMENT / "bin")) not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = first + os.pathsep + os.environ["PATH"]


@contextlib.contextmanager
def alone():
    """Two that run nox at once prepare one after the other."""
    ENVIRONMENT.parent.mkdir(exist_ok=True)
    with open(ENVIRONMENT.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def farm(session, *arguments):
    """python -m build_matrix in the session's environment."""
    session.run("python", "-m", "build_matrix", *arguments, env={"PYTHONPATH": str(ROOT)})


@nox.session
def quickstart(session):
    """Builds the CPU wheel, installs it from a local index into a clean environment, and trains a model."""
    prepare(session, "farm")
    farm(session, "quickstart", *session.posargs)


# Groups of packages without which some test would not run.
TESTING = ["farm", "cluster", "s3", "variants", "containers", "tests", "jax", "examples", "docs"]


@nox.session
def tests(session):
    """Builds what the tests need and runs what a change asks for (docs/testing.md); arguments after -- go to pytest."""
    prepare(session, *TESTING, "lint")
    farm(session, "ensure-torch")
    farm(session, "tests", *session.posargs)


@nox.session(name="tests-all")
def tests_all(session):
    """Everything: all CPU levels, warp sizes, sanitizers, kills, containers; in hours; goes on where it was stopped."""
    prepare(session, *TESTING, "lint")
    farm(session, "ensure-torch")
    farm(session, "tests", "--all")


@nox.session(name="tests-portable")
def tests_portable(session):
    """Every test of an op on the portable binding (docs/portable_binding.md); arguments after -- go to pytest."""
    prepare(session, *TESTING)
    farm(session, "ensure-torch")
    farm(session, "tree", "--available")
    chosen = session.posargs or ["-m", "not executor and not gpu"]
    command = [
        "python",
        "-m",
        "pytest",
        "-q",
        "tests/L0",
        "--ignore=tests/L0/host",
        "--ignore=tests/L0/loader",
    ]
    session.run(*command, *chosen, env={"APEX_BINDING": "portable"})


@nox.session
def toolchain(session):
    """Shows the device compilers; `-- NAME` brings one here, `-- --update` moves the pins."""
    prepare(session, "farm")
    farm(session, "toolchain", *session.posargs)


@nox.session(name="build_matrix")
def command(session):
    """Any command of the farm with all that it needs: `-- --help`, `-- explain dist/WHEEL`."""
    prepare(session, "farm", "cluster")
    farm(session, *session.posargs)


@nox.session(name="serve-index")
def serve_index(session):
    """Serves the wheels of dist/ on loopback: `-- --port 8000`."""
    prepare(session, "farm")
    farm(session, "index")
    farm(session, "serve", *session.posargs)


@nox.session
def publish(session):
    """Writes digests, compatibility table and index of the wheels in dist/, as a farm does at its end."""
    prepare(session, "farm")
    farm(session, "publish", *session.posargs)


@nox.session(name="transformer-engine")
def transformer_engine(session):
    """Writes the wheel that gives apex.transformer_engine the name transformer_engine, and that of its records."""
    prepare(session, "farm")
    farm(session, "transformer-engine", *session.posargs)


@nox.session
def canary(session):
    """What a wheel serves under the newest torch of the index: `-- dist/WHEEL`; without one, this checkout's."""
    prepare(session, "farm")
    farm(session, "ensure-torch")
    farm(session, "canary", *session.posargs)


@nox.session
def variants(session):
    """Writes the wheels of dist/ as variants of one project (PEP 817), into dist/variants/."""
    prepare(session, "farm", "variants")
    farm(session, "variants", *session.posargs)


@nox.session
def lint(session):
    """Style, formats, shell scripts and types, of everything: build_matrix/check/lint.py."""
    prepare(session, "lint")
    session.run("python", *lint_commands.ITSELF[1:], env={"PYTHONPATH": str(ROOT)})


@nox.session
def docs(session):
    """Builds the documentation into build/docs: pages, reference of every module, tables, plots. A warning fails it."""
    prepare(session, "farm", "docs", "jax")
    farm(session, "ensure-torch")
    session.run("python", "-m", "build_matrix.site", env={"PYTHONPATH": str(ROOT)})


@nox.session(name="farm")
def whole_release(session):
    """Builds the whole release on this machine, or on a Dask cluster: `-- --scheduler tcp://...`."""
    s3 = ["s3"] if any("s3://" in argument for argument in session.posargs) else []
    prepare(session, "farm", "cluster", *s3)
    farm(session, "farm", *session.posargs)


@nox.session
def verify(session):
    """Builds a wheel again and compares: `-- dist/WHEEL`, `-- dist/WHEEL --arch gfx942`."""
    prepare(session, "farm", "cluster")
    farm(session, "verify", *session.posargs)


def run_tier(session, tier, cell, *arguments):
    """Ends as a failure, and says why, where nothing of it can run: before anything is installed."""
    if why := cards.why_none(tier, cell):
        session.error(f"{tier}({cell}): {why}; nothing ran")
    prepare(session, "farm", "tests", "examples")
    farm(session, "ensure-torch")
    archs = [p.arch.name for p in matrix.load().packs if p.emulated] if tier == "emulated" else [cell]
    farm(session, "tier", tier, "--cell", cell, "--check")
    farm(session, "tree", "--available", *(f"--arch={arch}" for arch in archs if arch != "cpu"))
    farm(session, "tier", tier, "--cell", cell, *arguments)


def tier_session(function):
    """A session a cell: "L0(cpu)", "L0(sm_90)", ...; one line of the list."""
    cells = matrix.load().cells()
    if LISTED:
        function.__doc__ += f"\n\nCells: {', '.join(cells)}."
        return nox.session(name=f"{function.__name__}({cells[0]})")(function)
    return nox.session(nox.parametrize("cell", [nox.param(cell, id=cell) for cell in cells])(function))


@tier_session
def L0(session, cell):
    """Tests of every op and optimizer on the CPU, or on a card: "L0(sm_90)"; with a receipt. `-- --wheel FILE`."""
    run_tier(session, "L0", cell, *session.posargs)


@tier_session
def L1(session, cell):
    """amp's whole cross product, and on the CPU the examples; on a card: "L1(sm_90)"; with a receipt."""
    run_tier(session, "L1", cell, *session.posargs)


@nox.session
def emulated(session):
    """Every kernel's AMD machine code on the emulator, with a receipt an arch."""
    run_tier(session, "emulated", "cpu", *session.posargs)


@nox.session(name="release-check")
def release_check(session):
    """Everything that a release must pass, in hours; `-- --list` shows it."""
    if "--list" in session.posargs:  # a list needs neither torch nor what the checks need
        prepare(session, "farm")
    else:
        prepare(session, *TESTING, "lint")
        farm(session, "ensure-torch")
    farm(session, "release-check", *session.posargs)


@nox.session
def plan(session):
    """Shows the steps of a release and how long they would take."""
    prepare(session, "farm", "cluster")
    farm(session, "plan", *session.posargs)


WINDOWS = ["--platform=win_amd64"]


def wheel_session(name, accelerator, archs, about, more=()):
    """One session that builds one wheel for the Python that runs nox."""

    @nox.session(name=name)
    def build(session):
        prepare(session, "farm", *(["containers"] if "--container" in session.posargs else []))
        farm(session, "wheel", accelerator, *(f"--arch={arch}" for arch in archs), *more, *session.posargs)

    build.__doc__ = about
    return build


build_cpu = wheel_session("build-cpu", "cpu", [], "Builds the wheel apex-cpu.")
build_cuda = wheel_session("build-cuda", "cuda", [], "Builds the wheel apex-cuda with packs for every sm.")
build_windows_cuda = wheel_session(
    "build-windows-cuda", "cuda", [], "Builds the wheel apex-cuda for Windows.", WINDOWS
)
build_rocm = wheel_session("build-rocm", "rocm", [], "Builds the wheel apex-rocm with packs for every gfx.")
build_npu = wheel_session("build-npu", "npu", [], "Builds the wheel apex-npu: Python alone, for Ascend NPUs.")
for _accelerator in ("cuda", "rocm"):
    _archs = matrix.load().archs(_accelerator)
    for _arch in _archs[:1] if LISTED else _archs:
        _about = f"for {_arch}"
        if LISTED:
            _about = f"with a pack for {_arch} only; or for one of {', '.join(_archs[1:])}"
        _name = f"build-{_accelerator}-{_arch.replace('sm_', 'sm')}"
        _about = f"Builds the wheel apex-{_accelerator} {_about}."
        _session = wheel_session(_name, _accelerator, [_arch], _about)
        globals()[_name.replace("-", "_")] = _session


def bake_session(accelerator):
    """One session that makes an image of one accelerator."""

    @nox.session(name=f"bake-{accelerator}")
    def bake(session):
        prepare(session, "farm")
        farm(session, "bake", accelerator, *session.posargs)

    bake.__doc__ = f"Makes an image with apex-{accelerator} from dist/: `-- --base IMAGE`."
    return bake


bake_cpu, bake_cuda, bake_rocm = map(bake_session, ["cpu", "cuda", "rocm"])
