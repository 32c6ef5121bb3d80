"""What runs on a change: files whole whose sources changed, of the rest a slice that moves with the commit, within a
limit; what is left out is counted, and what does not run for a new reason is a fault."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import types

import pytest
from click.testing import CliRunner

from build_matrix import REPOSITORY
from build_matrix.__main__ import main
from build_matrix.check import affected, cards, junit, rings, skips
from build_matrix.check.rings import plan
from build_matrix.errors import BuildError
from build_matrix.spec import matrix
from build_matrix.spec.registry import device_units
from tests.farm import test_provenance

KNOWN = {f"tests/test_{n}.py": [0.0, float(n)] for n in range(1, 11)}  # 55 CPU seconds


def cost(made):
    """CPU seconds of a plan."""
    whole = sum(sum(KNOWN[name]) for name in made.whole)
    return whole + sum(ring for name, (_, ring) in KNOWN.items() if name not in made.whole) / made.slice[1]


def test_slices_together_are_everything_and_each_fits():
    made = [plan((), KNOWN, count, 4, limit=20.0) for count in range(7, 10)]
    assert [m.slice for m in made] == [(1, 3), (2, 3), (0, 3)] and not any(m.whole for m in made)
    assert all(cost(m) <= 20 for m in made)
    assert plan((), KNOWN, 7, 4, limit=100.0).slice == (0, 1)


def test_changed_files_run_whole_as_far_as_they_fit():
    few = plan({"tests/test_2.py", "tests/gone.py"}, KNOWN, 5, 4, limit=20.0)
    assert few.whole == ("tests/test_2.py",) and cost(few) <= 20
    for count in range(10):
        many = plan(set(KNOWN), KNOWN, count, 4, limit=30.0)
        assert cost(many) <= 30 and sum(sum(KNOWN[n]) for n in many.whole) <= 30 * (1 - rings.SHARE_OF_REST)
        assert many.whole[0] == sorted(KNOWN)[count]  # another file is first with every commit
    assert {
        name for count in range(10) for name in plan(set(KNOWN), KNOWN, count, 4, limit=30.0).whole
    } == set(KNOWN)


def test_a_file_with_costly_fixtures_is_in_one_slice():
    known = KNOWN | {"tests/test_ranks.py": [30.0, 1.0], "tests/test_cheap.py": [1.0, 1.0]}
    made = plan((), known, 3, 4, limit=20.0)
    assert made.together == ("tests/test_ranks.py",) and made.durations["tests/test_ranks.py"] == 31.0
    assert made.slice[1] == -(-(55 + 31 + 1) // 19)  # the cheap one's fixture is in all of them


def test_units_of_packs_take_turns():
    every = {path.stem for path in device_units()}
    seen = set()
    for count in range(100, 100 + -(-len(every) // rings.UNITS)):
        chosen = rings.units((), count)
        assert len(chosen) <= rings.UNITS + 1 and rings.ALWAYS in chosen
        seen |= set(chosen)
    assert seen == every
    assert "rope" in rings.units({"rope"}, 3)
    assert test_provenance.UNIT == rings.ALWAYS


def test_every_file_of_tests_has_a_cost():
    known = rings.durations()
    assert "tests/farm/test_rings.py" in known and all(len(seconds) == 2 for seconds in known.values())
    measured = json.loads(rings.DURATIONS.read_text())
    gone = [name for name in measured if not (REPOSITORY / name).is_file()]
    assert not gone, f"tests/durations.json knows files that are gone: {gone}"


@pytest.fixture
def commands(monkeypatch):
    """Commands that would run, on a machine without a GPU."""
    ran = []
    monkeypatch.setattr(rings, "torch_devices", lambda: [])

    def run(command, **options):
        ran.append(" ".join(map(str, command)).partition(" -m ")[2])
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(rings.subprocess, "run", run)
    return ran


@pytest.mark.parametrize(
    "file", ["tests/L0/test_rms_norm.py", "tests/L0/test_rope.py::test_huge", "tests/simt"]
)
def test_a_file_on_its_own_builds_no_pack(commands, file):
    assert rings.given([file, "-q"], print) == 0
    assert commands == ["build_matrix tree --available", f"pytest {file} -q"]


@pytest.mark.parametrize("words", [["tests/farm/test_wheel.py"], ["tests"], ["-k", "wheel"]])
def test_tests_of_wheels_have_a_pack_to_look_at(commands, words):
    rings.given(words, print)
    archs = " ".join(f"--arch={arch}" for arch in matrix.load().tested())
    assert commands[0] == f"build_matrix tree --available {archs} --unit={rings.ALWAYS}"


def test_a_card_that_is_here_has_its_whole_pack(commands, monkeypatch):
    devices = [types.SimpleNamespace(arch=arch) for arch in ("sm_90", "sm_90", "sm_999")]
    monkeypatch.setattr(rings, "torch_devices", lambda: devices)
    rings.build(print, ["rope"])
    assert commands == ["build_matrix tree --available --arch=sm_90"]


def test_a_unit_that_is_none_is_named():
    done = CliRunner().invoke(main, ["tree", "--unit", "ropes"])
    assert done.exit_code == 2 and "ropes is no unit of csrc/device" in done.output


# ---- the side of pytest ----------------------------------------------------------------------------------------

SMALL = """
import pytest

@pytest.mark.parametrize("n", range(40))
def test_many(n): pass

@pytest.mark.warp64
def test_wide(): pass

@pytest.mark.parametrize("level", [pytest.param(n, marks=pytest.mark.cpu_level(level=n)) for n in (3, 4)])
def test_levels(level): pass
"""


@pytest.fixture
def run(tmp_path):
    """Two files of tests by a plan; returns the cases."""
    (tmp_path / "tests").mkdir()
    for name in ("tests/conftest.py", "tests/rings.py", "tests/torch_defaults.py", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for name in ("a", "b"):
        (tmp_path / f"tests/test_{name}.py").write_text(SMALL)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
        "--dist",
        "loadfile",
    ]
    command += ["--junitxml=run.xml", "--ring=plan.json", "--cpu-seconds=seconds.json"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}

    def run(**facts):
        made = rings.Plan(
            **{"whole": (), "slice": (0, 1), "cpu_level": 4, "together": (), "durations": {}} | facts
        )
        (tmp_path / "plan.json").write_text(json.dumps(dataclasses.asdict(made)))
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, 5), done.stdout
        return junit.read(tmp_path / "run.xml")

    return run


def names(cases, outcome=junit.PASSED):
    return {(case.module, case.name) for case in cases if case.outcome == outcome}


def test_the_slices_of_pytest_do_not_overlap(run, tmp_path):
    parts = [names(run(slice=(k, 3))) for k in range(3)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 2 * 41  # without warp64 and the lower level
    assert min(map(len, parts)) > 10
    seconds = json.loads((tmp_path / "seconds.json").read_text())
    assert set(seconds) == {"tests/test_a.py", "tests/test_b.py"}


def test_a_file_that_is_kept_together_runs_in_one_slice(run):
    parts = [names(run(slice=(k, 2), together=("tests/test_a.py",))) for k in range(2)]
    counts = [len([name for module, name in part if module == "tests.test_a"]) for part in parts]
    assert sorted(counts) == [0, 41]


def test_what_a_plan_leaves_out_is_counted(run):
    cases = run(slice=(1, 4), whole=("tests/test_b.py",))
    ran = names(cases)
    assert len([name for module, name in ran if module == "tests.test_b"]) == 41
    reasons = junit.reasons(cases)
    assert (
        reasons["not in the ring of a change: warp64"]
        == reasons["not in the ring of a change: cpu_level"]
        == 2
    )
    assert reasons["in another slice than 2 of 4"] == 41 - len([m for m, _ in ran if m == "tests.test_a"])
    assert len(cases) == 2 * 43


# ---- what was changed ------------------------------------------------------------------------------------------


def test_an_op_s_files_lead_to_its_tests():
    found = affected.tests(["csrc/device/rope.cu"])
    assert {"tests/L0/test_rope.py", "tests/simt/test_rope.py", "tests/L0/test_fused_rope.py"} <= found
    assert "tests/simt/test_xentropy.py" not in found and affected.units(["csrc/device/rope.cu"]) == {"rope"}
    assert affected.units(["csrc/device/gpu.h"]) == {path.stem for path in device_units()}


def test_a_module_leads_to_the_tests_that_import_it():
    assert "tests/L0/test_fused_adam.py" in affected.tests(["apex/optimizers/fused_adam.py"])
    assert "tests/farm/test_store.py" in affected.tests(["build_matrix/store/store.py"])
    assert "tests/L0/test_rope.py" not in affected.tests(["build_matrix/store/store.py"])
    assert "tests/L0/test_layer_norm.py" in affected.tests(["tests/L0/norms.py"])
    of_a_test = affected.tests(["tests/L0/test_rope.py"])  # and who reads every file of the folder
    assert "tests/L0/test_rope.py" in of_a_test and "tests/L0/test_layer_norm.py" not in of_a_test


def test_everything_counts_where_no_commit_is_known(monkeypatch):
    assert len(affected.tests(affected.everything())) > 150
    monkeypatch.setattr(rings, "git", lambda *arguments: None)
    assert rings.base() is None and rings.number() == 0


# ---- what may not run ------------------------------------------------------------------------------------------


def skipped(reason, count=1, **more):
    return [junit.Case("m", f"{reason} {n}", junit.SKIPPED, reason, **more) for n in range(count)]


def test_another_reason_or_more_of_one_is_a_fault(tmp_path):
    path = tmp_path / "accepted.toml"
    path.write_text('[[skip]]\nreason = "needs * GiB"\ntests = 2\n')
    assert not skips.faults(skipped("needs 4 GiB") + skipped("needs 8 GiB"), path)
    assert not skips.faults(skipped("in another slice", 9, left_out=True), path)
    (more,) = skips.faults(skipped("needs 4 GiB", 3), path)
    assert more == "3 tests did not run, where accepted.toml accepts 2: needs * GiB"
    (new,) = skips.faults(skipped("no compiler", 2), path)
    assert new == "2 tests did not run for a reason that accepted.toml does not accept: no compiler"


def test_no_accepted_reason_hides_a_missing_toolchain():
    for reason in (
        "no ROCm toolchain in x (APEX_ROCM_ROOT names it)",
        "no ROCm clang in x (APEX_ROCM_ROOT)",
        "no C compiler on this machine",
        "nvidia-cuda-nvrtc==13.0.88 cannot be had from PyPI here: x",
        "variant simt32: it does not compile",
        "no bindings: x",
    ):
        assert skips.faults(skipped(reason))


def test_ci_stops_where_a_toolchain_cannot_be_had(tmp_path):
    """As another user than root, with nothing on the path but a Python that has nox."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("dirname", "bash"):
        (tools / name).symlink_to(shutil.which(name))
    (tools / "id").write_text("#!/bin/sh\necho 1000\n")
    (tools / "python").write_text("#!/bin/sh\nexit 0\n")
    for name in ("id", "python"):
        (tools / name).chmod(0o755)
    environment = {"PATH": str(tools), "PYTHON": "python", "APEX_ROCM_ROOT": "/opt/rocm"}
    done = subprocess.run(["bash", REPOSITORY / ".ci/run"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("git is needed and is not here")


# ---- cards -----------------------------------------------------------------------------------------------------


def test_a_card_is_looked_for_before_anything_is_installed(tmp_path):
    assert cards.why_none("L0", "cpu", tmp_path) == ""
    assert cards.why_none("L0", "sm_90", tmp_path).startswith("no NVIDIA GPU is here")
    assert cards.why_none("L1", "gfx942", tmp_path).startswith("no AMD GPU is here")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert cards.why_none("L0", "sm_90", tmp_path) == "" and cards.why_none("L0", "gfx942", tmp_path)
    with pytest.raises(BuildError, match="no pack is made for sm_1"):
        cards.why_none("L0", "sm_1", tmp_path)


def test_the_emulator_is_looked_for_first(monkeypatch):
    monkeypatch.setenv("APEX_ROCM_ROOT", "/nonexistent")
    assert cards.why_none("emulated", "cpu") == "no ROCm clang in /nonexistent (APEX_ROCM_ROOT)"


def test_sessions_of_tiers_say_that_nothing_ran(monkeypatch):
    """And end as a failure, with nothing installed."""
    pytest.importorskip("nox")
    import noxfile

    said = []

    class Ended(Exception):
        pass

    class Session:
        posargs = ()

        def error(self, *words):
            said.extend(words)
            raise Ended

    monkeypatch.setattr(noxfile, "prepare", lambda *arguments: pytest.fail("installed"))
    monkeypatch.setattr(noxfile.cards, "why_none", lambda tier, cell: "" if cell == "cpu" else "no card")
    with pytest.raises(Ended):
        noxfile.run_tier(Session(), "L0", matrix.load().cells()[1])
    assert said == [f"L0({matrix.load().cells()[1]}): no card; nothing ran"]


def test_what_a_slice_took_is_of_its_slice_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(rings, "DURATIONS", tmp_path / "durations.json")
    rings.DURATIONS.write_text('{"tests/a.py": [1.0, 5.0], "tests/b.py": [0.0, 4.0]}')
    monkeypatch.setattr(rings, "durations", lambda: json.loads(rings.DURATIONS.read_text()))
    plan = {"whole": ["tests/a.py"], "together": [], "slice": [2, 10]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "tests.seconds.json").write_text(
        '{"tests/a.py": [0.0, 7.0, 1.0], "tests/b.py": [2.0, 0.5, 0.0]}'
    )
    rings.take([tmp_path / "tests.seconds.json"])
    taken = json.loads(rings.DURATIONS.read_text())
    assert (taken["tests/a.py"], taken["tests/b.py"]) == ([1.0, 7.0], [2.0, 5.0])
