"""The speed tables show every case that was measured, and say what sources the figures are of."""

import json
import re

import pytest

from build_matrix import REPOSITORY
from build_matrix.site import speed
from build_matrix.store import digest


def row(case, implementation, graph, wall=9e-6):
    return {"case": case, "implementation": implementation, "graph": graph, "wall": wall, "floor_bytes": 4000}


SMALL = [
    row("small", "apex FusedX", 2e-6),
    row("small", "torch.compile", 1e-6),
    row("small", "Liger", None, None),
]
LARGE = [row("large", "apex FusedX", 400e-6), row("large", "torch eager", 800e-6)]


@pytest.fixture
def results(tmp_path):
    """Writes one run of benchmarks/rotary.py; returns the folder."""

    def write(**facts):
        result = {"card": "a card", "torch": "2.13", "copy": 2e9, **facts, "rows": SMALL + LARGE}
        (tmp_path / "rotary-2026-01-01-card.json").write_text(json.dumps(result))
        return tmp_path

    return write


def test_small_cases_wall_times_and_what_is_slower_are_there(results):
    found = speed.whole(results())
    assert "| small | apex FusedX | 2.0 | 100 % | 9.0 |" in found
    assert "| small | torch.compile | 1.0 (fastest) | 200 % | 9.0 |" in found
    assert "| small | Liger |  |  |  |" in found  # was not measured
    assert "| large | apex FusedX | 400 (fastest) | 0 % | 9.0 |" in found
    said = speed.brief(results())
    assert "In 1 of 2 cases something else was faster." in said
    assert "| small | 2.0 | 100 % | torch.compile: 1.0 |" in said


def test_figures_of_other_sources_are_marked(results):
    now = speed.sources()
    assert "**Of earlier sources**, which were not written down." in speed.whole(results())
    assert "Of these sources." in speed.whole(results(source={"units": now}))
    assert "other sources" not in " ".join(speed.brief(results(source={"units": now})).split())
    # Of which rotary.py measures one.
    changed = results(source={"units": now | {"rope": "0", "xentropy": "0"}})
    assert "**Of other sources than these**: since then `rope` changed." in speed.whole(changed)
    assert "Some of it is of other sources" in " ".join(speed.brief(changed).split())
    assert set(speed.UNITS["norms"]) <= set(now)


def test_the_table_of_the_cpu(tmp_path):
    """It says how often torch is faster, and is none of the tables of GPUs."""

    def row(case, threads, apex, torch, passes="forward"):
        return dict(case=case, dtype="float32", threads=threads, passes=passes, apex=apex, torch=torch)

    rows = [row("softmax 4", 1, 2e-6, 4e-6), row("softmax 4", 2, 3e-6, 2e-6), row("norm 4", 1, 1.01e-6, 1e-6)]
    assert speed.of_cpu(tmp_path) == "No run is recorded."
    (tmp_path / "cpu-2026-01-01-x.json").write_text(
        json.dumps({"cpu": "AVX512", "torch": "2.13", "rows": rows})
    )
    found = speed.of_cpu(tmp_path)
    assert "AVX512, torch 2.13. In 1 of 3 rows torch is faster by more than 2 %." in " ".join(found.split())
    assert "| softmax 4 | float32 | forward | 2.0 | 4.0 | 0.50 | 3.0 | 2.0 | 1.50 |" in found
    assert "| norm 4 | float32 | forward | 1.0 | 1.0 | 1.01 |  |  |  |" in found
    assert speed.runs(tmp_path) == []


def test_every_recorded_case_is_on_the_page():
    page = (REPOSITORY / "docs/speed.md").read_text(encoding="utf-8")
    for run in speed.runs():
        for case in run.cases:
            assert f"| {case} |" in page


def test_a_result_says_what_it_measured(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    pytest.importorskip("torch")
    import _report as report

    said = report.source()
    assert said["units"] == speed.sources() and re.fullmatch("[0-9a-f]{64}", said["python"])
    monkeypatch.setattr(digest, "of_source", lambda path: path.stem)
    assert report.source()["units"]["rope"] == "rope"


def test_what_the_sources_say_of_benchmarks_is_there():
    """A comment that cites a measurement names a file that exists."""
    cited = re.compile(r"benchmarks/\w+\.(?:py|json)")
    folders = ("csrc", "apex", "docs", "build_matrix")
    for path in (p for folder in folders for p in (REPOSITORY / folder).rglob("*") if p.is_file()):
        if path.suffix in (".py", ".cpp", ".h", ".cu", ".md", ".toml"):
            for name in cited.findall(path.read_text(encoding="utf-8")):
                assert (REPOSITORY / name).is_file(), f"{path.relative_to(REPOSITORY)} cites {name}"
