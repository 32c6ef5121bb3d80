"""A scheduler and two workers, each a process of its own, as a fleet has them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("distributed")

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.farm import cluster, plan
from build_matrix.farm.steps import Step
from build_matrix.parts import host_library
from build_matrix.store import Store
from build_matrix.store.remote import Remote
from build_matrix.toolchains.host_compiler import find
from tests.farm.test_farm_run import OBJECTS, SMALL, object_plan

PATIENCE = 60.0


def start(*command, **variables):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
    return found


class Fleet:
    """Starts and ends the processes of a cluster."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, {}
        self.file = folder / "scheduler.json"
        command = ["distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        self.processes["scheduler"] = start(*command, "--scheduler-file", self.file)
        wait_for(lambda: self.file.is_file() and self.file.read_text().rstrip().endswith("}"))
        self.address = json.loads(self.file.read_text())["address"]

    def worker(self, name: str, resources: str = "", **variables):
        command = [
            "distributed.cli.dask_worker",
            self.address,
            "--name",
            name,
            "--nthreads",
            "1",
            "--no-nanny",
        ]
        command += ["--no-dashboard", "--preload", Path(__file__).with_name("where_step.py")]
        command += ["--local-directory", self.folder / name]
        command += ["--resources", resources] if resources else []
        self.processes[name] = start(*command, **variables)
        return self.processes[name]

    def stop(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.stop()


def compiling(process) -> bool:
    """Whether a process has children: the compiler."""
    tasks = Path(f"/proc/{process.pid}/task")
    return any((task / "children").read_text().strip() for task in tasks.iterdir())


@pytest.mark.kills
def test_a_worker_that_is_killed_loses_nothing_and_nothing_is_made_twice(fleet, tmp_path):
    slow = tmp_path / "slow-g++"  # so that there is a middle to be killed in
    slow.write_text(f'#!/bin/sh\ncase "$1" in -c) sleep 0.4;; esac\nexec {find().path} "$@"\n')
    slow.chmod(0o755)
    store = Store(tmp_path / "store")
    one, two = (fleet.worker(name, CXX=str(slow), APEX_STORE=str(store.root)) for name in ("one", "two"))
    told = []

    def tell(done):
        told.append(done)
        # `two` has made something, and is at something.
        if two.poll() is None and any(line["by"].endswith(f" {two.pid}") for line in store.journal()):
            wait_for(lambda: compiling(two) or len(store.journal()) == len(OBJECTS))
            two.send_signal(signal.SIGKILL)
            two.wait()

    with cluster.existing(fleet.address) as client:
        client.wait_for_workers(2, timeout=PATIENCE)
        assert cluster.slots(client) == 2
        results = cluster.run(object_plan(), client, store, tell)
    assert two.returncode == -signal.SIGKILL and one.poll() is None
    assert [done.name for done in results] == OBJECTS  # nothing is lost
    made = store.journal()
    assert len({line["key"] for line in made}) == len(made) == len(OBJECTS)  # nothing was made twice
    assert {line["by"].split()[1] for line in made} == {str(one.pid), str(two.pid)}
    assert all(
        (store.output(done.kind, done.key) / f"{Path(done.name).stem}.o").is_file() for done in results
    )
    assert not list(store.root.glob("object/.partial-*"))


def test_steps_go_where_their_card_is(fleet, tmp_path):
    store = Store(tmp_path / "store")
    cards = {"sm_90": "hopper", "gfx942": "instinct"}
    for card, name in cards.items():
        fleet.worker(name, f"{card}=1")
    wanted = [Step("where", f"{card} {n}", (f"{card} {n}",), (), card) for n in range(4) for card in cards]
    free = [Step("where", "anywhere", ("anywhere",))]
    with cluster.existing(fleet.address) as client:
        client.wait_for_workers(2, timeout=PATIENCE)
        assert cluster.offered(client) == set(cards)
        for done in cluster.run(plan.Plan(tuple(wanted + free)), client, store):
            said = (store.output(done.kind, done.key) / "worker").read_text()
            assert said == cards.get(done.name.split()[0], said)
        with pytest.raises(
            BuildError, match="no worker of the cluster offers gfx950: .* --resources gfx950=1"
        ):
            cluster.run(plan.Plan((Step("where", "x", ("x",), (), "gfx950"),)), client, store)


@pytest.mark.parametrize("where", ["folder", "s3"])
def test_the_command_runs_a_plan_on_it_with_a_shared_store(
    where, request, fleet, objects_of_checkout, tmp_path
):
    """Each worker has a folder of its own; what they make, and what was made before, meets in the shared one."""
    shared = f"file://{tmp_path}/shared"
    if where == "s3":
        shared = f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    for source, folder in objects_of_checkout.items():  # all but what compiles at once
        if source.stem not in SMALL:
            Remote(shared).give("object", folder.name, folder)
    for name in ("one", "two"):
        fleet.worker(name, APEX_STORE=str(tmp_path / f"store-{name}"))
    command = [
        sys.executable,
        "-m",
        "build_matrix",
        "farm",
        "--only",
        "library",
        "--platform",
        "linux_x86_64",
        "--scheduler",
        fleet.address,
    ]
    environment = os.environ | {"APEX_STORE": str(tmp_path / "store-client")}
    done = subprocess.run(
        [*command, "--store", shared], cwd=REPOSITORY, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(host_library.sources()) + 1} steps on" in done.stderr
    system, place = Remote(shared).system, Remote(shared).path
    system.invalidate_cache()
    objects = {Path(name).name.partition(".")[0] for name in system.glob(f"{place}/object/*.tar.gz")}
    made = [line for name in ("one", "two") for line in Store(tmp_path / f"store-{name}").journal()]
    assert len({line["key"] for line in made}) == len(made)
    assert {line["key"] for line in made if line["kind"] == "object"} <= objects
    assert {line["name"] for line in made} >= {*OBJECTS, "libapex.so"}
    assert len(system.glob(f"{place}/library/*.tar.gz")) == 1


def test_a_machine_may_have_the_card_itself():
    with cluster.local(3, processes=False, offers=["sm_90"]) as client:
        assert cluster.offered(client) == {"sm_90"} and cluster.slots(client) == 3


def test_a_scheduler_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(cluster, "PATIENCE", "1s")
    with (
        pytest.raises(BuildError, match="no Dask scheduler answers at tcp://127.0.0.1:9"),
        cluster.existing("tcp://127.0.0.1:9"),
    ):
        pass
