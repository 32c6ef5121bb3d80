"""apex-npu: one wheel of Python alone, the table of CANN, torch and torch_npu, and what which, compat and the doctor
say of them. Nothing says that an NPU ran it."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from apex._loader import ask, npu, offers, problems, release
from apex._loader.distributions import Distribution, Installation
from apex._loader.explain import NOTHING
from apex._loader.facts import DEGRADED, NOTE, Facts
from apex._loader.fit import fit
from apex._loader.machine import Device, Machine, Npu, Torch
from build_matrix import REPOSITORY
from build_matrix.__main__ import main
from build_matrix.check import receipts, verify
from build_matrix.errors import GateError
from build_matrix.farm import plan, workflow
from build_matrix.farm.plan import Selection
from build_matrix.parts import tree
from build_matrix.serve import compat, install_line, page, publish
from build_matrix.spec import identity, matrix
from build_matrix.store import Store
from build_matrix.store.engine import Engine
from build_matrix.wheels import build, provenance, sbom, variants, wheel

AXES = matrix.load()
PIN = f"apex-npu=={identity.version()}+npu"
LINE = f"python -m pip install {PIN} --index-url <index>/whl/npu/"
NAME = f"apex_npu-{identity.version()}+npu-py3-none-any.whl"


@pytest.fixture(autouse=True)
def no_index(monkeypatch):
    monkeypatch.delenv("APEX_INDEX", raising=False)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the wheel, as `nox -s build-npu` makes it on a machine where no compiler is found."""
    folder = tmp_path_factory.mktemp("npu")
    made = {"PATH": os.path.dirname(sys.executable), "APEX_STORE": str(folder / "store")}
    kept = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC", "PATH", "APEX_STORE")}
    subprocess.run(
        [sys.executable, "-m", "build_matrix", "wheel", "npu", "--dist", str(folder / "dist")],
        check=True,
        cwd=REPOSITORY,
        env=kept | made | {"PYTHONPATH": str(REPOSITORY)},
        timeout=120,
    )
    return folder / "dist"


def test_it_holds_no_library_that_is_weighed(dist):
    """Of apex/lib there is the list of bindings alone, which is data."""
    assert list(wheel.sizes(dist / NAME)) == ["Python and data"]


# ---- the table ---------------------------------------------------------------------------------------------


def test_every_row_is_of_a_torch_and_of_pythons_that_apex_serves():
    assert len(AXES.npu) == 14
    for row in AXES.npu:
        assert matrix.minor(row.torch) in {matrix.minor(torch) for torch in AXES.torch}
        assert row.python and set(row.python) <= set(AXES.python), row
        assert row.torch_npu == row.torch or row.torch_npu.startswith(f"{row.torch}.post"), row
        assert npu.VERSION.fullmatch(row.cann), row
    names = [row.torch_npu for row in AXES.npu]
    assert len(set(names)) == len(names), "a torch_npu is for one CANN"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("8.5", "8.5.0", True), ("9.1.2", "9.1.X", True), ("9.1.X", "9.1.0", True), ("8.3.rc1", "8.3.RC1", True),
        ("9.0.0", "9.1.X", False), ("8.5.1", "8.5.0", False), ("9", "9.0.0", True), ("8.3", "8.5.0", False),
    ],
)  # fmt: skip
def test_versions_of_cann(one, other, same):
    assert npu.same_cann(one, other) is same is npu.same_cann(other, one)


def test_the_table_travels_in_every_wheel():
    assert release.load().npu == AXES.npu
    assert release.load().accelerator("npu").pure and not release.load().accelerator("cpu").pure


# ---- compat and which --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ({"torch": "2.9", "cann": "8.5"}, ["2.9.0"]),
        ({"torch": "2.8.0+cpu", "cann": "8.3.RC1"}, ["2.8.0"]),
        ({"torch": "2.8", "cann": "9.0.0", "python": "3.13"}, ["2.8.0.post4"]),
        ({"torch": "2.12", "cann": "9.1.0"}, ["2.12.0", "2.12.0.post2"]),
        ({"torch": "2.12", "cann": "9.1.3"}, ["2.12.0.post2"]),
        ({"torch": "2.10", "archs": ["npu"]}, ["2.10.0", "2.10.0.post4", "2.10.0.post6"]),
        ({"torch": "2.9", "cann": "8.5.0", "system": "linux_aarch64"}, ["2.9.0"]),
    ],
)
def test_compat_names_the_torch_npu(question, wanted):
    found = compat.answer(question)
    assert found["found"] and found["command"] == LINE and found["distribution"] == "apex-npu"
    assert [row["torch_npu"] for row in found["torch_npu"]] == wanted
    assert found["binding"] == "reference" and not found["packs"] and not found["pins"]
    assert found["grades"] == {"npu": receipts.NO_CODE} and found["binding_grades"] == {}


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ({"torch": "2.13", "cann": "9.1.0"}, "no torch_npu is known for torch 2.13.0"),
        ({"torch": "2.9.1", "cann": "9.1.0"}, "no torch_npu is known for torch 2.9.1"),
        (
            {"torch": "2.12", "cann": "8.5"},
            "no torch_npu for torch 2.12.0 is known for CANN 8.5: torch_npu 2.12.0 for",
        ),
        (
            {"torch": "2.8", "cann": "8.3.RC1", "python": "3.13"},
            "has a wheel for cp313; there are some for cp310",
        ),
        ({"torch": "2.7", "cann": "8.5"}, "older than 2.8"),
    ],
)
def test_compat_says_why_none_goes_with_it_and_what_is_near(question, why):
    found = compat.answer(question)
    assert not found["found"] and why in found["missing"][0], found
    assert found["mend"].startswith(("python -m pip install ", "use one of Python 3.10, 3.11"))
    assert found["nearest"]
    for cell in found["nearest"]:
        again = {"torch": cell["torch"], "cann": cell["cann"], "python": cell.get("python")}
        assert compat.answer(again)["found"], cell


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ({"torch": "2.9", "cann": "latest"}, "'latest' is no version of CANN; say 8.5.0"),
        ({"torch": "2.9+cu130", "cann": "8.5"}, "neither CUDA nor ROCm goes with CANN"),
        ({"torch": "2.9", "rocm": "7.2", "cann": "8.5"}, "neither CUDA nor ROCm goes with CANN"),
        ({"torch": "2.9", "archs": ["sm_90", "npu"]}, "neither CUDA nor ROCm goes with CANN"),
    ],
)
def test_a_question_that_contradicts_itself(question, why):
    with pytest.raises(ValueError, match=why):
        compat.answer(question)


def test_compat_on_the_command_line(capsys):
    asked = ["--torch", "2.9", "--cann", "8.5"]
    assert ask.compat(asked, "compat") == ask.FOUND
    said = capsys.readouterr().out
    assert (
        "NPU     torch_npu 2.9.0 for CANN 8.5.0, torch 2.9.0, Python 3.10, 3.11, 3.12" in said
        and LINE in said
    )
    assert ask.compat(["--torch", "2.13", "--cann", "8.5"], "compat") == ask.NOT_THERE
    assert "compat --torch 2.9 --cann 8.5.0" in capsys.readouterr().out


SOME = "python -m pip install torch=="


@pytest.mark.parametrize(
    ("question", "tags", "mend"),
    [
        (("2.9", "8.5", "3.13"), "cp310, cp311, cp312", "use one of Python 3.10, 3.11, 3.12"),
        (("2.10", "9.1.2", "3.12"), "cp310, cp311", f"{SOME}2.12.0 "),
        (("2.8", "8.3", "3.12"), "cp310, cp311", "use one of Python 3.10, 3.11"),
        (("2.12", "", "3.14"), "cp310, cp311, cp312, cp313", "use one of Python 3.10, 3.11, 3.12, 3.13"),
    ],
)
def test_the_pythons_are_those_of_the_very_torch_and_cann(question, tags, mend):
    torch, cann, python = question
    found = compat.answer({"torch": torch, "cann": cann, "python": python, "archs": ["npu"]})
    assert found["missing"][0].endswith(f"there are some for {tags}"), found["missing"]
    assert found["mend"].startswith(mend)
    assert mend.startswith("use") or found["nearest"][0]["python"] == f"cp{python.replace('.', '')}"


def test_every_mend_can_be_done():
    """Whatever is asked: a pip line is of a row for that Python and CANN, or another Python or CANN is named first."""
    canns = ["", "7.0", "9.1.2", *{row.cann for row in AXES.npu}]
    torches = [*{row.torch for row in AXES.npu}, "2.13.0", "2.7.0"]
    for cann, torch, python in itertools.product(canns, torches, (*AXES.python, "cp314")):
        found = compat.answer({"torch": torch, "cann": cann, "python": python, "archs": ["npu"]})
        if found["found"]:
            continue
        mend = found["mend"]
        words, there, line = mend.partition(SOME)
        if not there:
            assert mend.startswith("use one of Python 3.1") and matrix.dotted(python) not in mend, mend
            continue
        (row,) = [r for r in AXES.npu if f" torch-npu=={r.torch_npu} " in line]
        assert python in row.python and line.startswith(f"{row.torch} "), (cann, torch, python, mend)
        known = any(npu.same_cann(r.cann, cann) for r in AXES.npu) if cann else True
        assert words == ("" if known else f"install CANN {row.cann}, then: "), mend
        assert not (cann and known) or npu.same_cann(row.cann, cann), mend


@pytest.mark.parametrize(
    ("machine", "mend"),
    [
        (Machine(torch=None, python="cp311", npu=Npu("2.9.0", "8.5.0")), f"{SOME}2.9.0 "),
        (Machine(torch=None, python="cp311", npu=Npu("2.9.0.post2", "")), f"{SOME}2.9.0 "),
        (Machine(torch=None, python="cp311", npu=Npu("2.14.0", "")), f"{SOME}2.14.0 "),
        (Machine(torch=None, python="cp311", vendor="npu"), f"{SOME}2.12.0 "),
        (Machine(torch=None, python="cp314", npu=Npu("", "")), "use one of Python 3.10, 3.11, 3.12, 3.13"),
        (Machine(torch=Torch("2.7.0+cpu", None), python="cp311", vendor="npu"), f"{SOME}2.12.0 "),
        (Machine(torch=Torch("2.7.0+cpu", None), python="cp311", npu=Npu("2.9.0", "")), f"{SOME}2.9.0 "),
        (Machine(torch=None, python="cp311", vendor="npu", cards=("cuda",)), "python -m pip install torch"),
        (Machine(torch=None, python="cp311"), "python -m pip install torch"),
    ],
)
def test_the_torch_of_an_npu_is_that_of_torch_npu(machine, mend):
    """torch_npu takes no newer torch, and none for CUDA; which and the doctor say the same line."""
    machine = dataclasses.replace(machine, library=NOTHING, portable=NOTHING)
    found = ask.of_machine(machine)
    (problem,) = [p for p in problems.find(facts(machine)) if p.name in ("no torch", "unsupported torch")]
    assert found["mend"] == problem.remedy
    assert problem.remedy.startswith(mend) if mend[-1] == " " else problem.remedy == mend
    assert not mend.startswith(SOME) or "/whl/cpu" in problem.remedy


def described(torch="2.12.0+cpu", here=None, **more):
    absent = {"library": NOTHING, "portable": NOTHING}
    return Machine(torch=Torch(torch, None), python="cp311", npu=here, vendor="npu", **absent, **more)


@pytest.mark.parametrize(
    ("torch", "here", "said"),
    [
        ("2.12.0+cpu", Npu("2.12.0", "9.1.0"), "torch_npu 2.12.0 for CANN 9.1.0"),
        (
            "2.14.0+cpu",
            Npu("2.14.0", "9.1.0"),
            "torch_npu 2.14.0 is here: no table says that it goes with",
        ),
        (
            "2.12.0+cpu",
            Npu("2.12.0", "8.5.0"),
            "no table says that it goes with torch 2.12.0+cpu and CANN 8.5.0",
        ),
    ],
)
def test_which_offers_the_wheel_where_torch_npu_is(torch, here, said):
    found = ask.of_machine(described(torch, here))
    assert found["found"] and found["command"] == LINE
    assert found["environment"]["accelerator"] == "npu"
    assert npu.SERVED in found["reasons"] and any(said in reason for reason in found["reasons"])


def test_a_torch_for_cards_is_served_by_its_own_wheel():
    machine = Machine(torch=Torch("2.12.0+cu130", None, cuda="13.0"), python="cp311", npu=Npu("2.12.0", ""))
    assert offers.wanted(machine) == "cuda" and offers.wanted(described()) == "cpu"


def test_what_is_here_is_read_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert npu.here() is None
    (tmp_path / "torch_npu-2.9.0.dist-info").mkdir()
    (tmp_path / "torch_npu-2.9.0.dist-info/METADATA").write_text("Name: torch_npu\nVersion: 2.9.0\n")
    assert npu.here() == Npu("2.9.0", "")
    home = tmp_path / "cann"
    (home / "aarch64-linux").mkdir(parents=True)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    assert npu.here() == Npu("2.9.0", "")
    (home / "aarch64-linux/ascend_toolkit_install.info").write_text("package_name=toolkit\nversion=8.5.0\n")
    assert npu.here() == Npu("2.9.0", "8.5.0")
    os.mkfifo(home / "aarch64-linux/ascend_a_install.info")  # is not waited for
    assert npu.here() == Npu("2.9.0", "8.5.0")


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become another user")
def test_what_this_user_may_not_read_is_no_fault(tmp_path):
    """A CANN, and a folder of compiled parts, in somebody else's folder."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folder is root's
        private = Path(folder) / "private"
        (private / "cann/x86_64-linux").mkdir(parents=True)
        private.chmod(0o700)
        Path(folder).chmod(0o755)
        code = (
            f"import os, sys; sys.path[:0] = {[str(REPOSITORY)]!r}\n"
            "from apex._loader import distributions, doctor, explain, installed, layout, npu, pack_files\n"
            "os.setgid(65534); os.setuid(65534)\n"
            f"os.environ['APEX_TREE'] = {str(private)!r}\n"
            f"assert npu.cann({str(private / 'cann')!r}) == ''\n"
            "assert installed.packs() == () and installed.library_fault()\n"
            "print(doctor.as_text(doctor.assume(explain.machine(['cpu'], torch='2.13'))))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "what would run" in done.stdout, done.stderr


# ---- the doctor --------------------------------------------------------------------------------------------


def facts(machine):
    return Facts(machine=machine, fit=fit(machine), offer=offers.offer(machine, release.load()))


@pytest.mark.parametrize(
    ("machine", "said", "remedy"),
    [
        (described(), ["torch_npu 2.12.0 for CANN 9.1.0, 2.12.0.post2", "torch_npu is not installed"], ""),
        (described(here=Npu("2.12.0", "9.1.0")), ["torch_npu 2.12.0 for CANN 9.1.0"], ""),
        (described("2.13.0+cpu"), ["no torch_npu is known for torch 2.13.0"], "torch-npu==2.12.0"),
    ],
)
def test_the_doctor_of_the_wheel(machine, said, remedy):
    """A note: on NPUs nothing faster is to be had."""
    (problem,) = problems.find(facts(machine))
    assert (problem.severity, problem.name) == (NOTE, "Ascend NPU") and npu.SERVED in problem.text
    assert all(words in problem.text for words in said), problem.text
    assert remedy in problem.remedy and bool(remedy) == bool(problem.remedy)


def test_two_distributions_are_one_too_many():
    both = tuple(Distribution(name, "1.10.0", "/site") for name in ("apex-cpu", "apex-npu"))
    machine = described(here=Npu("2.12.0", "9.1.0"))
    found = problems.find(dataclasses.replace(facts(machine), installation=Installation(both, "/site/apex")))
    (problem,) = [problem for problem in found if problem.name == "two apex distributions"]
    assert problem.severity == DEGRADED and "apex-cpu and apex-npu are installed" in problem.text
    assert problem.remedy == f"python -m pip uninstall -y apex-cpu apex-npu && {LINE}"


def test_beside_a_card_with_kernels_it_is_degraded():
    cards = {"devices": (Device("cuda", 0, "sm_90"),), "cuda_driver": (13, 0)}
    machine = dataclasses.replace(described(**cards), torch=Torch("2.12.0+cu130", None, cuda="13.0"))
    found = {problem.name: problem for problem in problems.find(facts(machine))}
    assert "Ascend NPU" not in found and "apex-cuda==" in found["Python only"].remedy


# ---- the wheel ---------------------------------------------------------------------------------------------


def test_the_wheel_is_of_python_alone(dist):
    assert sorted(path.name for path in dist.iterdir()) == [NAME, f"{NAME}{provenance.SUFFIX}"]
    with zipfile.ZipFile(dist / NAME) as archive:
        names = archive.namelist()
        assert not [
            name for name in names if name.endswith((".so", *sbom.BINARY)) or name.startswith("apex/packs")
        ]
        text = archive.read(f"apex_npu-{identity.version()}+npu.dist-info/WHEEL").decode()
        assert "Root-Is-Purelib: true" in text and "Tag: py3-none-any" in text
        made = json.loads(archive.read("apex/build.json"))
        bom = json.loads(archive.read(f"apex_npu-{identity.version()}+npu.dist-info/{sbom.NAME}"))
    assert (made["accelerator"], made["archs"], made["torch"], made["host_compiler"]) == ("npu", [], [], None)
    assert bom["metadata"]["component"]["name"] == "apex-npu" and "components" not in bom
    assert provenance.check(dist / NAME)
    assert json.loads((dist / f"{NAME}{provenance.SUFFIX}").read_text())["predicate"]["buildDefinition"][
        "externalParameters"
    ] == {"accelerator": "npu", "archs": [], "torch": [], "python": "py3", "platform": "any"}


def test_its_bytes_are_the_same_again(dist, tmp_path):
    again = build.pure_wheel("npu", Engine(Store(tmp_path / "store")), tmp_path / "dist")
    assert again.name == NAME and again.read_bytes() == (dist / NAME).read_bytes()


def test_it_is_verified(dist):
    with verify.nothing_made() as store:
        said = verify.run(dist / NAME, store)
    assert said[-1] == f"{NAME}: the same, byte for byte"


def test_nothing_compiled_gets_into_it(tmp_path):
    made = tree.fill_python_only(tree.Request("npu"), tmp_path)
    (tmp_path / "apex/lib/libapex.so").write_bytes(b"\x7fELF")
    with pytest.raises(GateError, match=r"apex/lib/libapex.so is compiled, and the wheel says py3-none-any"):
        wheel.pure_unit(tmp_path, made)


def test_it_is_no_variant(dist, tmp_path):
    """apex-cpu is the null variant; a second one would be chosen as well."""
    pytest.importorskip("variantlib")
    assert variants.write([dist / NAME], tmp_path) == []


def test_explain_says_that_it_is_for_any_machine(dist):
    done = CliRunner().invoke(main, ["explain", str(dist / NAME)])
    assert done.exit_code == 0 and "any, py3-none-any" in done.output and "linux" not in done.output


@pytest.mark.parametrize("more", [["--arch=sm_90"], ["--torch=2.12.0"], ["--python=3.11"], ["--container"]])
def test_what_does_not_belong_to_it_is_said(more, tmp_path):
    done = CliRunner().invoke(main, ["wheel", "npu", "--dist", str(tmp_path), *more])
    assert done.exit_code and "is Python alone, one wheel for all" in done.output


def test_installed_it_serves_npu_tensors_and_says_so(dist, tmp_path):
    """In an environment without a compiler, on the stand-in for torch_npu."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    place = str(tmp_path / "site")
    subprocess.run([*command, "--target", place, str(dist / NAME)], check=True, timeout=120)
    program = (
        "import torch, npu_device, apex\n"
        "from apex.normalization import FusedLayerNorm\n"
        "from apex.optimizers import FusedAdam\n"
        "norm = FusedLayerNorm(8).npu()\n"
        "step = FusedAdam(norm.parameters(), lr=0.5)\n"
        "norm(torch.arange(8.0).npu()).square().sum().backward()\n"
        "step.step()\n"
        "print(apex.__file__, norm.weight.device, norm.weight.cpu().tolist())\n"
    )
    path = {"PYTHONPATH": f"{place}{os.pathsep}{REPOSITORY / 'tests/L0'}", "PATH": "/nowhere"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("APEX_")} | path
    run = {"capture_output": True, "text": True, "cwd": tmp_path, "env": kept, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", program], **run)
    assert done.returncode == 0, done.stderr
    file, device, weights = done.stdout.split(maxsplit=2)
    assert file.startswith(place) and device == "npu:0"
    assert json.loads(weights) == pytest.approx([0.5] * 8)  # Adam's first step is lr in size
    said = json.loads(subprocess.run([sys.executable, "-m", "apex", "--json"], **run).stdout)
    assert [d["name"] for d in said["distributions"]] == ["apex-npu"]
    assert "Ascend NPU" in [problem["name"] for problem in said["problems"]]
    assert {choice["taken"] for choice in said["choices"]} == {"reference"}


# ---- plan, workflow, index and pages -----------------------------------------------------------------------


def test_the_release_has_one_and_alone_it_needs_nothing():
    steps = [s for s in plan.make(Selection(), check=False).steps if s.name.startswith("apex-npu")]
    assert [(s.kind, s.name, s.needs) for s in steps] == [("wheel", "apex-npu py3", ())]
    made = plan.make(Selection(("npu",)))
    assert [s.id for s in made.steps] == ["wheel apex-npu py3"] and not made.left_out
    assert [s.id for s in plan.make(Selection(("npu",), platforms=("linux_aarch64",))).steps] == [
        "wheel apex-npu py3"
    ]


def test_the_workflow_makes_it_once():
    rows = workflow.jobs(plan.resolve(Selection()))["wheels"]["include"]
    assert [row for row in rows if "npu" in row["name"]] == [
        {"name": "apex-npu", "toolchains": "", "options": "--accelerator npu"}
    ]


def test_the_index_lists_it_and_no_page_says_that_a_card_ran_it(dist, tmp_path):
    copy = tmp_path / "dist"
    copy.mkdir()
    (copy / NAME).write_bytes((dist / NAME).read_bytes())
    listed = publish.finish(copy, tmp_path / "whl")
    assert [found.name for found in listed["npu"]] == [NAME] and not listed["cpu"]
    assert NAME.replace("+", "%2B") in (tmp_path / "whl/whl/npu/apex-npu/index.html").read_text()
    cells = json.loads((copy / publish.CELLS).read_text())
    of = {(cell["torch"], cell["python"]) for cell in cells}
    assert of == {(matrix.minor(row.torch), tag) for row in AXES.npu for tag in row.python}
    rows = [*page.of_wheels(cells), *(row for row in page.of_checkout() if row["accelerator"] == "npu")]
    assert {row["grade"] for row in rows} == {receipts.NO_CODE} and {row["arch"] for row in rows} == {"npu"}
    assert {row["wheel"] for row in rows} == {PIN} and {row["root"] for row in rows} == {"whl/npu/"}
    lines = (copy / publish.TABLE).read_text().splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| npu", "| npu"]
    assert f"| npu | apex-npu | {receipts.NO_CODE} |" in compat.table()


def test_the_line_brings_the_torch_that_torch_npu_wants():
    """Its wheels for x86_64 require torch==2.12.0+cpu."""
    row = AXES.npu[-1]
    assert install_line.torch("npu") == (
        f"python -m pip install torch=={row.torch} --index-url https://download.pytorch.org/whl/cpu && "
        f"python -m pip install torch-npu=={row.torch_npu} pyyaml setuptools"
    )
    assert install_line.line("npu") == LINE
