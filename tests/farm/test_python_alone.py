"""Look-ups run on Python alone, in a checkout and from an installed wheel; every other command of the farm says in one
line what runs it where its packages are missing."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest

from build_matrix import REPOSITORY
from build_matrix.commands import alone
from build_matrix.spec import toml
from build_matrix.toolchains import pythons

ASKED = ["--torch", "2.13.0+cu128", "--arch", "sm_90"]


def run(*arguments, python=sys.executable, cwd=REPOSITORY, **variables):
    """A process without site-packages, user packages or variables of this one."""
    environment = {"PATH": os.environ["PATH"], **variables}
    command = [python, "-S", "-s", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, encoding="utf-8", capture_output=True)


def interpreters():
    """The Pythons of the matrix that are here, this one among them."""
    found = [sys.executable]
    for tag in ("cp310", "cp312", "cp313"):
        try:
            found.append(pythons.find(tag).program)
        except pythons.PythonMissing:
            continue
    return found


def test_a_checkout_answers_on_python_alone():
    for python in interpreters():
        done = run("-m", "build_matrix", "compat", *ASKED, "--json", python=python)
        assert done.returncode == 0, (python, done.stderr)
        assert json.loads(done.stdout)["command"].startswith("python -m pip install apex-cuda==")
        done = run("-m", "build_matrix", "which", python=python)
        assert done.returncode == 2 and "no torch is installed" in done.stderr, (python, done.stderr)
        table = run("-m", "build_matrix", "compat", "--table", python=python)
        assert table.returncode == 0 and table.stdout.startswith("| pack |"), (python, table.stderr)


LOOK_UPS = ("which", "compat --table", "compat --torch 2.13")


@pytest.mark.parametrize(
    ("words", "packages"), [*((w, ("-S", "-s")) for w in LOOK_UPS), *((w, ()) for w in (*LOOK_UPS, "--help"))]
)
def test_an_output_that_cannot_be_written(words, packages):
    """A reader that goes away, as in `which | head`, and a full disk: no traceback, at the end neither."""
    if not packages:
        pytest.importorskip("click")
    command = shlex.join([sys.executable, *packages, "-m", "build_matrix", *words.split()])

    def said(output):
        done = subprocess.run(
            ["bash", "-c", f"{command} {output}"], cwd=REPOSITORY, text=True, capture_output=True
        )
        return [*map(int, done.stdout.split())], done.stderr

    codes, error = said('| true; echo "${PIPESTATUS[0]}"')
    assert codes == [1] and "Traceback" not in error and "BrokenPipe" not in error
    codes, error = said('> /dev/full; echo "$?"')
    assert codes == [2] and "Traceback" not in error
    assert error.endswith("build_matrix: the output cannot be written: No space left on device\n")


@pytest.fixture(scope="module")
def site(wheel_of_tree, tmp_path_factory):
    """A site-packages with the wheel in it and nothing else: no torch either."""
    folder = tmp_path_factory.mktemp("site")
    (wheel,) = wheel_of_tree.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_an_installed_wheel_answers_as_the_checkout(site):
    ours = run("-m", "build_matrix", "compat", *ASKED, "--json")
    theirs = run("-m", "apex", "compat", *ASKED, "--json", cwd=site, PYTHONPATH=str(site))
    assert theirs.returncode == 0, theirs.stderr
    ours, theirs = json.loads(ours.stdout), json.loads(theirs.stdout)
    assert set(ours.pop("grades")) == {"sm_90"}  # of packs: a checkout counts receipts, a wheel cannot
    assert set(ours["binding_grades"]) == set(ours["pythons"])
    assert ours == theirs
    which = run("-m", "apex", "which", cwd=site, PYTHONPATH=str(site))
    assert which.returncode == 2 and "no torch is installed" in which.stderr
    assert run("-m", "apex", "compat", cwd=site, PYTHONPATH=str(site)).returncode == 64


@pytest.mark.parametrize(
    "command", [*alone.SESSIONS, "tree", "explain", "receipts", "changelog", "nonsense", ""]
)
def test_every_other_command_says_what_runs_it(command):
    done = run("-m", "build_matrix", *filter(None, [command]))
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "needs click, which is not installed here. Run: " in line
    remedy = f"nox -s '{alone.SESSIONS[command]}'" if "(" in alone.SESSIONS.get(command, "") else None
    assert (
        (remedy or f"nox -s {alone.SESSIONS.get(command)}" in line)
        if command in alone.SESSIONS
        else "click>=8" in line
    )


def test_the_line_of_pip_is_of_whole_requirements_and_can_be_read():
    """Each word of it is a requirement of the group, as pip takes it."""
    requirements = pytest.importorskip("packaging.requirements")
    line = alone.needs("x", ModuleNotFoundError("no click", name="click"))
    python, m, pip, install, *words = shlex.split(line.rpartition("Run: ")[2])
    assert (python, m, pip, install) == ("python", "-m", "pip", "install")
    group = toml.read(REPOSITORY / "pyproject.toml")["dependency-groups"]["farm"]
    assert [requirements.Requirement(word) for word in words] == list(map(requirements.Requirement, group))
    assert "'\"'" not in line


def test_the_sessions_that_are_named_exist():
    noxfile = (REPOSITORY / "noxfile.py").read_text()
    for session in set(alone.SESSIONS.values()):
        name = session.partition("(")[0].replace("-", "_")
        assert (
            f"def {name}(" in noxfile
            or f'name="{session}"' in noxfile
            or f"{name} = " in noxfile
            or (f"{name}, bake" in noxfile)
        ), session


def without(missing, tmp_path, program, cwd=REPOSITORY):
    """A process whose environment has everything but the package `missing`."""
    (tmp_path / "missing.py").write_text(
        "import runpy, sys\nfrom importlib.abc import MetaPathFinder\n"
        "class Absent(MetaPathFinder):\n    def find_spec(self, name, path, target=None):\n"
        f"        if name.partition('.')[0] == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        f"sys.meta_path.insert(0, Absent())\n{program}\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(cwd), "APEX_STORE": str(tmp_path / "store")}
    command = [sys.executable, tmp_path / "missing.py"]
    return subprocess.run(command, cwd=cwd, env=environment, encoding="utf-8", capture_output=True)


@pytest.mark.parametrize(
    ("missing", "command"),
    [("dask", "farm --only packs --arch sm_70 --available"), ("rich", "plan"), ("jinja2", "index"),
     ("filelock", "tree --torch 2.13.0")],
)  # fmt: skip
def test_a_package_that_only_some_command_needs(missing, command, tmp_path):
    """click is there; what is missing is met later, and said alike."""
    pytest.importorskip("click")
    words = ["build_matrix", *command.split()]
    if missing == "jinja2":
        (tmp_path / "a.whl").touch()
        words += ["--dist", str(tmp_path)]
    done = without(
        missing, tmp_path, f"sys.argv = {words}\nrunpy.run_module('build_matrix', run_name='__main__')"
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    assert missing in done.stderr.splitlines()[-1] and "Run: " in done.stderr


def test_a_build_from_source_says_what_is_missing(tmp_path):
    """setup.py where filelock is not: what pip shows is a line, no traceback."""
    pytest.importorskip("setuptools")
    copy = tmp_path / "copy"
    for name in (
        "setup.py",
        "version.txt",
        "related_commits",
        "pyproject.toml",
        "csrc",
        "apex",
        "build_matrix",
    ):
        source, target = REPOSITORY / name, copy / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "receipts"))
        else:
            shutil.copyfile(source, target)
    program = "sys.argv = ['setup.py', 'build_py']\nrunpy.run_path('setup.py', run_name='__main__')"
    done = without("filelock", tmp_path, program, cwd=copy)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr and "Run: python -m pip install filelock" in done.stderr, (
        done.stderr
    )
