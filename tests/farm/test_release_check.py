"""The list of what a release must pass: every outcome is told as it was, and a stopped list goes on."""

import json
import sys
import types
from pathlib import Path

import pytest

from build_matrix.check import release_check
from build_matrix.check.release_check import FAILED, NOT_RUN, PASSED, Check
from build_matrix.spec import identity, matrix
from build_matrix.toolchains import pythons

SAY = "import sys; print('first'); print(sys.argv[1]); sys.exit(int(sys.argv[2]))"


def check(name, code=0, **more):
    return Check(name, (sys.executable, "-c", SAY, f"says {name}", str(code)), **more)


@pytest.fixture
def run(tmp_path):
    def run(*wanted, **options):
        told = []
        found = release_check.run(tmp_path, wanted=wanted, tell=lambda c, o: told.append(c.name), **options)
        return {name: outcome.state for name, outcome in found.items()}, told

    return run


def test_what_failed_and_what_could_not_run_are_told_apart(run, tmp_path):
    wanted = check("a"), check("b", 1), check("c", 3), check("d", 2, after="a"), check("e", after="c")
    states, _ = run(*wanted)
    assert states == {"a": PASSED, "b": FAILED, "c": NOT_RUN, "d": FAILED, "e": NOT_RUN}
    written = json.loads((tmp_path / release_check.RESULT).read_text())["checks"]
    assert written["b"]["says"] == "says b" and written["e"]["says"] == "c: not run"
    assert (tmp_path / "b.log").read_text() == "first\nsays b\n" and not (tmp_path / "e.log").exists()


def test_it_goes_on_where_it_was_stopped(run, monkeypatch, tmp_path):
    run(check("a"), check("b", 1))
    again, _ = run(check("a", 1), check("b"))  # what passed is not run again, what failed is
    assert again == {"a": PASSED, "b": PASSED}
    assert run(check("a", 1), check("b"), again=True)[0] == {"a": FAILED, "b": PASSED}
    run(check("a"), check("b"))
    states, told = run(check("a"), check("b"), only=("b",))
    assert told == ["b"] and states == {"a": PASSED, "b": PASSED}
    monkeypatch.setattr(release_check, "_state", lambda: {"of": "other sources"})
    assert run(check("a", 1))[0] == {"a": FAILED}


SKIPPED = "pytestmark = pytest.mark.skip(reason='no engine')\n"
PASSES, FAILS = "def test_a(): pass\n", "def test_b(): assert 0\n"


@pytest.mark.parametrize(
    ("text", "state", "says"),
    [
        (f"{PASSES}@pytest.mark.skip(reason='no card')\n{FAILS}", PASSED, "1 passed; 1 not run: no card"),
        (f"{SKIPPED}{PASSES}", NOT_RUN, "0 passed; 1 not run: no engine"),
        (f"{PASSES}{FAILS}", FAILED, "1 failed, 1 passed"),
    ],
)
def test_tests_that_did_not_run_are_not_shown_as_passed(tmp_path, text, state, says):
    file = tmp_path / "test_it.py"
    file.write_text(f"import pytest\n{text}\n")
    wanted = Check("of tests", (*release_check.PYTEST, str(file)))
    (outcome,) = release_check.run(tmp_path, wanted=[wanted]).values()
    assert outcome.state == state and says in outcome.says


def test_a_pytest_that_breaks_is_no_missing_card(tmp_path):
    """Both end with 3."""
    (tmp_path / "conftest.py").write_text("def pytest_runtestloop(session): raise KeyError('broken')\n")
    (tmp_path / "test_it.py").write_text("def test_a(): pass\n")
    wanted = Check("of tests", (*release_check.PYTEST, str(tmp_path)))
    (outcome,) = release_check.run(tmp_path, wanted=[wanted]).values()
    assert outcome.state == FAILED


def test_a_star_is_the_file_that_an_earlier_check_made(tmp_path):
    (tmp_path / "apex_cpu-1-cp311.whl").write_text("")
    command = ("verify", str(tmp_path / "apex_cpu-*.whl"), str(tmp_path / "none-*.whl"))
    expanded = list(release_check._expanded(command))
    assert expanded == ["verify", str(tmp_path / "apex_cpu-1-cp311.whl"), str(tmp_path / "none-*.whl")]


def test_the_list_has_every_tier_and_cell_and_its_commands_exist():
    from build_matrix.__main__ import main

    found = {check.name: check for check in release_check.checks()}
    tiers = {f"{tier}({cell})" for tier in ("L0", "L1") for cell in matrix.load().cells()}
    assert tiers | {"emulated", "release", "quickstart"} <= set(found)
    for each in found.values():
        assert not each.after or each.after in found
        if "-m" not in each.command:
            assert Path(each.command[1]).is_file()
            continue
        words = each.command[each.command.index("-m") + 1 :]
        if words[0] == "build_matrix":
            command = main.get_command(None, words[1])
            command.make_context(words[1], list(words[2:]))  # raises for what it does not take


def test_every_platform_of_the_matrix_is_verified_and_loaded(monkeypatch, tmp_path):
    """Report: wheels for aarch64 and Windows were in the release and in no check."""
    axes, python = matrix.load(), pythons.own_tag()
    found = {check.name: check for check in release_check.checks()}
    wheels = [word.rpartition("/")[2] for word in found["verify"].command if word.endswith(".whl")]
    of_platforms = [a for p in axes.platforms for a in p.accelerators if not axes.accelerator(a).pure]
    assert len(wheels) == len(of_platforms) + sum(a.pure for a in axes.accelerators)
    for name in (
        f"apex_cpu-{identity.version()}+cpu-{python}-*_x86_64.whl",
        f"apex_cuda-{identity.version()}+cu130-{python}-*_aarch64.whl",
        f"apex_cuda-{identity.version()}+cu130-py3-none-win_amd64.whl",
        f"apex_npu-{identity.version()}+npu-py3-none-any.whl",
    ):
        assert name in wheels
    assert {f"loads, {p.name}" for p in axes.platforms} - set(found) == {f"loads, {matrix.NATIVE}"}
    emulated = found["loads, linux_aarch64"]
    assert emulated.after == "release" and Path(emulated.command[1]).is_file()
    monkeypatch.setenv("PATH", str(tmp_path))  # no qemu
    verdicts = release_check.run(tmp_path, wanted=[check("release"), emulated])
    assert verdicts[emulated.name].state == NOT_RUN and "qemu" in verdicts[emulated.name].says


def test_the_tree_has_what_the_tests_look_at_and_the_packs_of_cards_that_are_here(monkeypatch):
    """The packs of all archs together are more than any wheel holds."""
    devices = [types.SimpleNamespace(arch=arch) for arch in ("sm_89", "sm_89", "sm_999", "sm_90")]
    monkeypatch.setattr(release_check, "torch_devices", lambda: devices)
    assert release_check._archs() == [*matrix.load().tested(), "sm_89"]
    assert {p.arch.name for p in matrix.load().packs if p.emulated} < set(matrix.load().tested())


def test_every_tier_of_a_card_has_its_session():
    pytest.importorskip("nox")
    import noxfile

    for session in (noxfile.L0, noxfile.L1):
        assert [str(each) for each in session.parametrize] == matrix.load().cells()


def test_a_check_is_shown_as_one_types_it():
    (kills,) = [check for check in release_check.checks() if "50 kills" in check.name]
    assert release_check.words(kills) == (
        "APEX_FARM_KILLS=50 python -m pytest -q -p no:cacheprovider -n auto --dist loadfile tests/farm "
        "tests/containers -m 'not container'"
    )


def test_tests_run_under_other_defaults_of_torch():
    """bfloat16, float16, float64 and meta, each with all that is marked; nothing of it needs a card."""
    found = {c.variables: c for c in release_check.everything() if c.name.startswith("L0 by default")}
    dtypes = [(("APEX_TESTS_DEFAULT_DTYPE", name),) for name in ("bfloat16", "float16", "float64")]
    assert list(found) == [*dtypes, (("APEX_TESTS_DEFAULT_DEVICE", "meta"),)]
    commands = {c.command for c in found.values()}
    assert commands == {
        (*release_check.PYTEST, *release_check.SPREAD, "tests/L0", "-m", release_check.UNDER_DEFAULTS)
    }
    assert all(c.after == "tree" for c in found.values())


def test_it_has_every_package_that_the_tests_have(monkeypatch):
    """A test whose package is not there does not run."""
    pytest.importorskip("nox")
    import noxfile

    groups, session = [], types.SimpleNamespace(posargs=["-"], run=lambda *arguments, **options: None)
    monkeypatch.setattr(noxfile, "prepare", lambda session, *names: groups.append(set(names)))
    monkeypatch.setattr(noxfile, "farm", lambda session, *arguments: None)
    noxfile.tests(session)
    noxfile.tests_all(session)
    noxfile.release_check(session)
    of_tests, of_all, of_release = groups
    assert "variants" in of_tests and of_tests == of_all <= of_release


def test_everything_is_part_of_a_release():
    names = [check.name for check in release_check.everything()]
    assert [check.name for check in release_check.checks()][: len(names)] == names
    assert {"L0(cpu)", "L1(cpu)", "emulated", "containers", "kernels on the executor"} < set(names)
    assert any("kills" in name for name in names)


def test_what_is_not_run_this_time_is_not_forgotten(run, tmp_path):
    def kept():
        said = json.loads((tmp_path / release_check.RESULT).read_text())["checks"]
        return {name: outcome["state"] for name, outcome in said.items()}

    run(check("a"), check("b"), check("c"))
    run(check("a"), check("b"), check("c"), again=True, only=("b",))
    assert kept() == {"a": PASSED, "b": PASSED, "c": PASSED}

    def stop(check, outcome):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        release_check.run(tmp_path, wanted=[check("new"), check("c")], tell=stop)
    release_check.run(tmp_path, wanted=[check("new")])
    assert kept() == {"a": PASSED, "b": PASSED, "c": PASSED, "new": PASSED}


@pytest.mark.parametrize("name", ["README.md", "setup.py", "docs/build.md"])
def test_outcomes_are_of_all_that_goes_into_a_wheel_or_is_tested(monkeypatch, name):
    changed = release_check.REPOSITORY / name
    before, of_file = release_check._state(), release_check.digest.of_file
    monkeypatch.setattr(release_check.digest, "of_file", lambda p: "other" if p == changed else of_file(p))
    assert release_check._state() != before
