"""The distribution apex-transformer-engine: modules of apex.transformer_engine by the name transformer_engine."""

import subprocess
import sys
import zipfile

import pytest

from apex._loader import distributions, owners
from apex._loader.distributions import Distribution, Installation
from apex._loader.facts import DEGRADED, Facts
from apex._loader.machine import Machine
from build_matrix import REPOSITORY
from build_matrix.wheels import transformer_engine


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that holds what pip would unpack."""
    folder = tmp_path_factory.mktemp("engine")
    path = transformer_engine.write(folder / "dist")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "site")
    return path, folder / "site"


def run(site, code):
    code = f"import sys; sys.path[:0] = [{str(site)!r}, {str(REPOSITORY)!r}]\n" + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=300)


def test_it_is_small_and_made_again_byte_for_byte(installed, tmp_path):
    path, site = installed
    assert path.name == "apex_transformer_engine-1.10.0-py3-none-any.whl" and path.stat().st_size < 8192
    assert transformer_engine.write(tmp_path).read_bytes() == path.read_bytes()
    assert {p.name for p in site.iterdir()} == {
        "transformer_engine",
        "transformer_engine_torch.py",
        "apex_transformer_engine-1.10.0.dist-info",
    }
    text = (site / "apex_transformer_engine-1.10.0.dist-info/METADATA").read_text()
    assert "\nName: apex-transformer-engine\n" in text and "Requires-Dist" not in text
    project = transformer_engine.project()
    assert project["name"] == transformer_engine.PROJECT and project["license"] == "BSD-3-Clause"


def test_modules_are_the_same_by_both_names(installed):
    done = run(
        installed[1],
        "import transformer_engine, transformer_engine.common.recipe as recipe, importlib.util\n"
        "import transformer_engine.pytorch as te, transformer_engine.pytorch.module.linear as linear\n"
        "import apex, apex.transformer_engine.pytorch as own\n"
        "from transformer_engine.common.recipe import DelayedScaling, Format\n"
        "assert te is own and te.Linear is own.Linear is linear.Linear and te.__spec__.name.startswith('apex.')\n"
        "assert recipe.Format is Format and transformer_engine.pytorch is te\n"
        "assert transformer_engine.__version__ == apex.__version__\n"
        "assert importlib.util.find_spec('transformer_engine.nothing') is None\n"
        "import transformer_engine_torch as tex\n"
        "assert tex.DType is te.constants.DType and tex.te_gemm is te.cpp_extensions.te_gemm\n"
        "try:\n    transformer_engine.nothing\nexcept AttributeError:\n    print('told')\n",
    )
    assert done.stdout == "told\n", done.stderr


@pytest.mark.parametrize("name", ["transformer_engine", "transformer-engine-cu12"])
def test_it_refuses_beside_the_public_engine(installed, tmp_path, name):
    info = tmp_path / f"{name.replace('-', '_')}-2.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.1.0\n")
    done = run(installed[1], f"sys.path.append({str(tmp_path)!r})\nimport transformer_engine")
    assert (
        done.returncode != 0
        and "ImportError: both apex-transformer-engine and transformer-engine" in done.stderr
    )
    assert "pip uninstall" in done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), str(installed[1])])
        found = distributions.describe().engines
    assert found == ("apex-transformer-engine", name.replace("_", "-"))


def test_the_name_alone_is_another_distribution(installed, tmp_path):
    """accelerate asks importlib.metadata for it before it imports the module; its own check is not deceived."""
    path = transformer_engine.write_alias(tmp_path)
    assert path.name == "transformer_engine-1.10.0-py3-none-any.whl"
    assert transformer_engine.write_alias(tmp_path / "again").read_bytes() == path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert all(name.startswith("transformer_engine-1.10.0.dist-info/") for name in archive.namelist())
        archive.extractall(tmp_path)
    done = run(
        installed[1],
        f"sys.path.append({str(tmp_path)!r})\nimport importlib.metadata as m\n"
        "assert m.version('transformer-engine') == m.version('apex-transformer-engine') == '1.10.0'\n"
        "assert m.requires('transformer_engine') == ['apex-transformer-engine==1.10.0']\n"
        "import transformer_engine.pytorch\nprint('imported')\n",
    )
    assert done.stdout == "imported\n", done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), str(installed[1])])
        assert distributions.describe().engines == ("apex-transformer-engine",)


def told(*engines):
    own = Distribution("apex-cpu", "1.10.0+cpu", "/site")
    facts = Facts(Machine(python="cp311"), installation=Installation((own,), "/site/apex", True, engines))
    return list(owners.two_engines(facts))


def test_the_doctor_knows_both():
    assert not told() and not told("apex-transformer-engine") and not told("transformer-engine")
    (problem,) = told("apex-transformer-engine", "transformer-engine")
    assert problem.severity == DEGRADED and "transformer-engine" in problem.text
    assert problem.remedy.endswith("uninstall -y apex-transformer-engine")
    assert owners.two_engines in owners.CHECKS
