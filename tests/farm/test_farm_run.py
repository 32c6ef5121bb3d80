"""A plan is run on Dask: what is stored is not made again, faults are told by name, and a farm that was killed
goes on to the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("distributed")

from build_matrix import REPOSITORY
from build_matrix.errors import FarmError
from build_matrix.farm import cluster, plan, steps
from build_matrix.farm.steps import Step
from build_matrix.parts import host_library
from build_matrix.store import Store, WorkUnit

KILLS = int(os.environ.get("APEX_FARM_KILLS", "5"))  # 50 before a release
# Host sources that compile in a fraction of a second.
SMALL = ["executor", "status", "parallel", "cpu_level", "multi_tensor", "driver_hip", "driver", "launch"]
OBJECTS = [str(path.relative_to(REPOSITORY)) for path in host_library.sources() if path.stem in SMALL]


def object_plan():
    return plan.Plan(tuple(Step("object", source, (source,)) for source in OBJECTS))


@pytest.fixture(scope="module")
def client():
    with cluster.local(2, processes=False) as client:
        yield client


@pytest.fixture
def fakes(monkeypatch):
    """Steps of kind `fake` write their name, unless they are told to fail; `calls` says which were made."""
    calls = []

    def unit(store, name, fault=None):
        def make(folder):
            calls.append(name)
            if fault:
                raise fault
            (folder / "out").write_text(name)

        return WorkUnit("fake", name, {}, make)

    monkeypatch.setitem(steps.UNITS, "fake", unit)
    return calls


def fake(name, *needs, fault=None):
    return Step("fake", name, (name, *([fault] if fault else [])), tuple(f"fake {need}" for need in needs))


def test_objects_are_made_once(client, tmp_path):
    store, told = Store(tmp_path), []
    first = cluster.run(object_plan(), client, store, told.append)
    again = cluster.run(object_plan(), client, store)
    assert [done.name for done in first] == OBJECTS == [done.name for done in again]
    assert sorted(done.name for done in told) == sorted(OBJECTS)
    assert not any(done.stored for done in first) and all(done.stored for done in again)
    assert len(store.journal()) == len(OBJECTS)
    assert all((store.output(done.kind, done.key) / "unit.json").is_file() for done in first)


def test_a_fault_is_told_once_and_the_rest_is_made(client, tmp_path, fakes):
    graph = [
        fake("a"),
        fake("b", fault=OSError("the compiler went away")),
        fake("c", "b"),
        fake("d", "c"),
        fake("e", "a"),
        fake("f", fault=steps.BuildError("no such arch")),
    ]
    with pytest.raises(FarmError) as fault:
        cluster.run(plan.Plan(tuple(graph)), client, Store(tmp_path))
    assert sorted(fault.value.failures) == [
        ("fake b", "OSError: the compiler went away"),
        ("fake f", "no such arch"),
    ]
    assert fault.value.waiting == 2 and "2 steps that need them were not run" in str(fault.value)
    assert sorted(fakes) == ["a", "b", "e", "f"]
    assert sorted(line["name"] for line in Store(tmp_path).journal()) == ["a", "e"]


def test_a_step_runs_after_its_needs(client, tmp_path, fakes):
    graph = [fake("a"), fake("b", "a"), fake("c", "b"), fake("d", "a"), fake("e", "c", "d")]
    cluster.run(plan.Plan(tuple(graph)), client, Store(tmp_path))
    assert fakes.index("a") < fakes.index("b") < fakes.index("c") < fakes.index("e") > fakes.index("d")


def test_a_worker_with_another_checkout_is_refused(client, tmp_path, fakes, monkeypatch):
    answers = iter(["planned"])
    monkeypatch.setattr(steps, "checkout_digest", lambda: next(answers, "changed since"))
    with pytest.raises(FarmError, match="the checkout of this worker .* is changed sinc, the plan's planned"):
        cluster.run(plan.Plan((fake("a"),)), client, Store(tmp_path))
    assert fakes == []


def test_a_wheel_of_other_compilers_is_refused(tmp_path):
    words = f"object x is not in {tmp_path} as .* compilers of its workers differ. `nox -s toolchain` shows"
    with pytest.raises(steps.BuildError, match=words):
        steps._Stored(Store(tmp_path)).run([WorkUnit("object", "x", {}, lambda folder: None)])


def test_the_digest_of_the_checkout_sees_what_units_read(tmp_path, monkeypatch):
    for name in ("csrc/device/a.cu", "apex/__init__.py", "version.txt", "apex/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(steps, "REPOSITORY", tmp_path)
    seen = {steps.checkout_digest()}
    (tmp_path / "apex/__pycache__/x.pyc").write_text("2")
    assert seen == {steps.checkout_digest()}
    for name in ("csrc/device/a.cu", "apex/__init__.py", "version.txt"):
        (tmp_path / name).write_text("2")
        seen.add(steps.checkout_digest())
    assert len(seen) == 4


# ---- kill -9 ------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from build_matrix.farm import cluster
from build_matrix.store import Store
from tests.farm.test_farm_run import object_plan
if __name__ == "__main__":
    with cluster.local(2) as client:
        print("begins", flush=True)
        cluster.run(object_plan(), client, Store(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "farm.py"
    path.write_text(PROGRAM)
    return path


def start(program, store):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "APEX_STORE": str(store)}
    return subprocess.Popen(
        [sys.executable, str(program), str(store)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def outputs(store):
    """Every complete output: its folder and the bytes of its files."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.glob("object/*/*"))
        if path.name != "unit.json" and not path.parent.name.startswith(".")
    }


@pytest.fixture(scope="module")
def uninterrupted(program, tmp_path_factory):
    """(outputs, seconds) of a farm that nothing disturbs."""
    store = tmp_path_factory.mktemp("uninterrupted")
    process = start(program, store)
    assert process.stdout.readline() == "begins\n"
    begun = time.monotonic()
    assert process.wait(120) == 0
    return outputs(store), time.monotonic() - begun


@pytest.mark.kills
@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_farm_goes_on_to_the_same_bytes(program, uninterrupted, client, tmp_path, number):
    wanted, seconds = uninterrupted
    process = start(program, tmp_path)
    assert process.stdout.readline() == "begins\n"
    # One kill in each part of the time it takes, at a random moment of that part.
    time.sleep(seconds * (number + random.Random(number).random()) / KILLS)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert set(outputs(tmp_path).items()) <= set(wanted.items())  # whole outputs only, and the right ones
    cluster.run(object_plan(), client, Store(tmp_path))  # the plan goes on, in another process
    assert outputs(tmp_path) == wanted
    keys = [line["key"] for line in Store(tmp_path).journal()]
    assert len(set(keys)) == len({Path(name).parent for name in wanted})
    assert not list(tmp_path.glob("object/.partial-*")), "leftovers of the killed farm"
