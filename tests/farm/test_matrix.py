"""The matrix, the pins, and the look-up that reads both."""

import itertools
import json
import subprocess
import sys
import time

import pytest

from build_matrix import REPOSITORY, compat, matrix, pins, receipts
from build_matrix.errors import BuildError
from build_matrix.toolchain_report import names

AXES = matrix.load()


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
        ("sm_87", "sm_86"),  # machine code serves its own major only, from its own minor up
        ("sm_88", "sm_86"),
        ("sm_130", "compute_120"),  # PTX crosses a major
        ("sm_99", "sm_90"),
        ("gfx942", "gfx942"),
        ("gfx1102", "gfx11-generic"),
        ("gfx1010", None),
        ("sm_60", None),
    ],
)
def test_the_pack_that_serves_an_arch(arch, pack):
    archs = AXES.archs("rocm" if arch.startswith("gfx") else "cuda")
    found = compat.pack_for(arch, archs)
    assert (found[0] if found else None) == pack


def test_a_cell_that_exists_is_answered_with_its_wheel_index_and_pins():
    answer = compat.answer(compat.Question("2.13", "rocm", "7.2", "gfx942"))
    assert answer["found"]
    assert answer["wheel"].startswith("apex_rocm-") and answer["wheel"].endswith("+rocm7.2")
    assert answer["index_roots"] == ["whl/rocm7.2/"]
    assert answer["pins"]["torch-2.13.0"] == pins.torch("2.13.0").sha
    assert set(answer["grades"]) == {"gfx942"}


@pytest.mark.parametrize(
    "question",
    [
        compat.Question("2.7", "cuda", "13.0", "sm_90"),
        compat.Question("2.13", "cuda", "11.8", "sm_90"),
        compat.Question("2.13", "rocm", "7.2", "gfx1010"),
        compat.Question("2.15", "cpu", python="cp310"),
        compat.Question("3.0", "rocm", "6.0", "gfx906", "cp38"),
    ],
)
def test_the_nearest_cells_of_one_that_does_not_exist_do_exist(question):
    answer = compat.answer(question)
    assert not answer["found"] and answer["missing"] and answer["nearest"]
    for cell in answer["nearest"]:
        near = compat.Question(
            cell["torch"],
            question.accelerator,
            compat.spoken(question.accelerator, cell[question.accelerator]),
            cell.get("arch", ""),
            cell.get("python", ""),
        )
        assert compat.answer(near)["found"], cell


@pytest.mark.parametrize("arch", ["9.0", "sm_90a", "sm_", "hopper", "gfx"])
def test_what_is_no_arch_is_named(arch):
    accelerator = "rocm" if arch.startswith("gfx") else "cuda"
    with pytest.raises(BuildError, match=f"'{arch}' is no arch; say sm_90 or gfx942"):
        compat.answer(compat.Question("2.13", accelerator, arch=arch))


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
    assert run("--torch", "nonsense").returncode == 1


def test_a_load_counts_for_the_sources_that_were_loaded_only(tmp_path):
    receipt = {"torch": "2.15.0", "python": "cp312", "bindings": "abc", "grade": "loaded (slim torch)"}
    (tmp_path / "torch-2.15.0-cp312.json").write_text(json.dumps(receipt))
    assert receipts.load_grade("2.15.0", "cp312", "abc", tmp_path) == "loaded (slim torch)"
    assert receipts.load_grade("2.15.0", "cp312", "changed", tmp_path) is None
    assert receipts.load_grade("2.15.0", "cp313", "abc", tmp_path) is None


@pytest.mark.parametrize(("torch", "nearest"), [("3.0", "2.15"), ("1.13", "2.8"), ("2.99", "2.15"), ("2.7", "2.8")])
def test_the_nearest_torch_of_another_major_is_next_to_it(torch, nearest):
    assert compat.answer(compat.Question(torch, "cpu"))["nearest"][0]["torch"] == nearest
