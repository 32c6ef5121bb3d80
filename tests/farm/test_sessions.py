"""noxfile.py: what is listed, what can be named, and the one environment of all sessions."""

import importlib.metadata
import json
import os
import subprocess
import sys
import types

import pytest

from build_matrix import REPOSITORY
from build_matrix.spec import matrix

pytest.importorskip("nox")


def listed(*arguments):
    command = [sys.executable, "-m", "nox", "-l", *arguments]
    environment = os.environ | {"NO_COLOR": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_list_has_each_kind_of_session_once():
    lines = [line for line in listed().splitlines() if line[:2] in ("* ", "- ")]
    assert 15 < len(lines) <= 30
    text = "\n".join(lines)
    for pack in matrix.load().packs:  # every arch stands in a line
        assert pack.arch.name in text
    assert "L0(cpu)" in text and '"L0(sm_90)"' in text


def test_every_arch_and_cell_can_be_named():
    axes = matrix.load()
    names = [f"build-{p.arch.vendor}-{p.arch.name.replace('sm_', 'sm')}" for p in axes.packs]
    names += [f"{tier}({cell})" for tier in ("L0", "L1") for cell in axes.cells()]
    found = {each["session"]: each for each in json.loads(listed("--json", "-s", *names))}
    assert set(names) == set(found)
    assert "* L0(sm_90)" in listed("-s", "L0(sm_90)") and "* build-rocm-gfx942" in listed(
        "-s", "build-rocm-gfx942"
    )


def test_sessions_share_one_environment(tmp_path, monkeypatch):
    """It is made once, and found on PATH; a run that was killed in between makes it again."""
    import noxfile

    ran = []

    def run(program, *arguments, **options):
        ran.append((program, *arguments))
        if "virtualenv" in arguments:
            (tmp_path / "cp311/lib/python3.11/site-packages").mkdir(parents=True, exist_ok=True)
            (tmp_path / "cp311/bin").mkdir(exist_ok=True)
            (tmp_path / "cp311/bin/python").touch()

    monkeypatch.setattr(noxfile, "ENVIRONMENT", tmp_path / "cp311")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("VIRTUAL_ENV", "")
    session = types.SimpleNamespace(run=run, run_install=run)
    noxfile.prepare(session, "lint")
    noxfile.prepare(session, "farm")
    made = [command for command in ran if "virtualenv" in command]
    installed = [command for command in ran if "install" in command]
    assert (
        len(made) == 1 and [command[0] for command in installed] == [str(tmp_path / "cp311/bin/python")] * 2
    )
    assert os.environ["PATH"].split(os.pathsep).count(str(tmp_path / "cp311/bin")) == 1
    (tmp_path / "cp311/made").unlink()
    noxfile.prepare(session, "lint")
    assert len([command for command in ran if "virtualenv" in command]) == 2
    assert importlib.metadata.version("virtualenv")  # nox brings it
