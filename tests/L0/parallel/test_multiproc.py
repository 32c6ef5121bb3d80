"""python -m apex.parallel.multiproc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from apex.parallel import multiproc

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Starts a script under multiproc; returns the process."""
    monkeypatch.chdir(tmp_path)
    started = []

    def start(script, *arguments, **environment):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        command = [sys.executable, "-m", "apex.parallel.multiproc", str(path), *arguments]
        inherited = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
        }
        environment = {**inherited, "PYTHONPATH": str(ROOT), **environment}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_processes_meet(launch, tmp_path):
    """Each knows its rank, and they can talk; rank 0 to the terminal, the others to files."""
    process = launch(
        """
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        t = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(t)
        print(dist.get_rank(), os.environ["LOCAL_RANK"], t.item(), os.environ["OMP_NUM_THREADS"], *sys.argv[1:])
        dist.destroy_process_group()
        """,
        "--flag",
        "two words",
        WORLD_SIZE="2",
    )
    output, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert output == "0 0 3 1 --flag two words\n"
    assert (tmp_path / "GPU_1.log").read_text() == "1 1 3 1 --flag two words\n"


WAITS = """
    import os, pathlib, sys, time
    rank = int(os.environ["RANK"])
    if rank == 1:
        while len(list(pathlib.Path().glob("pid[0-9]"))) < 2:
            time.sleep(0.01)
        {}
    pathlib.Path(f"pid{{rank}}.part").write_text(str(os.getpid()))
    os.rename(f"pid{{rank}}.part", f"pid{{rank}}")
    time.sleep(600)
"""


def assert_ended(tmp_path):
    for path in tmp_path.glob("pid[0-9]"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


@pytest.mark.parametrize(
    "end, code",
    [("print('why'); sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 128 + 9)],
    ids=["exit", "signal"],
)
def test_one_fails(launch, tmp_path, end, code):
    """The others are ended, and the exit code is the one that failed."""
    process = launch(WAITS.format(end), WORLD_SIZE="3")
    _, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert "rank 1 ended with exit code" in error and "GPU_1.log" in error
    assert len(list(tmp_path.glob("pid[0-9]"))) == 2
    assert_ended(tmp_path)
    if code == 3:
        assert (tmp_path / "GPU_1.log").read_text() == "why\n"


def test_it_is_ended_itself(launch, tmp_path):
    process = launch(WAITS.format("pass"), WORLD_SIZE="2")
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("pid[0-9]"))) < 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert_ended(tmp_path)


def test_options_of_public_scripts(tmp_path):
    """--rank and --world-size go to scripts that have them."""
    plain, public = tmp_path / "plain.py", tmp_path / "public.py"
    plain.write_text("import sys")
    public.write_text("parser.add_argument('--rank')\nparser.add_argument(\"--world-size\", type=int)")
    assert multiproc.command([str(plain), "-b", "4"], 1, 2)[1:] == [str(plain), "-b", "4"]
    assert multiproc.command([str(public)], 1, 2)[1:] == [str(public), "--world-size", "2", "--rank", "1"]
    given = [str(plain), "--rank", "0", "--world-size", "4", "-v"]
    assert multiproc.command(given, 3, 4)[1:] == [str(plain), "--rank", "3", "--world-size", "4", "-v"]
    assert multiproc.command(["-m", "package.module"], 0, 2)[1:] == ["-m", "package.module"]
    assert multiproc.world_size(given) == 4


def test_number_of_processes(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert multiproc.world_size(["script.py"]) == 8
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert multiproc.world_size(["script.py"]) == 1
    assert "WORLD_SIZE=N" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert multiproc.world_size(["script.py"]) == 4
    monkeypatch.setenv("WORLD_SIZE", "0")
    assert multiproc.main(["script.py"]) == 2
    assert multiproc.main([]) == 2 and "usage" in capsys.readouterr().out


def test_addresses(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    found = multiproc.environment(1, 2, 1234)
    wanted = dict(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    wanted |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="1234", OMP_NUM_THREADS="1")
    assert wanted.items() <= found.items()
    assert "OMP_NUM_THREADS" not in multiproc.environment(0, 1, 1234)
    monkeypatch.setenv("MASTER_PORT", "4321")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = multiproc.environment(0, 2, 1234)
    assert found["MASTER_PORT"] == "4321" and found["OMP_NUM_THREADS"] == "7"
