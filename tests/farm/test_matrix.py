"""The matrix, the pins, and the look-up that reads both."""

import itertools
import json
import shlex
import subprocess
import sys
import time

import pytest

from apex._loader import ask, explain, offers, release
from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.parts import loads
from build_matrix.serve import compat
from build_matrix.spec import identity, matrix, pins
from build_matrix.toolchains.manage import names

AXES = matrix.load()
VENDOR = {"sm_": "cuda", "gfx": "rocm"}


def test_every_torch_and_toolchain_of_the_matrix_is_pinned():
    assert set(AXES.torch) <= set(pins.torch_versions())
    assert all(pins.toolchain(name) for name in names())
    assert all(len(pin.sha) == 40 for pin in pins.load() if pin.project == "pytorch")


def test_toolchains_of_the_package_index_name_their_packages():
    for name in names():
        assert pins.packages(name) or name.startswith("clang-hip")


def test_every_rule_has_a_reason_and_rules_something_out():
    for rule in AXES.rules:
        assert rule.reason
        tags = (*AXES.python, *AXES.optional_python)
        assert any(rule.forbids(t, p) for t, p in itertools.product(AXES.torch, tags))


def test_a_pin_line_with_a_missing_field_is_named(tmp_path):
    file = tmp_path / "related_commits"
    file.write_text("# note\nlinux|pytorch|torch-2.13.0|v2.13.0|abc\n")
    with pytest.raises(BuildError, match="related_commits:2: 5 fields, want 6"):
        pins.load(file)


def test_moving_a_pin_changes_its_line_only(tmp_path):
    file = tmp_path / "related_commits"
    text = pins.FILE.read_text()
    file.write_text(text)
    assert pins.move("pytorch", "torch-2.13.0", "f" * 40, file)
    assert not pins.move("pytorch", "torch-2.13.0", "f" * 40, file)
    before, after = text.splitlines(), file.read_text().splitlines()
    (changed,) = [new for old, new in zip(before, after, strict=True) if old != new]
    assert changed.startswith("linux|pytorch|torch-2.13.0|v2.13.0|" + "f" * 40)


@pytest.mark.parametrize(
    ("arch", "pack"),
    [
        ("sm_90", "sm_90"),
        ("sm_87", "compute_80"),  # Tegra: machine code does not cross to it, as the loader knows
        ("sm_88", "compute_80"),
        ("sm_130", "compute_120"),  # PTX crosses a major
        ("sm_99", "sm_90"),  # machine code serves its own major only, from its own minor up
        ("gfx942", "gfx942"),
        ("gfx1102", "gfx11-generic"),
        ("gfx1010", None),
        ("sm_60", None),
    ],
)
def test_the_pack_that_serves_an_arch(arch, pack):
    (choice,) = offers.offer(explain.described("2.13", [arch]), release.load()).choices
    assert (choice.taken.variant if choice.taken.variant in AXES.archs(VENDOR[arch[:3]]) else None) == pack


def test_a_cell_that_exists_is_answered_with_its_wheel_index_and_pins():
    answer = compat.answer({"torch": "2.13", "rocm": "7.2", "archs": ["gfx942"]})
    assert answer["found"]
    assert answer["wheel"].startswith("apex_rocm-") and answer["wheel"].endswith("+rocm7.2")
    assert answer["index_roots"] == ["whl/rocm7.2/"]
    assert answer["pins"]["torch-2.13.0"] == pins.torch("2.13.0").sha
    assert set(answer["grades"]) == {"gfx942"}


@pytest.mark.parametrize(
    "question",
    [
        {"torch": "2.7", "cuda": "13.0", "archs": ["sm_90"]},
        {"torch": "2.13.0+cu130", "archs": ["sm_61"]},  # no pack, and no NVRTC of CUDA 13, knows it
        {"torch": "3.0", "rocm": "6.0", "archs": ["gfx906"], "python": "cp38"},
        {"torch": "3.0", "cuda": "13.0", "archs": ["sm_61"]},
    ],
)
def test_the_nearest_cells_of_one_that_does_not_exist_do_exist(question):
    answer = compat.answer(question)
    assert not answer["found"] and answer["missing"] and answer["nearest"] and answer["mend"]
    for cell in answer["nearest"]:
        near = {"torch": cell["torch"], "archs": [cell["arch"]] if "arch" in cell else []}
        near |= {k: ask.spoken(k, v) for k, v in cell.items() if k in ("cuda", "rocm", "python")}
        assert compat.answer(near)["found"], cell


def test_what_no_pack_serves_is_compiled_at_first_use():
    """The loader runs there, and so `compat` says yes, and how."""
    answer = compat.answer({"torch": "2.13", "rocm": "7.2", "archs": ["gfx1010"]})
    assert answer["found"] and answer["packs"] == [{"arch": "gfx1010", "runs": "jit"}]
    assert answer["reasons"] == ["gfx1010: hipRTC of ROCm 7.2; compiled at first use, then cached"]


@pytest.mark.parametrize("arch", ["9.0", "sm_90a", "sm_", "hopper", "gfx"])
def test_what_is_no_arch_is_named(arch):
    with pytest.raises(ValueError, match=f"'{arch}' is no arch; say sm_90 or gfx942"):
        compat.answer({"torch": "2.13", "archs": [arch]})


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ({"torch": "2.13.0+cu128", "cuda": "13.0"}, "is not built for CUDA 13.0: its label says .cu128"),
        ({"torch": "2.13.0+rocm7.0", "cuda": "13.0"}, "label says"),
        ({"torch": "2.13", "cuda": "13.0", "rocm": "7.2"}, "not for both"),
        ({"torch": "2.13", "cuda": "hopper"}, "'hopper' is no version of CUDA"),
        ({"torch": "two"}, "'two' is no version of torch"),
        ({"torch": "2.13; rm -rf /"}, "'2.13; rm -rf /' is no version of torch"),
        ({"torch": "2.13.0+cu130;x"}, "is no version of torch"),
        ({"torch": "2.13\n"}, "is no version of torch"),
        ({"torch": "2.13", "python": "snake"}, "'snake' is no Python"),
        ({"torch": "2.13", "driver": "x"}, "not a driver version"),
    ],
)
def test_questions_that_make_no_sense(question, says):
    with pytest.raises(ValueError, match=says):
        compat.answer(question)


def test_an_index_is_one_word_of_the_line():
    """Whoever copies the line runs pip and nothing else."""
    question = {"torch": "2.13", "cuda": "13.0", "archs": ["sm_90"]}
    for index in ("http://h/a;touch /tmp/x", "http://h/$(x)", "<index>;x"):
        line = ask.answer(question, index)["command"]
        assert shlex.split(line, posix=True)[-2] == "--index-url"
        assert "".join(shlex.split(line)[-1:]) == f"{index}/whl/cu130/"
    assert ask.answer(question, "<index>")["command"].endswith(" --index-url <index>/whl/cu130/")


def run(*arguments):
    command = [sys.executable, "-m", "build_matrix", "compat", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)


def test_the_command_answers_at_once_and_its_exit_code_tells():
    start = time.monotonic()
    found = run("--torch", "2.13", "--rocm", "7.2", "--arch", "gfx942", "--json")
    assert (
        time.monotonic() - start < 5
    )  # a fraction of a second on an idle machine; this only rules out a build
    assert found.returncode == 0 and json.loads(found.stdout)["found"]
    absent = run("--torch", "2.7", "--cuda", "12.8", "--arch", "sm_90")
    assert absent.returncode == 2 and "nearest" in absent.stdout
    assert (
        run("--torch", "nonsense").returncode == run("--no-such-option").returncode == run().returncode == 64
    )


def test_a_load_counts_for_the_sources_that_were_loaded_only(tmp_path):
    receipt = {"torch": "2.15.0", "python": "cp312", "bindings": "abc", "grade": "loaded (slim torch)"}
    (tmp_path / "torch-2.15.0-cp312.json").write_text(json.dumps(receipt))
    assert loads.grade("2.15.0", "cp312", "abc", tmp_path) == "loaded (slim torch)"
    assert loads.grade("2.15.0", "cp312", "changed", tmp_path) is None
    assert loads.grade("2.15.0", "cp313", "abc", tmp_path) is None


def test_a_load_of_an_emulated_process_is_graded_so(tmp_path):
    arm = {"folder": tmp_path, "platform": "linux_aarch64"}
    assert loads.write("2.8.0", "cp311", "abc", **arm).name == "torch-2.8.0-cp311-linux_aarch64.json"
    assert loads.grade("2.8.0", "cp311", "abc", **arm) == "loaded under qemu"
    assert loads.grade("2.8.0", "cp311", "abc", tmp_path) is None
    assert loads.grade("2.8.0", "cp311", "changed", **arm) is None


@pytest.mark.parametrize(
    ("question", "nearest"),
    [
        ({"torch": "3.0", "rocm": "6.0", "archs": ["gfx906"], "python": "cp38"}, "2.15"),
        ({"torch": "1.13"}, "2.8"),
        ({"torch": "2.7"}, "2.8"),
    ],
)
def test_the_nearest_torch_of_another_major_is_next_to_it(question, nearest):
    assert compat.answer(question)["nearest"][0]["torch"] == nearest


@pytest.mark.parametrize(
    "question",
    [
        {"torch": "3.0"},
        {"torch": "2.99", "rocm": "7.2", "archs": ["gfx942"]},
        {"torch": "2.13.0a0+gitabcdef0", "cuda": "13.0", "archs": ["sm_90"]},
        {"torch": "2.15", "python": "cp310"},
    ],
)
def test_a_torch_that_nothing_was_compiled_for_is_served_by_the_portable_binding(question):
    answer = compat.answer(question)
    assert answer["found"] and answer["binding"] == "portable" and answer["command"]
    assert "  binding portable" in ask.words(answer, "compat")


@pytest.mark.parametrize("text", ["", "axes = 5\n", "[axes]\ntorch = 3\n", "[[axes]]\n"])
def test_a_matrix_that_is_not_whole_is_named(tmp_path, text):
    (tmp_path / "matrix.toml").write_text(text)
    with pytest.raises(BuildError, match="matrix.toml is not whole: .* Run: git checkout"):
        matrix.load(tmp_path / "matrix.toml")


@pytest.mark.parametrize("data", [b"", b"\n", b"\xff\xfe", b"new\n", b"1.10.0\n1.11.0\n"])
def test_a_version_that_is_none_is_named(tmp_path, monkeypatch, data):
    """`which` says so in place of a line that pip cannot read."""
    (tmp_path / "version.txt").write_bytes(data)
    monkeypatch.setattr(identity, "VERSION", tmp_path / "version.txt")
    with pytest.raises(BuildError, match="version.txt holds .*, which is no version such as"):
        identity.version()
    with pytest.raises(ValueError, match="which is no version"):
        release.load()
    assert release.known() is None


def test_nox_names_the_python_that_it_needs_before_anything_is_prepared():
    code = "import sys, nox, runpy; sys.version_info = (3, 9, 18); runpy.run_path('noxfile.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("noxfile.py: nox runs on Python 3.9, where"), (
        done.stderr
    )
    assert "Use Python 3.10 or newer" in done.stderr and "Traceback" not in done.stderr
