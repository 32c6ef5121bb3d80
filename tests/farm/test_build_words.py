"""What a build says before it begins: what goes in, how long it takes, what it replaces, which compiler it brings."""

import json
import subprocess
import sys
import threading
import zipfile

import pytest

from build_matrix import REPOSITORY
from build_matrix.commands import quickstart
from build_matrix.errors import (
    BuildError,
    Incomplete,
    PackageIndexError,
    PythonMissing,
    ToolchainMissing,
)
from build_matrix.farm import plan, progress, report
from build_matrix.serve import publish
from build_matrix.spec import identity, matrix
from build_matrix.store import Store, WorkUnit, engine
from build_matrix.toolchains import by_arch, headers, host_compiler, manage, provision, pythons, torch_supply
from build_matrix.wheels import source_install

TAG = pythons.own_tag()


def build_of(*torches, archs=("gfx942",)):
    return plan.make(
        plan.Selection(("rocm",), archs, torches, (TAG,), platforms=(matrix.NATIVE,)), check=False
    )


@pytest.fixture
def printed(capsys, monkeypatch):
    from rich.console import Console

    def text():
        return capsys.readouterr().err

    monkeypatch.setattr(report, "console", Console(stderr=True, width=200))
    return text


def test_a_build_says_what_goes_in_and_how_long_it_takes(tmp_path, printed):
    live = progress.of_wheels(build_of(), Store(tmp_path), 2)
    text = printed()
    assert f"apex-rocm {TAG}: torch 2.8.0, " in text and "packs gfx942" in text
    assert "made sooner: --torch 2." in text and " on 2 cores" in text
    steps = {step.id for step in live.farm.plan.steps}
    assert f"steps, about {progress.clock(live.farm.left)}"[:13] in text and not any(
        "headers" in s for s in steps
    )
    assert live.farm.left > 60  # eight bindings


@pytest.mark.parametrize(
    "installed, said",
    [("2.13.0+cpu", "2.13.0"), ("2.13.1", "2.13.0"), ("2.99.0", "newest"), (None, "newest")],
)
def test_the_torch_that_is_made_sooner_is_the_installed_one(installed, said, tmp_path, printed, monkeypatch):
    monkeypatch.setattr(headers, "installed_version", lambda: installed)
    monkeypatch.setattr(progress, "_of_installed", lambda made, store: set())
    progress.of_wheels(build_of(), Store(tmp_path), 2)
    newest = matrix.load().torch_for(TAG)[-1]
    assert f"--torch {newest if said == 'newest' else said}\n" in printed()


def test_a_build_of_one_torch_does_not_say_how_to_ask_for_one(tmp_path, printed):
    progress.of_wheels(build_of("2.13.0"), Store(tmp_path), 2)
    text = printed()
    assert "torch 2.13.0, packs" in text and "--torch" not in text


def test_the_bar_counts_what_an_engine_makes(tmp_path):
    made = plan.Plan((plan.Step("object", "a", ("a",)), plan.Step("object", "b", ("b",))))
    farm = progress.Farm(made, {"object a": 1.0, "object b": 1.0}, 1)
    runs = engine.Engine(Store(tmp_path), 1, farm.add)
    runs.run([WorkUnit("object", n, {}, lambda folder: (folder / "o").touch()) for n in ("a", "other")])
    assert set(farm.done) == {"object a", "object other"} and farm.words().endswith("left")


def test_units_are_told_as_they_are_done_and_given_in_their_order(tmp_path):
    """A long one that was begun first does not keep the bar still."""
    told, quick = [], threading.Event()

    def tell(result):
        told.append(result.name)
        quick.set()

    def slow(folder):
        assert quick.wait(30)

    units = [WorkUnit("x", "slow", {}, slow), WorkUnit("x", "quick", {}, lambda folder: None)]
    results = engine.Engine(Store(tmp_path), 2, tell).run(units)
    assert told == ["quick", "slow"] and [result.name for result in results] == ["slow", "quick"]


def wheel_in(dist, torches, archs):
    """A file by the name of a wheel of ours, with what `replaced` reads."""
    label = matrix.load().accelerator("rocm").label
    path = dist / f"apex_rocm-{identity.version()}+{label}-{TAG}-{TAG}-manylinux_2_27_x86_64.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(
            "apex/build.json", json.dumps({"torch": [{"release": t} for t in torches], "archs": archs})
        )
    return path


def test_a_fuller_wheel_is_not_replaced_without_a_word(tmp_path):
    path = wheel_in(tmp_path, ["2.8.0", "2.13.0", "2.15.0"], ["gfx942", "gfx1100"])
    (words,) = publish.replaced(build_of("2.13.0").steps, tmp_path)
    assert words == (
        f"{path} has torch 2.8.0, 2.15.0 and packs gfx1100, and one without takes its place: --dist keeps both apart"
    )
    assert publish.replaced(build_of(archs=("gfx942", "gfx1100")).steps, tmp_path) == []
    path.write_text("no wheel")
    assert publish.replaced(build_of("2.13.0").steps, tmp_path) == []


@pytest.fixture
def machine(monkeypatch):
    """A machine without compilers; what is brought is written down."""
    brought = []

    def none(arch):
        raise ToolchainMissing(matrix.load().pack(arch).toolchains[0], "")

    monkeypatch.setattr(by_arch, "toolchain_for", none)
    monkeypatch.setattr(manage, "bring", brought.append)
    monkeypatch.setattr(provision.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(provision.os, "geteuid", lambda: 0)
    return brought


def test_a_missing_compiler_is_brought_and_said_first(machine, capsys, monkeypatch):
    monkeypatch.setattr(provision.package_index, "size", lambda url: 10_000_000)
    pinned = provision.pins.packages("nvrtc-12.3")[0].partition("sha256:")[2]
    file = provision.package_index.IndexFile("x.whl", "http://index.example/x.whl", pinned)
    monkeypatch.setattr(provision.package_index, "files", lambda project: [file])
    manage.bring_missing(["gfx942", "gfx950", "sm_70"])
    assert machine == ["clang-hip-7.2", "nvrtc-12.3"]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "clang-hip-7.2 is not here, and comes now (a Debian chroot of 1 GB by debootstrap, some minutes); "
        "--no-toolchain refuses it",
        "nvrtc-12.3 is not here, and comes now (nvidia-cuda-nvrtc-cu12, 10 MB); --no-toolchain refuses it",
    ]


def test_whoever_cannot_bring_it_is_told_the_one_command_before_anything_comes(machine, monkeypatch):
    monkeypatch.setattr(provision.os, "geteuid", lambda: 1000)
    with pytest.raises(ToolchainMissing, match=r"Run: sudo .* -m nox -s toolchain -- clang-hip-7.2$"):
        manage.bring_missing(["sm_70", "gfx942"])
    monkeypatch.setattr(provision.shutil, "which", lambda name: None)
    with pytest.raises(ToolchainMissing, match="as root with debootstrap; or name one by APEX_ROCM_ROOT"):
        manage.bring_missing(["gfx942"])
    assert machine == []


@pytest.fixture
def bare(machine, monkeypatch, tmp_path):
    """The same, without a C++ compiler and without headers of its Python."""

    def no_compiler(platform=matrix.NATIVE):
        raise ToolchainMissing("a C++ compiler", "apt-get install g++")

    monkeypatch.setattr(host_compiler, "find", no_compiler)
    monkeypatch.setattr(pythons, "ASK", pythons.ASK.replace("sysconfig.get_path('include')", f"'{tmp_path}'"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    pythons.find.cache_clear()
    yield machine
    pythons.find.cache_clear()


def test_a_python_without_headers_is_said_to_be_here(bare):
    with pytest.raises(PythonMissing, match=rf"is here \({sys.executable}\) without its headers") as fault:
        pythons.find(TAG)
    assert fault.value.remedy == f"apt-get install python3.{TAG[3:]}-dev"


def test_all_that_nobody_brings_is_named_before_a_toolchain_comes(bare, monkeypatch, capsys):
    from build_matrix import __main__ as commands

    command = ["wheel", "rocm", "--arch=gfx942", "--torch=2.13.0"]
    with pytest.raises(Incomplete) as fault:
        commands.main(command, standalone_mode=False)
    assert str(fault.value).splitlines()[-1] == f"Run: apt-get install g++ python3.{TAG[3:]}-dev"
    monkeypatch.setattr(provision.os, "geteuid", lambda: 1000)
    with pytest.raises(
        Incomplete, match=r"\nRun: apt-get install g\+\+ python\S+-dev && sudo \S+ -m nox -s toolchain"
    ):
        commands.main(command, standalone_mode=False)
    assert bare == []


@pytest.mark.parametrize(
    "words, said",
    [
        (["rocm", "--arch=gfx942", "--torch=2.31.0"], "torch 2.31.0 is not in matrix.toml"),
        (["rocm", "--arch=sm_90"], "no arch of rocm was chosen"),
        (["rocm", "--arch=gfx942", "--container", "--engine=docker"], "docker is not installed"),
    ],
)
def test_a_senseless_build_brings_no_toolchain(words, said, machine, monkeypatch):
    from build_matrix import __main__ as commands
    from build_matrix.containers import engine as engines

    monkeypatch.setattr(engines, "why_not", lambda name: f"{name} is not installed")
    with pytest.raises(BuildError, match=said):
        commands.main(["wheel", *words], standalone_mode=False)
    assert machine == []


def test_torch_is_not_downloaded_for_a_build_that_cannot_be(bare, monkeypatch):
    monkeypatch.setattr(quickstart.headers, "installed_version", lambda: None)
    monkeypatch.setattr(torch_supply, "find", lambda: pytest.fail("torch was looked for"))
    for begin in (quickstart.ensure_torch, quickstart.run):
        with pytest.raises(Incomplete, match=r"apt-get install g\+\+ python3\.\d+-dev"):
            begin()


def test_a_source_install_without_headers_is_python_alone(bare, monkeypatch, tmp_path, capsys):
    """As without a compiler: it is said, and what was asked for by a variable stops."""
    monkeypatch.setattr(host_compiler, "find", lambda platform=matrix.NATIVE: None)
    monkeypatch.setattr(source_install.tree, "fill_python_only", lambda made, target: bare.append(target))
    source_install.build([], tmp_path)
    assert bare == [tmp_path] and "runs on the PyTorch reference" in capsys.readouterr().err
    with pytest.raises(PythonMissing):
        source_install.build([source_install.Registry.load().extensions[0]], tmp_path)


def test_whether_hipblaslt_is_supported_is_told_as_rocm_does(bare, monkeypatch, tmp_path, capsys):
    """Beside ROCm's torch alone: libapex opens hipBLASLt wherever it is built."""
    monkeypatch.setattr(source_install.tree, "fill_python_only", lambda made, target: None)
    monkeypatch.setattr(source_install.headers, "installed_version", lambda: "2.13.0")
    for of, said in (("rocm", "INFO: IS_HIPBLASLT_SUPPORTED value is {}\n"), ("cuda", "")):
        monkeypatch.setattr(source_install, "vendor", lambda of=of: of)
        source_install.say_hipblaslt(True)
        assert capsys.readouterr().out == said.format(True)
        monkeypatch.setattr(host_compiler, "find", lambda platform=matrix.NATIVE: None)
        source_install.build([], tmp_path)
        assert capsys.readouterr().out == said.format(False)


def test_what_is_missing_is_one_command(monkeypatch):
    faults = [
        ("gfx942", "clang is not here", "sudo python -m nox -s toolchain -- clang"),
        ("sm_90", "nvcc is not here", "nox -s toolchain -- nvcc-13.0"),
        ("x", "g++ is not here", "apt-get install g++"),
        ("cp311", "no headers", "apt-get install python3.11-dev"),
    ]
    assert str(Incomplete(faults, "what")).splitlines()[-1] == (
        "Run: apt-get install g++ python3.11-dev && sudo python -m nox -s toolchain -- clang && "
        "nox -s toolchain -- nvcc-13.0"
    )


def test_the_size_is_left_out_where_the_index_does_not_say_it(monkeypatch):
    def none(project):
        raise PackageIndexError("no answer")

    monkeypatch.setattr(provision.package_index, "files", none)
    assert provision.size("nvrtc-12.3") == "nvidia-cuda-nvrtc-cu12"


def test_no_toolchain_refuses(tmp_path):
    """A compiler that is on no machine, by a folder of toolchains that is empty."""
    code = (
        "import sys, pathlib; from build_matrix.toolchains import by_arch, manage\n"
        "from build_matrix import __main__ as m\n"
        "from build_matrix.errors import ToolchainMissing\n"
        "def none(arch): raise ToolchainMissing('clang-hip-7.2', 'nox -s toolchain -- clang-hip-7.2')\n"
        "by_arch.toolchain_for = none\n"
        "manage.bring = lambda name: sys.exit('it was brought')\n"
        f"sys.argv = ['x', 'wheel', 'rocm', '--arch=gfx942', '--torch=2.13.0', '--dist={tmp_path}', *sys.argv[1:]]\n"
        "m.run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-toolchain"], cwd=REPOSITORY, text=True, capture_output=True
    )
    assert done.returncode == 3, done.stderr
    assert "Run: nox -s toolchain -- clang-hip-7.2" in done.stderr and "brought" not in done.stderr


def test_commands_say_their_version():
    for module in ("build_matrix", "apex"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--version"], cwd=REPOSITORY, text=True, capture_output=True
        )
        said = done.stdout.strip().partition("+")[0]  # a tree of one accelerator bears its label
        assert (done.returncode, said) == (0, identity.version()), done.stderr
