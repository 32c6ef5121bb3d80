"""Wheels for Windows: one for every Python, with the library, packs and Python, and no compiled binding; what the plan,
compat, which, the page and the table say of them. Nothing says that a Windows ran one."""

import json
import zipfile

import pytest
from click.testing import CliRunner

from apex._loader import ask, explain
from build_matrix.__main__ import main
from build_matrix.check import verify
from build_matrix.errors import GateError, ToolchainMissing
from build_matrix.farm import plan
from build_matrix.farm.plan import Selection
from build_matrix.parts import host_library, interface, loads
from build_matrix.serve import compat, page, publish
from build_matrix.spec import identity, matrix
from build_matrix.store import Store
from build_matrix.toolchains import host_compiler, wine
from build_matrix.wheels import provenance, wheel
from build_matrix.wheels.wheel_file import WheelFile

WINDOWS = "win_amd64"
AXES = matrix.load()
NAME = f"apex_cpu-{identity.version()}+cpu-py3-none-{WINDOWS}.whl"


@pytest.fixture(scope="module")
def mingw():
    try:
        return host_compiler.find(WINDOWS)
    except ToolchainMissing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def dist(mingw, tmp_path_factory):
    """A folder with the wheel for CPUs."""
    folder = tmp_path_factory.mktemp("windows")
    done = CliRunner().invoke(main, ["wheel", "cpu", "--platform", WINDOWS, "--dist", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


# ---- the wheel ---------------------------------------------------------------------------------------------


def test_its_name_tag_and_contents(dist):
    assert sorted(path.name for path in dist.iterdir()) == [NAME, f"{NAME}{provenance.SUFFIX}"]
    file = WheelFile(dist / NAME)
    assert (file.tag, file.platform) == (f"py3-none-{WINDOWS}", WINDOWS)
    with zipfile.ZipFile(dist / NAME) as archive:
        names = archive.namelist()
        assert "Root-Is-Purelib: false" in archive.read(file.only(".dist-info/WHEEL")).decode()
        record = archive.read(file.only(".dist-info/RECORD")).decode()
        bom = json.loads(archive.read(next(name for name in names if name.endswith(".cdx.json"))))
    assert [name for name in names if name.endswith((".so", ".dll", ".pyd"))] == ["apex/lib/apex.dll"]
    assert {"apex/_portable/module.py", "apex/reference/layer_norm.py", "apex/device/layer_norm.cu"} <= set(
        names
    )
    assert "apex/lib/apex.dll,sha256=" in record and "apex/lib/apex.dll" in json.dumps(bom)
    facts = file.facts
    assert facts["host_compiler"]["name"] == "g++-mingw" and facts["torch"] == facts["python"] == []
    assert file.bindings == [] and file.json("apex/release.json")["platforms"][-1]["portable"]


def test_its_packs_are_those_of_every_platform(mingw):
    """Cubins know no operating system: both wheels need the same steps."""
    made = plan.make(Selection(("cuda",), ("sm_90",), platforms=(matrix.NATIVE, WINDOWS)), check=False)
    code = {s.id for s in made.steps if s.kind == "code"}
    wheels = [step for step in made.steps if step.kind == "wheel"]
    assert code and all(code == {need for need in step.needs if need.startswith("code ")} for step in wheels)


@pytest.mark.minutes
def test_its_bytes_are_the_same_again(dist):
    with verify.nothing_made() as store:
        assert verify.run(dist / NAME, store)[-1] == f"{NAME}: the same, byte for byte"


@pytest.mark.parametrize("more", [["--python=3.11"], ["--torch=2.13.0"]])
def test_what_does_not_belong_to_it_is_said(more, tmp_path):
    done = CliRunner().invoke(main, ["wheel", "cpu", "--platform", WINDOWS, "--dist", str(tmp_path), *more])
    assert done.exit_code and "is for every Python and torch: it holds no binding of one" in done.output


def test_it_takes_the_place_of_its_own_kind_alone(dist, tmp_path):
    for name in (NAME, NAME.replace("py3-none-win_amd64", "cp311-cp311-manylinux_2_27_x86_64")):
        (tmp_path / name).write_bytes(b"older")
    wheel.publish(dist, tmp_path)
    assert len(list(tmp_path.glob("*.whl"))) == 2
    assert (tmp_path / NAME).read_bytes() == (dist / NAME).read_bytes()


# ---- the plan ----------------------------------------------------------------------------------------------


def test_the_plan_compiles_the_library_and_no_binding():
    made = plan.make(Selection(platforms=(WINDOWS,)), check=False)
    kinds = made.count()
    assert "3a" not in kinds and "3b" not in kinds and "headers" not in kinds
    assert [s.name for s in made.steps if s.kind == "library"] == [f"apex.dll {WINDOWS}"]
    wheels = [s.name for s in made.steps if s.kind == "wheel"]
    assert wheels == [f"apex-cpu py3 {WINDOWS}", f"apex-cuda py3 {WINDOWS}"]
    sources = {s.arguments[0] for s in made.steps if s.kind == "object"}
    assert "csrc/host/windows/os.cpp" in sources and "csrc/host/os.cpp" not in sources
    with_both = plan.make(Selection(), check=False)
    names = [s.id for s in with_both.steps]
    assert len(set(names)) == len(names) and {"library libapex.so", f"library apex.dll {WINDOWS}"} <= set(
        names
    )


def test_a_source_for_windows_takes_the_place_of_linux_s():
    own, other = (host_library.sources(name) for name in (matrix.NATIVE, WINDOWS))
    assert {p.name for p in other} == {p.name for p in own if p.parent.name != "compat"}
    assert all("windows" not in p.parts for p in own)
    assert {p.name for p in other if p.parent.name == "windows"} == {"os.cpp", "torch_libraries.cpp"}


# ---- what is said of it ------------------------------------------------------------------------------------


def test_compat_offers_the_portable_binding():
    found = compat.answer({"torch": "2.13+cu130", "archs": ["sm_90"], "system": WINDOWS})
    assert found["found"] and (found["binding"], found["platform"]) == ("portable", WINDOWS)
    assert found["pythons"] == [*AXES.python, *AXES.optional_python] and found["grades"] == {"sm_90": "built"}
    assert found["reasons"][0].startswith(
        f"the portable binding serves every torch and Python, as wheels for {WINDOWS}"
    )
    for torch in ("2.8.0+cpu", "2.99.0+cpu"):
        assert compat.answer({"torch": torch, "system": WINDOWS, "python": "cp314"})["binding"] == "portable"
    old = compat.answer({"torch": "2.7.1+cpu", "system": WINDOWS})
    assert not old["found"] and "older than 2.8" in old["missing"][0]


@pytest.mark.parametrize("question", [{"rocm": "7.2"}, {"cann": "8.5"}])
def test_what_no_wheel_for_windows_is_of(question):
    found = compat.answer({"torch": "2.9", "system": WINDOWS} | question)
    assert not found["found"] and f"is built for {WINDOWS}: " in found["missing"][0]
    assert found["mend"].startswith("use one of linux_x86_64") and WINDOWS not in found["mend"]


def test_which_and_explain_know_the_platform():
    found = ask.of_machine(explain.described("2.13.0+cu130", ["sm_90"], python="cp39", system=WINDOWS))
    assert not found["found"] and "cp39" in found["reasons"][0]
    found = ask.of_machine(explain.described("2.13.0+cu130", ["sm_90"], python="cp315", system=WINDOWS))
    assert found["found"] and "apex-cuda==" in found["command"]


def test_a_library_is_graded_by_its_own_sources(tmp_path):
    loads.write_library(WINDOWS, "a" * 64, tmp_path)
    assert loads.library_grade(WINDOWS, "a" * 64, tmp_path) == "loaded under wine"
    assert loads.library_grade(WINDOWS, "b" * 64, tmp_path) is None
    assert loads.library_grade("linux_aarch64", "a" * 64, tmp_path) is None


def test_no_grade_says_more_than_loaded_under_wine(dist):
    said = {"built", loads.NEVER, loads.UNDER_WINE}
    assert {row["grade"] for row in page.of_checkout() if row["platform"] == WINDOWS} <= said
    cells = publish.cells([dist / NAME])
    assert {(c["torch"], c["python"]) for c in cells} == {
        (matrix.minor(torch), tag) for torch in AXES.torch for tag in AXES.python_for(torch)
    }
    assert {cell["binding"] for cell in cells} <= said and {cell["platform"] for cell in cells} == {WINDOWS}
    rows = [line for line in compat.table().splitlines() if WINDOWS in line]
    assert len(rows) == 2 and "L0" not in "".join(rows)
    assert {entry["grade"] for entry in compat.portable_entries(WINDOWS, "other sources")} == {loads.NEVER}


# ---- wine --------------------------------------------------------------------------------------------------


def test_a_library_that_does_not_load_is_not_graded(mingw, tmp_path):
    if not wine.shutil.which("wine"):
        pytest.skip(f"no wine: {wine.REMEDY}")
    built = Store().build(host_library.build(Store(), platform=WINDOWS)).folder / "apex.dll"
    digest = interface.digest(interface.description())
    assert wine.load(built, mingw, digest).startswith("apex.dll loads under wine at level ")
    with pytest.raises(GateError, match="under wine: exit"):
        wine.load(built, mingw, "0" * 64)
    (tmp_path / "apex.dll").write_bytes(built.read_bytes()[:50_000])
    with pytest.raises(GateError, match="under wine: exit 1, error"):
        wine.load(tmp_path / "apex.dll", mingw, digest)
