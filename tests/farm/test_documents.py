"""Every command line of README and docs/ is one that works: sessions and options are those that there are, what is
cheap is run literally, and the install lines by the pip that ships with Python."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import types
import venv
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement

from build_matrix import REPOSITORY, __main__, backend
from build_matrix.serve import index, install_line, server
from build_matrix.spec import identity, matrix
from build_matrix.spec.registry import Registry
from build_matrix.wheels import source_install

pytest.importorskip("nox")
from nox import registry

import noxfile

PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))]
STARTS = ("nox", "pip", "python", "make", "bash", "dask", "uv", "openssl", "eval")
PLACEHOLDERS = re.compile(r"<|…|\bNAME\b|\bIMAGE\b|\bURL\b|\bARGUMENTS\b")


def commands():
    """(page, line) of every command in a block, in a table or in the text."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
        lines += re.findall(r"`([^`\n]+)`", text)
        for line in lines:
            words = [w for w in shlex.split(line, comments=True) if "=" not in w] if _parses(line) else []
            if words and words[0] in STARTS and len(words) > 1:
                found.append((page.name, line))
    return list(dict.fromkeys(found))


def _parses(line):
    try:
        return bool(shlex.split(line, comments=True))
    except ValueError:
        return False


COMMANDS = commands()


def test_the_commands_of_readme_are_found():
    lines = [line for page, line in COMMANDS if page == "README.md"]
    for begin in (
        "pip install nox && nox -s quickstart",
        "nox -s farm ",
        "nox -s docs",
        "python -m apex explain",
    ):
        assert any(line.startswith(begin) for line in lines), begin
    assert len(COMMANDS) > 60


@pytest.fixture
def session(monkeypatch):
    """Runs a session's function; gives the arguments of each `python -m build_matrix` in it."""

    def run(name, *arguments):
        ran = []
        monkeypatch.setattr(noxfile, "prepare", lambda session, *groups: None)
        monkeypatch.setattr(noxfile, "farm", lambda session, *words, **options: ran.append(words))
        monkeypatch.setattr(noxfile.cards, "why_none", lambda tier, cell: None)
        known = registry.get()
        base, _, cell = name.rstrip(")").partition("(")
        function = known[name if name in known else base]
        fake = types.SimpleNamespace(
            posargs=list(arguments), run=lambda *words, **options: None, name=name, bin="", env={}
        )
        if cell:
            assert cell in matrix.load().cells()
            noxfile.run_tier(fake, base, cell, *arguments)
        else:
            # else the session would be run for real: its own module is not the one that is patched
            assert function.func.__globals__ is vars(noxfile), "a test ran noxfile.py a second time"
            function(fake)
        return ran

    return run


def parse(words):
    """Parses the arguments of `python -m build_matrix`, and runs nothing."""
    command, arguments = __main__.main, list(words)
    while isinstance(command, click.Group) and arguments:
        if arguments[0] in ("--help", "--version"):
            return
        name = arguments.pop(0)
        found = command.get_command(None, name)
        assert found, f"no command is called {name}"
        command = found
    if "--help" not in arguments and command is not __main__.main:
        command.make_context(command.name, arguments)


def check(words, session):
    """Raises where a command is none that there is. `words` are without variables."""
    program, *rest = words
    if program == "nox" and rest[0] == "-s":
        own = rest[1 : rest.index("--")] if "--" in rest else rest[1:]
        arguments = rest[rest.index("--") + 1 :] if "--" in rest else []
        for name in own:
            for each in [n for n in registry.get() if re.fullmatch(name.replace("*", "cpu"), n)] or [name]:
                for made in session(each, *arguments):
                    parse(made)
    elif program == "nox":
        assert rest == ["-l"]
    elif rest[:2] == ["-m", "build_matrix"]:
        parse(rest[2:])
    elif rest[:2] == ["-m", "pip"]:
        check_pip(rest[2:])
    elif program == "python" and rest[0] == "-m":
        module = rest[1].partition(".")[0]
        assert module in ("apex", "pytest", "build_matrix", "build")
        for before, place in zip(rest[1:], rest[2:], strict=False) if rest[1] == "pytest" else ():
            assert place.startswith("-") or before in ("-m", "-k") or (REPOSITORY / place).exists(), place
    elif program in ("python", "bash"):
        assert (REPOSITORY / rest[0]).is_file(), rest[0]
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    elif program == "pip":
        check_pip(rest)


def check_pip(words):
    assert words[0] in ("install", "wheel", "uninstall")
    for word in words[1:]:
        if (
            not word.startswith("-")
            and "/" not in word
            and "=" not in word.partition("==")[0]
            and word != "."
        ):
            Requirement(word)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: value[:60])
def test_a_command_is_one_that_there_is(page, line, session):
    for name, value in {"<op>": "rms_norm", "<index>": "http://index.example", "ARGUMENTS": "--help"}.items():
        line = line.replace(name, value)
    line = PLACEHOLDERS.sub("x", line)
    command = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word != "&&":
            command.append(word)
            continue
        while re.fullmatch(r"[A-Z_0-9]+=.*", command[0]):
            command.pop(0)
        check(command, session)
        command = []


def source_installs():
    found = [line for page, line in COMMANDS if "pip install ." in line and "AIT" not in line]
    assert len(found) > 3
    return found


@pytest.mark.parametrize("line", source_installs())
def test_variables_and_options_of_source_installs_name_extensions(line):
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if re.match(r"APEX_BUILD_\w+=", word))
    settings = [word for word in words if word.startswith("--build-option=")]
    given = backend._options_apart({"--build-option": [s.partition("=")[2] for s in settings]})[
        "--build-option"
    ]
    known = Registry.load()
    arguments = ["setup.py", *given]
    options = source_install.take_options(arguments, known)
    assert arguments == ["setup.py"]
    assert bool(known.asked(variables, options)) == bool(variables or given)
    assert not settings or line.count("--config-settings") == 1  # pip before 23.1 keeps the last one


@pytest.mark.parametrize(
    ("line", "codes"),
    [
        ("python -m apex", (0, 1)),
        ("python -m apex explain --arch sm_120 --driver 550 --torch 2.14", (0, 1, 2)),
        ("python -m apex which", (0, 2)),
        ("python -m apex compat --torch 2.13 --rocm 7.2 --arch gfx942", (0,)),
    ],
)
def test_what_readme_shows_of_commands_runs(line, codes):
    assert any(line in shown for page, shown in COMMANDS if page == "README.md")
    command = [sys.executable, *shlex.split(line)[1:]]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode in codes and done.stdout, done.stderr


def test_the_python_of_readme_runs():
    import torch

    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"(?:^    .*\n|^\n)*^    from apex.*\n(?:^    .*\n|^\n)*", text, re.MULTILINE)
    model = torch.nn.Linear(3, 2)
    before = model.weight.detach().clone()
    loss = model(torch.ones(1, 3)).sum()
    exec(
        compile(re.sub(r"^    ", "", block, flags=re.MULTILINE), "README.md", "exec"),
        {"model": model, "loss": loss},
    )
    assert not torch.equal(before, model.weight)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A clean environment, with pip as it ships, and a torch that is but a name."""
    place = tmp_path_factory.mktemp("clean")
    try:
        venv.create(place, with_pip=True, system_site_packages=False)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"no environment with pip can be made here: {error}")
    return place


def pip(place, line):
    words = shlex.split(line)
    environment = {"PATH": f"{place}/bin:/usr/bin:/bin", "HOME": str(place), "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(words, cwd=place, env=environment, text=True, capture_output=True)


def test_the_install_line_works_as_it_is_printed(clean, wheel_of_tree):
    """Without torch it says what is missing, as README does; with one it installs, literally."""
    (wheel,) = wheel_of_tree.glob("*.whl")
    accelerator = wheel.name.partition("-")[0].removeprefix("apex_")
    index.write([wheel], clean / ".whl")
    (shown,) = [line for page, line in COMMANDS if page == "README.md" and f"apex-{accelerator}==" in line]
    with server.background(clean / ".whl") as address:
        line = shown.replace("<index>", address)
        refused = pip(clean, line)
        assert refused.returncode and "No matching distribution found for torch>=2.8" in refused.stderr
        (packages,) = Path(clean).glob("lib/python3.*/site-packages")
        about = packages / "torch-2.13.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
        (about / "RECORD").write_text("")
        (about / "INSTALLER").write_text("pip\n")
        done = pip(clean, line)
    assert done.returncode == 0, done.stderr
    assert (packages / "apex/__init__.py").is_file()
    (installed,) = packages.glob("apex_*.dist-info")
    assert installed.name.startswith(f"apex_{accelerator}-{identity.version()}")
    assert install_line.line(accelerator) == shown


def test_make_prints_what_it_would_run():
    if not shutil.which("make"):
        pytest.skip("make is not here")
    for target in ("clean", "aiter"):
        done = subprocess.run(["make", "-n", target], cwd=REPOSITORY, text=True, capture_output=True)
        assert done.returncode == 0 and done.stdout
