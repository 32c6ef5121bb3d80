"""Tables of benchmarks: rows are printed and written one by one, and what was not measured says why."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _report  # noqa: E402

KIBIBYTE, BANDWIDTH = 1 << 10, 1e9


def report_of(monkeypatch, *arguments):
    monkeypatch.setattr(_report, "ON_GPU", True)  # the seconds are made up here
    monkeypatch.setattr(_report, "device_name", lambda: "a card")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, arguments)])
    return _report.Report(_report.parse(argparse.ArgumentParser()), BANDWIDTH)


def measure(report, case, implementation, gpu=2e-6, wall=3e-6):
    def seconds(value):
        def function(step):
            step()
            return value

        return function

    report.measure(case, implementation, lambda: None, KIBIBYTE, seconds(gpu), seconds(wall))


def refuse(step):
    raise RuntimeError("capture is refused\nsecond line")


def test_a_row_is_printed_and_in_the_file_before_the_next_is_measured(monkeypatch, tmp_path, capsys):
    path = tmp_path / "rows.json"
    report = report_of(monkeypatch, "--json", path)
    title, headings = capsys.readouterr().out.splitlines()
    assert title.startswith("a card, torch ") and title.endswith("copy 1 GB/s")
    for count, name in enumerate(("apex", "torch eager"), 1):
        measure(report, "a case", name)
        (line,) = capsys.readouterr().out.splitlines()
        assert line.split("  ")[0] == "a case" and name in line
        assert line.split()[-5:] == ["2.0", "1.0", "51.2", "%", "3.0"]
        assert line.index("2.0") + 3 == headings.index("GPU µs") + 6, "figures stand under their headings"
        found = json.loads(path.read_text())
        assert (found["card"], found["copy"], len(found["rows"])) == ("a card", BANDWIDTH, count)
        assert found["rows"][-1] == {
            "case": "a case", "implementation": name, "graph": 2e-6, "wall": 3e-6, "floor_bytes": KIBIBYTE,
        }  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"], "no temporary file stays"


def test_a_run_that_is_cut_off_leaves_a_whole_file(monkeypatch, tmp_path):
    path = tmp_path / "rows.json"
    report = report_of(monkeypatch, "--json", path)
    measure(report, "a case", "apex")
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr(_report.json, "dump", full)
    with pytest.raises(OSError):
        measure(report, "a case", "torch eager")
    assert path.read_bytes() == before


def test_a_refusal_has_its_reason_in_the_row(monkeypatch, capsys):
    report = report_of(monkeypatch)
    report.measure("a case", "Liger", lambda: None, KIBIBYTE, refuse, lambda step: 3e-6)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith("3.0  not measured: RuntimeError: capture is refused")
    assert (report.rows[0].graph, report.rows[0].wall) == (None, 3e-6)


def test_compiling_ends_with_its_budget(monkeypatch, capsys):
    report = report_of(monkeypatch, "--compile-seconds", "5")
    now = [0.0]
    monkeypatch.setattr(_report.time, "perf_counter", lambda: now[0])

    def compiling(step):
        now[0] += 4
        return 2e-6

    for _ in range(3):
        report.measure("a case", "torch.compile", lambda: None, KIBIBYTE, compiling, wall=None)
        report.measure("a case", "apex", lambda: None, KIBIBYTE, compiling, wall=None)  # another's time
    assert [row.graph for row in report.rows] == [2e-6, 2e-6, 2e-6, 2e-6, None, 2e-6]
    assert "not measured: 5 s of compiling are over" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((), ["one apex", "one torch.compile", "two apex", "two torch.compile"]),
        (("--only", "TWO"), ["two apex", "two torch.compile"]),
        (("--without-compile",), ["one apex", "two apex"]),
        (("--skip", "apex"), ["one torch.compile", "two torch.compile"]),
    ],
)
def test_cases_and_implementations_are_chosen(monkeypatch, arguments, expected):
    report = report_of(monkeypatch, *arguments)
    for case in ("one", "two"):
        for name in ("apex", "torch.compile"):
            measure(report, case, name)
    assert [f"{row.case} {row.implementation}" for row in report.rows] == expected


def test_times_are_refused_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(_report, "ON_GPU", False)
    for arguments, accuracy, answer in (
        ([], True, "without one there is --accuracy"),
        ([], False, "times need a GPU"),
        (["--accuracy"], True, None),
    ):
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
        if answer is None:
            assert _report.parse(argparse.ArgumentParser(), accuracy=accuracy).accuracy
            continue
        with pytest.raises(SystemExit) as stopped:
            _report.parse(argparse.ArgumentParser(), accuracy=accuracy)
        assert stopped.value.code == 2 and answer in capsys.readouterr().err
