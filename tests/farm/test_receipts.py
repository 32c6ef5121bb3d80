"""What a run of tests saw is written down, comes back from other machines, and counts for what it ran on alone."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from build_matrix import REPOSITORY
from build_matrix.check import junit, receipts, tiers
from build_matrix.errors import BuildError, ReceiptError
from build_matrix.parts import loads
from build_matrix.serve import compat, publish
from build_matrix.spec import identity, matrix
from build_matrix.store import foreign
from build_matrix.wheels import signing, wheel

HERE = identity.Source("c" * 64, "d" * 64)
PROBE = {
    "apex": "1.10.0+cu130",
    "machine": {
        "torch": {"version": "2.13.0+cu130"},
        "python": "cp311",
        "cuda_driver": "13.0",
        "devices": [
            {"platform": "cpu", "index": 0, "arch": "x86-64-v4", "name": ""},
            {"platform": "cuda", "index": 0, "arch": "sm_90", "name": "NVIDIA H200"},
        ],
    },
    "choices": [
        {"unit": unit, "device": device, "arch": arch, "taken": taken}
        for unit in ("rope", "xentropy")
        for device, arch, taken in (("cpu:0", "x86-64-v4", "cpu"), ("cuda:0", "sm_90", "sm_90"))
    ],
}
RUN = {"test_rope": ["ok", "ok", "no GPU"], "test_xentropy": ["ok"]}


def junit_file(path, run=RUN, broken=0):
    """A file as pytest writes it: "ok", "failed", or why a test did not run."""
    lines, counts = [], {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for module, outcomes in run.items():
        for number, outcome in enumerate(outcomes):
            inner = {"ok": "", "failed": "<failure message='x'/>"}.get(
                outcome, f"<skipped type='pytest.skip' message='{outcome}'/>"
            )
            counts["tests"] += 1
            counts["skipped"] += inner.startswith("<skipped")
            lines.append(f"<testcase classname='L0.{module}' name='test[{number}]'>{inner}</testcase>")
    said = " ".join(f"{key}='{value + (key == 'tests') * broken}'" for key, value in counts.items())
    path.write_text(f"<testsuites><testsuite name='pytest' {said}>{''.join(lines)}</testsuite></testsuites>")
    return path


@pytest.fixture
def make(tmp_path):
    """A receipt of this run, with what is named changed, sealed anew."""

    def make(run=RUN, cell="sm_90", tier="L0", probe=PROBE, **changed):
        found = receipts.make(tier, cell, probe, [junit_file(tmp_path / "run.xml", run)], HERE)
        return receipts.sealed(found | changed)

    return make


def test_a_receipt_says_what_ran_where(make):
    found = make()
    assert receipts.totals(found) == {"passed": 3, "failed": 0, "skipped": 1}
    assert found["not_run"] == {"no GPU": 1} and found["served"] == {"sm_90": 2}
    assert (found["card"], found["driver"]) == ("NVIDIA H200", "13.0")
    assert receipts.name(found) == "L0-sm_90-nvidia-h200-torch2.13-cp311.json"
    assert receipts.why_not(found, HERE) is None
    on_the_cpu = make(cell="cpu")
    assert (on_the_cpu["card"], on_the_cpu["served"]) == ("", {"cpu": 2})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"run": {"a": ["ok", "failed"]}}, "1 tests failed"),
        ({"narrowed": "rope"}, "it is of a part of the tests: rope"),
        ({"served": {"sm_90": 1, "jit": 1}}, "sm_90 did not serve every op: sm_90, jit did"),
        ({"served": {}}, "sm_90 did not serve every op: nothing did"),
        ({"source": {"compiled": "e" * 64, "python": "d" * 64}}, "it is of other sources (eeeeeeeeeeee, not"),
        ({"source": {"compiled": "c" * 64, "python": "e" * 64}}, "it is of other Python files (eeee"),
        ({"steps": {"probe": {"passed": True}, "same bits": {"passed": False}}}, "same bits failed"),
    ],
)
def test_why_a_receipt_does_not_count(make, tmp_path, changed, why):
    found = make(**changed)
    assert receipts.why_not(found, HERE).startswith(why)
    assert receipts.read(receipts.write(found, tmp_path / "receipt.json")) == found  # sound all the same


def test_a_wheel_s_receipt_counts_for_that_wheel_whatever_the_checkout_is(make):
    found = make(wheel={"name": "a.whl", "sha256": "f" * 64})
    other = identity.Source("0" * 64, "0" * 64)
    assert receipts.why_not(found, other) and receipts.why_not(found, other, ["e" * 64])
    assert receipts.why_not(found, other, ["f" * 64]) is None


def test_machine_code_on_the_emulator_does_not_depend_on_python(tmp_path):
    path = junit_file(tmp_path / "run.xml", {"a": ["ok"]})
    path.write_text(path.read_text().replace("test[0]", "test[emulated-gfx950-in_order]"))
    found = receipts.make("emulated", "gfx950", PROBE, [path], HERE)
    assert receipts.why_not(found, identity.Source("c" * 64, "other")) is None
    assert receipts.why_not(found, identity.Source("other", "d" * 64))
    with pytest.raises(ReceiptError, match=r"emulated\(gfx1100\): no test ran, .* none was chosen"):
        receipts.make("emulated", "gfx1100", PROBE, [path], HERE)


def test_where_nothing_ran_nothing_is_written(tmp_path):
    with pytest.raises(ReceiptError, match=r"L0\(sm_90\): no test ran, so nothing is written down: no GPU"):
        receipts.make("L0", "sm_90", PROBE, [junit_file(tmp_path / "a.xml", {"a": ["no GPU"]})], HERE)
    cut = junit_file(tmp_path / "cut.xml")
    cut.write_text(cut.read_text()[:-40])
    with pytest.raises(ReceiptError, match="cut.xml is cut, or no JUnit file"):
        receipts.make("L0", "sm_90", PROBE, [cut], HERE)
    with pytest.raises(ReceiptError, match="states 6 tests, 1 skipped, and holds 4, 1"):
        receipts.make("L0", "sm_90", PROBE, [junit_file(tmp_path / "b.xml", broken=2)], HERE)


def test_junit_as_pytest_writes_it(tmp_path, monkeypatch):
    """Failures of fixtures, which pytest counts in ways of its own, and expected failures."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.fixture\ndef bad():\n    yield\n    assert 0\n"
        "def test_a(bad): pass\ndef test_b(bad): assert 0\ndef test_c(): pass\n"
        "@pytest.mark.xfail\ndef test_d(): assert 0\ndef test_e(): pytest.skip('why')\n"
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={tmp_path}/x.xml"]
    subprocess.run([*command, tmp_path / "test_it.py"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    cases = junit.read(tmp_path / "x.xml")
    assert {case.name: case.outcome for case in cases} == dict(
        test_a="failed", test_b="failed", test_c="passed", test_d="skipped", test_e="skipped"
    )
    assert junit.reasons(cases) == {"expected to fail": 1, "why": 1}


# ---- coming back ---------------------------------------------------------------------------------------------


@pytest.fixture
def merge(tmp_path, make):
    """Merges a receipt, written as the text that `change` makes of it: (how many were taken, why not)."""
    calls = iter(range(100))

    def merge(change=lambda text: text, receipt=None):
        path = tmp_path / f"came-{next(calls)}" / "receipt.json"
        receipts.write(receipt or make(finished="2026-01-01T00:00:00+00:00"), path)
        path.write_text(change(path.read_text()))
        taken, refused = receipts.merge([path], tmp_path / "merged")
        return len(taken), "".join(map(str, refused))

    return merge


def test_a_receipt_comes_back_once(merge, tmp_path, make):
    assert merge() == (1, "")
    (kept,) = receipts.load(tmp_path / "merged")
    assert receipts.totals(kept)["passed"] == 3
    assert merge() == (
        0,
        "receipt.json: it is a duplicate: L0-sm_90-nvidia-h200-torch2.13-cp311.json holds it already",
    )
    taken, why = merge(receipt=make(finished="2025-12-31T00:00:00+00:00"))
    assert taken == 0 and "is of a later run (2026-01-01" in why
    failed = make({"a": ["ok", "failed"]}, finished="2026-01-02T00:00:00+00:00")
    assert merge(receipt=failed) == (1, "")  # the last run is what is known, the worse it is
    (kept,) = receipts.load(tmp_path / "merged")
    assert receipts.totals(kept)["failed"] == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text[:-80], "it is cut, or no JSON"),
        (lambda text: "", "it is cut, or no JSON"),
        (lambda text: "[]", "it is no receipt of format 1"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "it is no receipt of format 1"),
        (lambda text: text.replace('"cell"', '"sell"'), "it is cut, or no receipt: cell is missing"),
        (lambda text: text.replace('"passed": 2', '"passed": 200'), "it was changed after it was written"),
        (lambda text: text.replace("NVIDIA H200", "NVIDIA B200"), "it was changed after it was written"),
    ],
)
def test_what_is_cut_or_was_changed_is_named_and_left_out(merge, tmp_path, change, why):
    taken, said = merge(change)
    assert taken == 0 and said.startswith(f"receipt.json: {why}")
    assert receipts.load(tmp_path / "merged") == []


@pytest.mark.parametrize(
    "changed",
    [
        {"not_run": {}},
        {"not_run": {"no GPU": "1"}},
        {"tests": {"a": {"passed": 9}}},
        {"tests": {"a": {}, "b": None}},
        {"tests": {"a": {"passed": 9, "failed": -1, "skipped": 1}}},
        {"steps": {"probe": {}}},
        {"steps": ["probe"]},
    ],
)
def test_counts_that_contradict_each_other_are_named(merge, make, changed):
    taken, why = merge(receipt=make(**changed))
    assert taken == 0 and "its counts contradict each other" in why


@pytest.mark.parametrize("field", ["cell", "torch", "python"])
def test_no_receipt_names_a_file_elsewhere(make, tmp_path, field):
    path = tmp_path / "in/receipt.json"
    path.parent.mkdir()
    path.write_text(json.dumps(make(**{field: "../../2.13.x"})))
    taken, (error,) = receipts.merge([path], tmp_path / "merged")
    assert not taken and f"its {field} is no name" in str(error)


DEEP = '{"format": 1, "a": ' + "[" * 990 + "]" * 990 + "}"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"junit": [["x"]]}, "its junit is not what it should be"),
        ({"platform": 5}, "its platform is no name of one: 5"),
        ({"platform": True}, "its platform is no name of one: True"),
        ({"torch": "abc"}, "its torch is no name of one: 'abc'"),
        ({"python": "zzz"}, "its python is no name of one: 'zzz'"),
        ({"card": "x" * 300}, "its cell and card are too long for the name of a file"),
        ({"cell": "x" * 300}, "its cell and card are too long for the name of a file"),
        ({"tier": "L0\n"}, r"its tier is 'L0\\n'; there are emulated, L0, L1$"),
        ({"finished": "zzzz"}, "it ended at 'zzzz', which is no time"),
        (
            {"finished": "2026-13-01T00:00:00+00:00"},
            "it ended at '2026-13-01T00:00:00.00:00', which is no time",
        ),
        (
            {"finished": "9999-01-01T00:00:00+00:00"},
            "it ended at 9999-01-01T00:00:00.00:00, which is still to come",
        ),
        ({"card": "x\x1b[2J\nL0(sm_90): counts"}, r"its card is no line of text: 'x\\x1b\[2J"),
        ({"card": "\ud800"}, "its card is no line of text"),
        ({"narrowed": "x\x1b[2J"}, "its narrowed is no line of text"),
        ({"served": {"x\x1b[2J": 1}}, "its served is no line of text"),
        ({"served": {"cpu": [1]}}, "its counts contradict each other"),
        ({"steps": {"x\x1b[2J": {"passed": True}}}, "its steps is no line of text"),
        ({"source": {"compiled": "x\x1b[2J"}}, "its source is no line of text"),
        ({"source": {"compiled": [1]}}, "its source is no line of text"),
        ({"wheel": {}}, "its wheel is not what it should be"),
        ({"extra": float("nan")}, "it is cut, or no JSON: NaN is no number of JSON"),
        ({"extra": float("inf")}, "it is cut, or no JSON: Infinity is no number of JSON"),
    ],
)
def test_what_is_sealed_and_no_run_wrote_is_named(merge, make, changed, why):
    taken, said = merge(receipt=make(**changed))
    assert taken == 0 and re.match(f"receipt.json: {why}", said), said


def test_a_bad_digest_moves_no_cursor(merge, make):
    taken, said = merge(receipt=make() | {"digest": "\x1b[2J\n"})
    assert taken == 0 and said.endswith(r"it states '\x1b[2J\n'")
    assert str(ReceiptError("a\x1b\n", "b\x1b\n")) == "a\\x1b\\n: b\\x1b\n"


def test_a_bad_receipt_keeps_no_other_one_away(make, tmp_path):
    """Nor does anything beside it: lists in lists, a FIFO, a folder, a file by the name of JUnit that is none."""
    came = tmp_path / "came"
    came.mkdir()
    (came / "deep.json").write_text("[" * 200_000)
    (came / "dict.json").write_text(DEEP)
    (came / "large.json").write_bytes(b"1" * (foreign.LARGEST + 1))
    os.mkfifo(came / "fifo.json")
    (came / "folder.json").mkdir()
    (came / "x\x1b[2J.json").write_text("")
    (came / "a.xml").mkdir()
    os.mkfifo(came / "b.xml")
    receipts.write(make(), came / "good.json")
    taken, refused = receipts.merge(sorted(came.glob("*.json")), tmp_path / "merged")
    assert [receipts.totals(found)["passed"] for found in taken] == [3]
    said = {error.name: str(error) for error in refused}
    assert set(said) == {path.name for path in came.glob("*.json")} - {"good.json"}
    assert "nested too deep" in said["deep.json"] and "nested too deep" in said["dict.json"]
    assert "it is larger than 64 MB" in said["large.json"] and "\x1b" not in "".join(said.values())
    for name in ("fifo.json", "folder.json"):
        assert said[name] == f"{name}: it cannot be read: it is no regular file"
    assert len(receipts.load(came)) == 1  # list and compat read them, too


def test_one_of_a_run_that_is_still_to_come_is_replaced(merge, make, tmp_path):
    wrong = make(finished="9999-01-01T00:00:00+00:00")
    receipts.write(wrong, tmp_path / "merged" / receipts.name(wrong))
    assert merge() == (1, "")


def test_what_a_load_left_is_one_of_the_grades_or_does_not_count(tmp_path):
    file = loads.write("2.13.0", "cp311", "a", tmp_path)
    assert loads.grade("2.13.0", "cp311", "a", tmp_path) == loads.GRADE
    for text in ("[" * 200_000, DEEP, "[]", json.dumps({"grade": "L1 on everything", "bindings": "a"})):
        file.write_text(text)
        assert loads.grade("2.13.0", "cp311", "a", tmp_path) is None
    file.unlink()
    os.mkfifo(file)
    assert loads.grade("2.13.0", "cp311", "a", tmp_path) is None


def test_junit_that_no_pytest_wrote_is_named(tmp_path):
    path = junit_file(tmp_path / "run.xml")
    text = path.read_text()
    for told in ("[]", "{", "[" * 100_000, '{"x": 1}'):
        path.write_text(
            text.replace("<testcase", f"<property name='deselected' value='{told}'/><testcase", 1)
        )
        with pytest.raises(ValueError):
            junit.read(path)


def test_counts_are_compared_with_the_junit_file_beside(make, tmp_path):
    forged = make(tests={"L0.test_rope": {"passed": 900, "failed": 0, "skipped": 1}})
    path = receipts.write(forged, tmp_path / "receipt.json")  # run.xml lies there
    taken, (error,) = receipts.merge([path], tmp_path / "merged")
    assert not taken and "its counts are not those of the JUnit file beside it" in str(error)


def test_signed_receipts(merge, make, tmp_path, monkeypatch):
    unsigned = make(finished="2026-01-01T00:00:00+00:00")
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text("secret\n")
    other.write_text("guessed\n")
    monkeypatch.setenv(receipts.KEY, str(other))
    forged = make(finished="2026-01-02T00:00:00+00:00")
    monkeypatch.setenv(receipts.KEY, str(key))
    assert merge(receipt=unsigned)[1].startswith("receipt.json: it is not signed")
    assert merge(receipt=forged)[1].startswith("receipt.json: its signature is not of the key")
    for strange in ("\u00e9", 7):
        assert merge(receipt=forged | {"signature": strange})[1].startswith(
            "receipt.json: its signature is not of"
        )
    assert merge(receipt=make(finished="2026-01-03T00:00:00+00:00")) == (1, "")
    for nothing in ("", " \n"):
        key.write_text(nothing)
        with pytest.raises(BuildError, match=f"APEX_RECEIPT_KEY names {key}, a file that is empty"):
            make()  # nor is a receipt left unsigned
        with pytest.raises(BuildError, match="a file that is empty"):
            merge(receipt=forged | {"signature": signing.mac(forged["digest"], b"")})
    monkeypatch.setenv(receipts.KEY, str(tmp_path / "none"))
    with pytest.raises(BuildError, match="APEX_RECEIPT_KEY names .* cannot be read"):
        make()


def test_the_commands_that_merge_and_list(tmp_path, make):
    good, bad = tmp_path / "in/good.json", tmp_path / "in/bad.json"
    receipts.write(make(), good)
    bad.write_text("{")
    command = [sys.executable, "-m", "build_matrix", "receipts"]
    merged = [*command, "merge", str(good.parent), "--into", str(tmp_path / "kept")]
    done = subprocess.run(merged, cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode == ReceiptError.exit_code == 12
    assert done.stdout.startswith("L0(sm_90) on NVIDIA H200, torch 2.13.0+cu130, cp311: 3 passed, 0 failed, ")
    assert "does not count here: it is of other sources" in done.stdout  # this checkout is not made of c's
    assert "not taken: bad.json: it is cut, or no JSON" in done.stderr
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [receipts.name(make())]
    assert subprocess.run([*command, "list"], cwd=REPOSITORY, capture_output=True).returncode == 0
    (tmp_path / "empty").mkdir()
    nothing = [*command, "merge", str(tmp_path / "empty"), "--into", str(tmp_path / "kept")]
    done = subprocess.run(nothing, cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode == 12 and "empty: there is no receipt in it" in done.stderr
    beside = [*command, "merge", str(tmp_path / "empty"), str(good), "--into", str(tmp_path / "other")]
    done = subprocess.run(beside, cwd=REPOSITORY, text=True, capture_output=True)
    assert (
        done.returncode == 12 and "not taken: " in done.stderr
    )  # nor is it passed over in silence beside others
    assert (
        "empty: there is no receipt in it" in done.stderr and len(list((tmp_path / "other").iterdir())) == 1
    )


# ---- the table -----------------------------------------------------------------------------------------------


def grade(known, cell="sm_90", torch="2.13", python="cp311", base="built"):
    return receipts.grade(cell, torch, python, known, base)


def test_grades(make):
    found = make()
    assert grade([]) == "built" and grade([found]) == "L0 on NVIDIA H200"
    assert grade([found, make(tier="L1")]) == "L1 on NVIDIA H200"
    for other in ({"python": "cp312"}, {"torch": "2.11"}, {"cell": "sm_80"}, {"torch": "2.1"}):
        assert grade([found], **other) == "built"  # what ran elsewhere did not run here
    assert grade([make(cell="cpu")], cell="cpu", base="linked") == "L0 on CPU"
    emulated = make() | {"tier": "emulated", "cell": "gfx950"}
    assert grade([emulated], cell="gfx950", torch="2.8", python="cp313") == "emulated"


def test_grades_over_pythons():
    assert receipts.best({"cp310": "built", "cp311": "built"}) == "built"
    assert receipts.best({"cp310": "built", "cp311": "L0 on H200"}) == "L0 on H200 (cp311)"
    assert receipts.best({"cp310": "linked, never loaded", "cp311": "loaded (slim torch)"}) == (
        "loaded (slim torch) (cp311)"
    )


@pytest.fixture
def tiny_wheel(tmp_path):
    """Enough of a wheel for the compatibility table."""
    facts = {"source_sha256": HERE.compiled, "archs": ["sm_90"], "accelerator": "cuda", "local": "cu130"}
    binding = {"torch": "2.13", "python": "cp311", "grade": "linked, never loaded"}
    files = {
        "apex/__init__.py": b"",
        "apex/build.json": json.dumps(facts).encode(),
        "apex/lib/bindings.json": json.dumps([binding]).encode(),
    }
    path = tmp_path / "dist/apex_cuda-1.10.0+cu130-cp311-cp311-linux_x86_64.whl"
    path.parent.mkdir()
    wheel.write(path, "apex-cuda", "1.10.0+cu130", "cp311-cp311-linux_x86_64", files)
    return path


def test_a_receipt_beside_a_wheel_counts_in_its_table_until_the_wheel_changes(tiny_wheel, tmp_path):
    (before,) = publish.cells([tiny_wheel])
    assert (before["packs"], before["binding"]) == ({"sm_90": "built"}, "linked, never loaded")
    found = receipts.make("L0", "sm_90", PROBE, [junit_file(tmp_path / "r.xml")], HERE, tiny_wheel)
    receipts.write(found, tiny_wheel.parent / "receipts" / receipts.name(found))
    served = publish.cells([tiny_wheel])
    assert served[0]["packs"] == {"sm_90": "L0 on NVIDIA H200"}
    assert "| sm_90 | apex-cuda | L0 on NVIDIA H200 |" in publish.table(served)
    assert "| cpu | apex-cuda | linked, never loaded |" in publish.table(served)
    stale = tiny_wheel.with_name("apex_cuda-1.10.1+cu130-cp311-cp311-linux_x86_64.whl")
    with_more = {"apex/__init__.py": b"changed = 1\n"}
    facts = json.dumps(
        {"source_sha256": "e" * 64, "archs": ["sm_90"], "accelerator": "cuda", "local": "cu130"}
    )
    binding = json.dumps([{"torch": "2.13", "python": "cp311", "grade": "linked"}])
    with_more |= {"apex/build.json": facts.encode(), "apex/lib/bindings.json": binding.encode()}
    wheel.write(stale, "apex-cuda", "1.10.1+cu130", "cp311-cp311-linux_x86_64", with_more)
    assert publish.cells([stale])[0]["packs"] == {"sm_90": "built"}


def test_the_table_of_the_checkout_counts_receipts(make, tmp_path, monkeypatch):
    receipts.write(make(), tmp_path / "kept" / "a.json")
    monkeypatch.setattr(receipts, "LOCAL", tmp_path / "none")
    monkeypatch.setattr(receipts, "FOLDER", tmp_path / "kept")
    assert "L0" not in compat.table()  # of other sources
    monkeypatch.setattr(identity, "checkout", lambda: HERE)
    (row,) = [line for line in compat.table().splitlines() if "L0" in line]
    assert row.startswith("| sm_90 | apex-cuda | built") and "| L0 on NVIDIA H200 (cp311) |" in row
    answer = compat.answer({"torch": "2.13+cu130", "archs": ["sm_90"], "python": "cp311"})
    assert answer["grades"] == {"sm_90": "L0 on NVIDIA H200"}


def test_receipts_that_are_kept_are_sound():
    kept = sorted(receipts.FOLDER.glob("*.json"))
    if not kept:
        pytest.skip("no receipt is kept in build_matrix/receipts")
    for path in kept:
        assert receipts.read(path)


# ---- running -------------------------------------------------------------------------------------------------


def test_a_cell_whose_card_is_not_here_runs_nothing(monkeypatch):
    monkeypatch.setattr(tiers, "_probe", lambda site, cell: PROBE)
    tiers.here("L0", "cpu")
    tiers.here("L0", "sm_90")
    with pytest.raises(tiers.NotHere, match=r"L0\(gfx942\): no such card is here \(sm_90\); nothing ran"):
        tiers.here("L0", "gfx942")
    with pytest.raises(BuildError, match="compute_80 is no cell; there are cpu, sm_70"):
        tiers.here("L0", "compute_80")
    none = PROBE | {"machine": PROBE["machine"] | {"torch": None}}
    monkeypatch.setattr(tiers, "_probe", lambda site, cell: none)
    with pytest.raises(tiers.NotHere, match="no torch is installed; nothing ran"):
        tiers.here("L1", "cpu")


def test_a_tier_is_of_the_sources_that_are_built(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "_probe", lambda site, cell: PROBE)
    monkeypatch.setattr(tiers.tree, "DEFAULT", tmp_path)
    with pytest.raises(tiers.NotHere):  # the card is asked for first
        tiers.run("L0", "gfx942", tmp_path)
    with pytest.raises(
        BuildError, match="build/tree is not of these sources. Run: python -m build_matrix tree"
    ):
        tiers.run("L0", "cpu", tmp_path)
    # Else the card would lack its pack.
    with pytest.raises(BuildError, match="tree --available --arch=sm_90$"):
        tiers.run("L0", "sm_90", tmp_path)
    with pytest.raises(BuildError, match="tree --available --arch=gfx950 --arch=gfx1100 --arch=gfx1201$"):
        tiers.run("emulated", "cpu", tmp_path)


def test_a_tier_leaves_its_receipt(tmp_path, monkeypatch):
    """A whole run of a small tier: pytest, its cell's tests alone, JUnit and the receipt. A word in a name chooses
    nothing, and what a marker leaves out is counted."""
    folder = tmp_path / "tests/small"
    folder.mkdir(parents=True)
    for name in ("conftest.py", "rings.py", "torch_defaults.py"):
        shutil.copy(REPOSITORY / "tests" / name, folder.parent)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    (folder / "test_small.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('v', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])\n"
        "def test_it(v): assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
        "def test_cuda_launch(): pass\n"
        "@pytest.mark.two_gpus\ndef test_both(): assert 0\n"
        "def test_other(): pytest.skip('not today')\n"
    )
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/build.json").write_text(json.dumps({"source_sha256": identity.compiled()}))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(tiers.tree, "DEFAULT", tmp_path)
    monkeypatch.setattr(tiers, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(tiers, "_probe", lambda site, cell: PROBE)
    monkeypatch.setitem(tiers.PARTS, "L0", (tiers.Part("small", alone=True),))
    monkeypatch.chdir(tmp_path / "apex")  # not where pytest runs
    (path,) = tiers.run("L0", "cpu", Path("../out"))
    found = receipts.read(path)
    assert receipts.totals(found) == {"passed": 2, "failed": 0, "skipped": 3}
    assert found["not_run"] == {"not today": 1, "left out by -m 'not gpu'": 2}
    assert found["source"] == identity.checkout().as_json()
    assert receipts.why_not(found, identity.checkout()) is None
    (gpu,) = junit.read(tmp_path / "out/L0-cpu-small.xml")[-1:]
    assert (gpu.module, gpu.name, gpu.left_out) == ("tests.small.test_small", "test_both", True)
    (part,) = tiers.run("L0", "cpu", tmp_path / "out", expression="test_it")
    assert (
        receipts.why_not(receipts.read(part), identity.checkout()).startswith("it is of a part")
        and part != path
    )


def test_the_archs_of_the_emulated_tier_are_the_matrix_s():
    spec = importlib.util.spec_from_file_location("toolchain", REPOSITORY / "tests/emulated/toolchain.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.ARCHES) == {p.arch.name for p in matrix.load().packs if p.emulated}


def test_a_gpu_machine_s_check_writes_a_receipt_that_merges(tiny_wheel, tmp_path):
    """The part of ci/gpu_check.py that needs no GPU."""
    spec = importlib.util.spec_from_file_location("gpu_check", REPOSITORY / "ci/gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check = module.Check(tiny_wheel, tmp_path, tmp_path, None)
    check.machine = PROBE
    junit_file(*check.junits)
    (check.site / "apex/packs").mkdir(parents=True)
    meeting = threading.Barrier(2, timeout=10)  # it breaks where one of them waits for the other's end
    check.beside(
        {
            "tests": lambda: (meeting.wait() >= 0, "3 passed"),
            "JIT": lambda: (meeting.wait() >= 0, "agrees"),
            "breaks": lambda: 1 / 0,
        }
    )
    assert [check.steps[name]["passed"] for name in ("tests", "JIT", "breaks")] == [True, True, False]
    path = receipts.write(check.receipt(), tmp_path / "receipt.json")
    ((found,), refused) = receipts.merge([path], tmp_path / "kept")
    assert not refused and found["wheel"]["name"] == tiny_wheel.name and found["steps"]["tests"]["passed"]
    check.machine = PROBE | {"machine": PROBE["machine"] | {"devices": PROBE["machine"]["devices"][:1]}}
    with pytest.raises(ReceiptError, match="no GPU is here"):
        check.receipt()


def test_tests_of_a_gpu_machine_need_no_checkout():
    """ci/gpu_check.py copies the tests to where build_matrix cannot be imported."""
    there = {
        path for path in (REPOSITORY / "tests/L0").glob("**/*.py") if not {"loader", "host"} & {*path.parts}
    }
    asking = re.compile(r"^(from|import) build_matrix", re.MULTILINE)
    assert [path.name for path in sorted(there) if asking.search(path.read_text())] == []


@pytest.fixture
def two_gpu_check(tiny_wheel, tmp_path, monkeypatch):
    """The module, and a check of it in a folder of its own that may take so many seconds."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "ci"))
    module = importlib.import_module("two_gpu_check")
    return module, lambda seconds=300: module.TwoGpuCheck(
        tiny_wheel, tmp_path, tmp_path, None, seconds=seconds
    )


def test_two_gpus_check_is_of_the_marked_tests_alone(two_gpu_check, tiny_wheel, tmp_path):
    """The part of ci/two_gpu_check.py that needs no GPU: which files it takes, and that one card is not enough."""
    check = two_gpu_check[1]()
    names = {path.name for path in check.which(REPOSITORY / "tests")}
    assert {"test_two_gpus.py", "test_several_streams.py", "test_distributed.py"} <= names
    assert "test_plain.py" not in names and check.narrowed == "two_gpus"
    check.machine = PROBE
    assert check.cards() == (False, PROBE["machine"]["devices"][1]["name"])
    junit_file(check.junits[0])
    junit_file(check.junits[1], {"test_streams": ["ok", "ok"]})
    check.step("tests", lambda: (True, "3 passed"))
    assert check.conclude() == 0
    receipt = receipts.read(tmp_path / "receipt.json")
    assert receipts.totals(receipt)["passed"] == 5
    assert receipts.why_not(receipt, identity.wheel(tiny_wheel)).startswith(
        "it is of a part of the tests: two_gpus"
    )
    code, text = check.run("-c", "import os; print(os.environ['NCCL_NVLS_ENABLE'])", NCCL_NVLS_ENABLE="0")
    assert (code, text) == (0, "0\n")


def test_two_gpus_check_chooses_steps(two_gpu_check):
    module, make = two_gpu_check
    names = list(module.steps(make(), []))
    assert names[-2:] == ["tests", "tests, one after the other"] and "tensor parallel GPT" in names
    assert list(module.steps(make(), ["bubble", "halo"])) == ["halo exchange", "pipeline bubble"]


def test_tests_that_measure_run_alone(two_gpu_check, monkeypatch):
    """Several files at once, then those that measure, each with a file of its own."""
    check, calls = two_gpu_check[1](), []
    monkeypatch.setattr(check, "run", lambda *command, **_: calls.append([*map(str, command)]) or (0, ""))
    assert check.tests() == check.alone() == (True, "")
    beside, alone = calls
    assert "two_gpus and not alone" in beside and beside[-4:] == [
        "-n",
        str(check.processes),
        "--dist",
        "loadfile",
    ]
    assert "two_gpus and alone" in alone and "-n" not in alone
    assert {f"--junitxml={path}" for path in check.junits} == {
        c for call in calls for c in call if "xml" in c
    }


def test_what_was_said_stays_when_the_time_is_over(two_gpu_check, tmp_path):
    """The command and its children are ended, and what they said is there; steps.json is whole after each step."""
    child = "import time; print('child', flush=True); time.sleep(60)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    check, said = two_gpu_check[1](), tmp_path / "said.txt"
    start = time.monotonic()
    code, text = check.run("-c", program, said=said, limit=5)
    assert time.monotonic() - start < 30 and text == "child\n" + code and code == "ended after 5 s"
    assert said.read_text() == "child\n"
    check.step("first", lambda: (True, "done"))
    late = two_gpu_check[1](seconds=0)
    late.steps = check.steps
    late.step("second", lambda: pytest.fail("it must not run"))
    found = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert [step["says"] for step in found.values()] == ["done", "not run: the time is over"]
    assert [step["passed"] for step in found.values()] == [True, False]


def test_a_wheel_that_a_receipt_does_not_name_is_a_fault(make, merge):
    assert "its wheel is not what it should be" in merge(receipt=make(wheel={"name": "x"}))[1]


def test_what_is_cut_says_nothing_of_a_binding(tmp_path, caplog):
    file = tmp_path / "torch-2.13.0-cp311.json"
    for text in ("{", "[]", "{}"):
        file.write_text(text)
        assert loads.grade("2.13.0", "cp311", "identity", tmp_path) is None
    assert caplog.text.count("does not count") == 3


@pytest.mark.parametrize("damage", ["cut", "of another"])
def test_a_foreign_file_in_dist_is_named(tiny_wheel, damage):
    other = tiny_wheel.with_name("other-1-py3-none-any.whl")
    wheel.write(other, "other", "1", "py3-none-any", {"other.py": b""})
    if damage == "cut":
        other.write_bytes(other.read_bytes()[:50])
    with pytest.raises(
        BuildError, match="other-1-py3-none-any.whl is damaged, or no wheel that this farm built"
    ):
        publish.cells([tiny_wheel, other])
