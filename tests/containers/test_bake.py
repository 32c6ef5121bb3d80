"""Images: what goes into one, found out without a builder; and images baked and run for real."""

import subprocess
import sys

import pytest

from build_matrix import REPOSITORY
from build_matrix.containers import bake, builder
from build_matrix.errors import BuildError, ContainerError, PythonMissing
from build_matrix.toolchains import package_index, pythons
from build_matrix.toolchains.package_index import IndexFile
from tests.containers.conftest import long

PYTHON = "/opt/python/cp311-cp311/bin/python"
BARE = bake.Contents("cp311")


class Wheel:
    """Facts of a wheel with bindings for two torches."""

    facts = {"torch": [{"release": "2.13.0"}, {"release": "2.14.1"}]}


def torch_for(accelerator, wanted=None, base=BARE):
    return bake.torch_for(accelerator, Wheel, "cp311", base, wanted)


@pytest.fixture
def configured(monkeypatch):
    """What pip's configuration offers of torch."""
    names = [
        "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl",
    ]
    monkeypatch.setattr(
        package_index, "configured_files", lambda project: [IndexFile(n, f"file:///{n}", "") for n in names]
    )


def test_the_torch_of_the_base_stays():
    base = bake.Contents("cp311", "2.13.0+rocm7.2")
    assert torch_for("rocm", None, base) == torch_for("rocm", "2.13.0", base) == bake.TorchFrom("")
    with pytest.raises(BuildError, match=r"has torch 2.13.0\+rocm7.2, which stays"):
        torch_for("rocm", "2.14.1", base)


def test_a_build_of_the_accelerator_is_looked_for(configured):
    assert torch_for("cpu") == bake.TorchFrom("torch==2.13.0+cpu")  # the newest that pip's configuration has
    assert torch_for("cpu", "2.14.1") == bake.TorchFrom(
        "torch==2.14.1+cpu", "https://download.pytorch.org/whl/cpu"
    )
    assert torch_for("rocm") == bake.TorchFrom(
        "torch==2.14.1+rocm7.2", "https://download.pytorch.org/whl/rocm7.2"
    )
    assert torch_for("cuda") == bake.TorchFrom("torch==2.14.1")
    assert torch_for("rocm", "2.13.0+cpu") == bake.TorchFrom("torch==2.13.0+cpu")


def test_a_missing_wheel_names_the_command_that_builds_it(tmp_path):
    with pytest.raises(
        BuildError, match="no wheel apex-rocm for cp312. Run: nox -s build-rocm -- --python 3.12"
    ):
        bake.wheel_for("rocm", "cp312", tmp_path)


def test_an_archive_that_is_there_stays_until_the_new_one_is_whole(tmp_path):
    class Writer(builder.Builder):
        build = run = labels = None

        def _save(self, image, archive):
            assert not archive.exists() and archive.parent.parent == tmp_path  # the same file system
            archive.write_text(image)
            if image == "cut":
                raise ContainerError("buildah push failed")

    archive = tmp_path / "image.tar"
    Writer().save("old", archive)
    with pytest.raises(ContainerError):
        Writer().save("cut", archive)
    assert archive.read_text() == "old" and list(tmp_path.iterdir()) == [archive]
    Writer().save("new", archive)
    assert archive.read_text() == "new"


def test_every_argument_of_the_containerfile_is_given(tmp_path, monkeypatch):
    """And the image is tagged, labelled and made of the base that was asked for."""
    made = []

    class Recorder(builder.Builder):
        build = made.append
        labels = _save = None

        def run(self, image, command, given=""):
            answer = '{"python": "cp311", "torch": "2.13.0"}'
            return subprocess.CompletedProcess(command, 0, answer, "")

    monkeypatch.setattr(bake.index, "write", lambda wheels, target: target.mkdir(parents=True))
    monkeypatch.setattr(
        bake, "labels", lambda wheel, base, torch, python: {"cell": f"{base} {torch} {python}"}
    )

    class Built(Wheel):
        path = tmp_path / "apex.whl"
        facts = Wheel.facts | {"distribution": "apex-rocm", "version": "1.10.0", "local": "rocm7.2"}

    monkeypatch.setattr(bake, "wheel_for", lambda accelerator, tag, dist: Built)
    name, contents = bake.bake("rocm", tmp_path, base="some/base:1", builder=Recorder(), base_tag="cp311")
    (recipe,) = made
    assert name == recipe.tag == "localhost/apex-rocm:1.10.0-rocm7.2-cp311" and contents.torch == "2.13.0"
    declared = {
        line.split()[1].partition("=")[0]
        for line in recipe.containerfile.read_text().splitlines()
        if line.startswith("ARG ")
    }
    assert declared == set(recipe.arguments)
    assert recipe.arguments["BASE"] == "some/base:1" and recipe.arguments["TORCH"] == ""
    assert recipe.labels == {"cell": "some/base:1 2.13.0 cp311"}


def test_docker_says_that_it_cannot_show_a_folder_of_this_machine(tmp_path):
    recipe = builder.Recipe(tmp_path / "Containerfile", tmp_path, "x", shown=[tmp_path])
    with pytest.raises(ContainerError, match="docker buildx does not show.*Run: apt-get install buildah"):
        builder.Buildx().build(recipe)


# ---- for real -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def buildah():
    try:
        return builder.find("buildah")
    except ContainerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with apex-cpu for the Python of the image, with one binding."""
    return tmp_path_factory.mktemp("dist")


def command(*arguments):
    ended = subprocess.run(
        [sys.executable, "-m", "build_matrix", *arguments], cwd=REPOSITORY, text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended


@pytest.fixture(scope="module")
def baked(buildah, image, dist):
    """The CPU image, baked and tried by the command; removed at the end."""
    try:
        pythons.find("cp311")
    except PythonMissing as error:
        pytest.skip(str(error))
    command("wheel", "cpu", "--torch=2.13.0", "--python=3.11", f"--dist={dist}")
    tag = "localhost/apex-cpu-of-tests"
    said = command(
        "bake",
        "cpu",
        f"--base={image}",
        f"--python={PYTHON}",
        "--torch=2.13.0",
        f"--tag={tag}",
        f"--dist={dist}",
    )
    assert said.stdout.split() == [tag]
    yield tag, said.stderr
    subprocess.run(["buildah", "rmi", "--force", tag], capture_output=True)


@pytest.mark.container
@long
def test_the_image_runs_the_probe_and_a_training_step(baked, buildah):
    tag, said = baked
    assert "apex 1.10.0+cpu: fine" in said and "same build of torch" in said
    assert "FusedAdam: loss" in said and "on cpu, torch 2.13.0" in said
    assert bake.check(buildah, tag, PYTHON)[0].startswith("apex 1.10.0+cpu: fine")  # and again, by itself


@pytest.mark.container
@long
def test_labels_carry_the_cell_and_the_pins(baked, buildah, image):
    tag, _ = baked
    have = buildah.labels(tag)
    cell = {name.rpartition(".")[2]: value for name, value in have.items() if name.startswith("apex.cell.")}
    assert cell["accelerator"] == "cpu" and cell["torch"].startswith("2.13.0") and cell["python"] == "cp311"
    assert have["apex.pin.torch-2.13.0"] == bake.ask(buildah, tag, PYTHON).git_version
    assert have["org.opencontainers.image.base.name"] == image
    assert have["apex.wheel"].startswith("apex_cpu-1.10.0+cpu-cp311-cp311-manylinux_2_")


@pytest.mark.container
@long
def test_a_base_with_an_apex_is_refused_and_one_with_torch_keeps_it(baked, buildah, dist, tmp_path):
    tag, _ = baked
    with pytest.raises(BuildError, match="has apex-cpu 1.10.0.cpu already"):
        bake.bake("cpu", dist, base=tag, python=PYTHON, builder=buildah, base_tag="cp311")
    (tmp_path / "Containerfile").write_text(f"FROM {tag}\nRUN {PYTHON} -m pip uninstall -q -y apex-cpu\n")
    bare, again = "localhost/apex-torch-of-tests", "localhost/apex-again-of-tests"
    buildah.build(builder.Recipe(tmp_path / "Containerfile", tmp_path, bare))
    try:
        name, contents = bake.bake(
            "cpu", dist, base=bare, python=PYTHON, tag=again, builder=buildah, base_tag="cp311"
        )
        assert name == again and contents == bake.ask(buildah, tag, PYTHON)
        first = subprocess.run(["buildah", "inspect", "--type=image", again], capture_output=True).stdout
        bake.bake("cpu", dist, base=bare, python=PYTHON, tag=again, builder=buildah, base_tag="cp311")
        assert (
            subprocess.run(["buildah", "inspect", "--type=image", again], capture_output=True).stdout == first
        )
    finally:
        subprocess.run(["buildah", "rmi", "--force", again, bare], capture_output=True)


def test_an_image_bears_the_date_of_its_commit_or_the_one_that_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    git = ["git", "-C", str(REPOSITORY), "log", "-1", "--format=%ct"]
    said = subprocess.run(git, text=True, capture_output=True)
    if not said.returncode:
        assert builder.date() == int(said.stdout) > 1_700_000_000
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    made = []
    monkeypatch.setattr(builder.Builder, "_call", lambda self, what, *command: made.append(command))
    recipe = builder.Recipe(tmp_path / "Containerfile", tmp_path, "x")
    builder.Buildah().build(recipe)
    builder.Buildx().build(recipe)
    assert "--timestamp=1790000000" in made[0] and "--build-arg=SOURCE_DATE_EPOCH=1790000000" in made[1]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "today")
    with pytest.raises(BuildError, match="SOURCE_DATE_EPOCH=today is no number of seconds"):
        builder.date()
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    monkeypatch.setattr(builder, "REPOSITORY", tmp_path)  # no checkout of git
    assert builder.date() == builder.EPOCH
