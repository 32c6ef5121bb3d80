"""The compatibility table as a page: its rows, what it asks of others (nothing), and how it filters."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from build_matrix.serve import index, page
from build_matrix.spec import matrix

AXES = matrix.load()
CELL = {"torch": "2.13", "python": "cp311", "platform": matrix.NATIVE, "binding": "linked", "wheel": "w"}
CELLS = [
    CELL | {"accelerator": "cuda", "packs": {"sm_90": "L0 on NVIDIA H200", "sm_80": "built"}},
    CELL | {"accelerator": "cuda", "packs": {"sm_90": "built", "sm_80": "built"}, "python": "cp312"},
    CELL | {"accelerator": "cpu", "packs": {}},
]


def rows_of(text):
    return json.loads(re.search(r"^const ROWS = (.*);$", text, re.MULTILINE)[1])


def test_rows_of_wheels_take_the_pythons_together():
    rows = page.of_wheels(CELLS)
    assert [(row["arch"], row["python"]) for row in rows] == [
        ("sm_90", ["3.11", "3.12"]), ("sm_80", ["3.11", "3.12"]), ("cpu", ["3.11"])
    ]  # fmt: skip
    assert rows[0]["grade"].startswith("L0 on NVIDIA H200") and rows[0]["root"] == "whl/cu130/"
    assert rows[2]["wheel"].startswith("apex-cpu==") and rows[2]["grade"] == "linked"


def test_every_cell_of_the_matrix_has_a_row():
    rows = page.of_checkout()
    assert {row["torch"] for row in rows} == set(map(matrix.minor, AXES.torch))
    assert {row["arch"] for row in rows} == {"cpu", "npu", *(pack.arch.name for pack in AXES.packs)}
    keys = [(row["torch"], row["accelerator"], row["arch"], row["platform"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert not [row for row in rows if row["accelerator"] == "rocm" and row["platform"] == "linux_aarch64"]


class References(HTMLParser):
    """What a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href", "action", "data")]


def test_it_needs_no_server_and_no_other_file():
    text = page.render(page.of_wheels([*CELLS, CELLS[0] | {"torch": "</script><b>"}]))
    reader = References()
    reader.feed(text)
    assert reader.found == [] and "@ROWS@" not in text and text.count("</script>") == 1
    assert not re.search(r"https?://|@import|fetch\(|XMLHttpRequest|import\(", text)


def test_the_index_shows_it_where_a_browser_looks(tmp_path, wheel_of_tree):
    wheels = sorted(wheel_of_tree.glob("*.whl"))
    index.write(wheels, tmp_path / "with", "<!DOCTYPE html>page")
    index.write(wheels, tmp_path / "without")
    for folder in ("", "whl"):
        assert (tmp_path / "with" / folder / "index.html").read_text() == "<!DOCTYPE html>page"
        assert not (tmp_path / "without" / folder / "index.html").exists()


@pytest.mark.parametrize(
    ("fragment", "count", "line"),
    [
        ("", "3 of 3 rows", None),
        ("#arch=sm_90", "1 of 3 rows", "apex-cuda=="),
        ("#python=3.12", "2 of 3 rows", "apex-cuda=="),
        ("#python=3.12&accelerator=cpu", "0 of 3 rows", None),
        ("#torch=9.9", "3 of 3 rows", None),  # a value that is not there filters nothing
    ],
)
def test_a_browser_filters_it(fragment, count, line, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser here: apt-get install chromium")
    (tmp_path / "page.html").write_text(page.render(page.of_wheels(CELLS)))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--dump-dom", f"file://{tmp_path}/page.html{fragment}"]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert f'<output id="count">{count}</output>' in shown
    told = re.search(r'<pre id="line"( hidden="")?>(.*?)</pre>', shown)
    assert (told[1] is None) == (line is not None) and (line or "") in told[2]
