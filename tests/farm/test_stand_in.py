"""Two distributions side by side, one uninstalled: what is left says what to do. Real wheels, by pip and uv."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from build_matrix.parts import tree
from build_matrix.store import Store
from build_matrix.toolchains import pythons
from build_matrix.wheels import stand_in, wheel

TREE = tree.DEFAULT / "apex/build.json"
pytestmark = pytest.mark.skipif(not TREE.is_file(), reason="no build/tree: run python -m build_matrix tree")
PYTHON = pythons.find(pythons.own_tag())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """name -> wheel: the checkout's tree as apex-cpu and as apex-cuda, which alone has a pack's file."""
    pytest.importorskip("auditwheel")
    found, store = {}, Store(tmp_path_factory.mktemp("store"))
    facts = json.loads(TREE.read_text())
    for name, local in (("apex-cpu", "cpu"), ("apex-cuda", "cu130")):
        place = tmp_path_factory.mktemp("tree")
        shutil.copytree(tree.DEFAULT, place, dirs_exist_ok=True)
        own = facts | {"distribution": name, "local": local}
        (place / "apex/build.json").write_text(json.dumps(own))
        shutil.rmtree(place / "apex/packs", ignore_errors=True)
        if name == "apex-cuda":
            (place / "apex/packs/sm_90").mkdir(parents=True)
            (place / "apex/packs/sm_90/README").write_text("a file of one distribution alone\n")
        folder = store.build(wheel.unit(place, own, PYTHON)).folder
        (found[name],) = folder.glob("*.whl")
    return found


@pytest.fixture
def environment(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    return tmp_path / "venv"


def run(environment, *arguments, **variables):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("APEX_", "PYTHON"))} | variables
    command = [environment / "bin/python", *arguments]
    return subprocess.run(command, cwd=environment, env=clean, text=True, capture_output=True)


def pip(environment, *arguments):
    done = run(environment, "-m", "pip", "--isolated", "--no-cache-dir", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def install(environment, wheels, *names):
    for name in names:
        pip(environment, "install", "--quiet", "--no-deps", "--no-index", str(wheels[name]))


def remedy(name, label, index="<index>"):
    version = json.loads(TREE.read_text())["version"]
    line = f"python -m pip install --force-reinstall --no-deps {name}=={version}+{label}"
    return f"{line} --index-url {index}/whl/{label}/"


@pytest.mark.parametrize(
    ("first", "second", "gone", "left", "label"),
    [
        (
            "apex-cpu",
            "apex-cuda",
            "apex-cpu",
            "apex-cuda",
            "cu130",
        ),  # its pack stays: apex would be a namespace
        ("apex-cuda", "apex-cpu", "apex-cuda", "apex-cpu", "cpu"),
    ],
)
def test_what_is_left_says_what_to_do(environment, wheels, first, second, gone, left, label):
    install(environment, wheels, first, second)
    both = run(environment, "-m", "apex", "--json")
    names = [problem["name"] for problem in json.loads(both.stdout)["problems"]]
    assert "two apex distributions" in names and both.returncode
    pip(environment, "uninstall", "-y", "--quiet", gone)

    done = run(environment, "-m", "apex")
    assert done.returncode == 2 and done.stderr == ""
    assert done.stdout.splitlines()[-1] == f"to mend it: {remedy(left, label)}"
    told = run(environment, "-m", "apex", "--json", APEX_INDEX="https://x.example/whl/")
    (problem,) = json.loads(told.stdout)["problems"]
    assert problem["remedy"] == remedy(left, label, "https://x.example")
    for program in ("import apex", "import apex.optimizers", "from apex import amp"):
        failed = run(environment, "-c", program)
        assert failed.returncode == 1
        assert (
            failed.stderr.splitlines()[-1].startswith(f"ImportError: {left} ")
            and remedy(left, label) in failed.stderr
        )

    install_again = [
        str(wheels[left]) if word.startswith("apex-") else word for word in remedy(left, label).split()[3:-2]
    ]
    pip(environment, *install_again, "--no-index")  # what the line says, of the wheel that is here
    mended = json.loads(run(environment, "-m", "apex", "--json").stdout)
    assert [d["name"] for d in mended["distributions"]] == [left] and not mended["distributions"][0][
        "missing"
    ]


def test_one_distribution_is_imported_as_ever_and_leaves_nothing(environment, wheels):
    install(environment, wheels, "apex-cuda")
    program = "import apex, sys; print(apex.__file__); print(sys.path)"
    done = run(environment, "-c", program)
    file, path = done.stdout.splitlines()
    (site,) = environment.glob("lib/python3.*/site-packages")
    assert file == str(site / "apex/__init__.py")
    assert path.index(str(site)) < path.index(str(site / "_apex_cuda"))
    pip(environment, "uninstall", "-y", "--quiet", "apex-cuda")
    assert not [p.name for p in site.iterdir() if "apex" in p.name or p.name == "amp_C.py"]
    assert "No module named 'apex'" in run(environment, "-c", "import apex").stderr


def test_uv_leaves_the_same_word(environment, wheels):
    uv = shutil.which("uv", path=os.path.dirname(sys.executable)) or shutil.which("uv")
    if uv is None:
        pytest.skip("no uv here: python -m pip install uv")
    python = str(environment / "bin/python")
    for words in (["install", "--no-deps", str(wheels["apex-cpu"])], ["install", "--no-deps", str(wheels["apex-cuda"])],
                  ["uninstall", "apex-cpu"]):  # fmt: skip
        command = [uv, "pip", words[0], "--no-config", "--offline", "--python", python, *words[1:]]
        done = subprocess.run(command, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    assert (
        run(environment, "-m", "apex").stdout.splitlines()[-1]
        == f"to mend it: {remedy('apex-cuda', 'cu130')}"
    )


def test_a_build_from_source_has_one_too():
    files = stand_in.files("apex", "1.10.0")
    assert set(files) == {"apex_source.pth", "_apex_source/apex.py"}
    done = subprocess.run(
        [sys.executable, "-", "--json"], input=files["_apex_source/apex.py"], capture_output=True
    )
    assert done.returncode == 2 and "from its source tree" in json.loads(done.stdout)["problems"][0]["remedy"]


def test_every_distribution_has_names_of_its_own():
    known = ("apex-cpu", "apex-cuda", "apex-rocm", "apex-npu", "apex")
    names = [set(stand_in.files(name, "1")) for name in known]
    assert sum(map(len, names)) == len(set().union(*names)) == 10
