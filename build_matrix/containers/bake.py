"""Images with apex installed from the project's index: which wheel and torch go onto a base, and what its labels say.

Nothing here needs a GPU. The base is asked for its Python and its torch by running it.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.containers import builder as builders
from build_matrix.containers import pip_settings
from build_matrix.containers.wheels import LOCAL_IMAGE
from build_matrix.errors import BuildError, ContainerError
from build_matrix.serve import index
from build_matrix.spec import identity, matrix
from build_matrix.store import files, foreign
from build_matrix.toolchains import package_index, torch_supply
from build_matrix.wheels import sbom
from build_matrix.wheels.wheel_file import WheelFile

PLACE = REPOSITORY / "ci/containers"
TORCH_INDEX = "https://download.pytorch.org/whl"
BROKEN = 2  # exit code of `python -m apex`
ASK = """
import importlib.metadata, importlib.util, json, re, sys
about = {"python": "cp%d%d" % sys.version_info[:2], "torch": None, "git_version": None, "apex": None}
about["pip"] = importlib.util.find_spec("pip") is not None
for name in ("apex-cpu", "apex-cuda", "apex-rocm", "apex-npu", "apex"):
    try:
        about["apex"] = f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        pass
try:
    torch = importlib.metadata.distribution("torch")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    text = open(torch.locate_file("torch/version.py")).read()
    found = re.search(r"^git_version\\b.*=\\s*['\\"]([0-9a-f]+)", text, re.M)
    about.update(torch=torch.version, git_version=found and found[1])
print(json.dumps(about))
"""


@dataclass(frozen=True)
class Contents:
    """What is in an image: its Python, its torch (2.13.0+cpu), the commit that torch was built from, its apex."""

    python: str
    torch: str | None = None
    git_version: str | None = None
    apex: str | None = None
    pip: bool = True


@dataclass(frozen=True)
class TorchFrom:
    """How torch comes into an image; `requirement` is empty where the base has one."""

    requirement: str
    index: str = ""


def ask(builder: builders.Builder, image: str, python: str) -> Contents:
    """Runs the image's Python. Raises ContainerError for an image that cannot be had, or has none."""
    try:
        answer = builder.run(image, [python, "-c", ASK])
    except ContainerError as error:
        make = f"bash {PLACE.relative_to(REPOSITORY)}/local_image.sh"
        options = f"--base {LOCAL_IMAGE} --python /opt/python/cp311-cp311/bin/python"
        raise ContainerError(
            f"{error.fault}\nWhere no image registry is reached, a base can be made here",
            f"{make}, then say {options}",
        ) from None
    if answer.returncode:
        fault = answer.stderr.strip()[-300:]
        raise ContainerError(
            f"{image} has no {python} that runs ({fault}): --python names its Python, --base another"
        )
    try:
        return Contents(**foreign.value(answer.stdout))
    except (ValueError, TypeError):
        raise ContainerError(
            f"{python} of {image} does not say what it has, but {answer.stdout[-300:]!r}: --python names its Python, "
            "--base another"
        ) from None


def default_base(tag: str) -> str:
    """The public image of that Python."""
    return f"docker.io/library/python:{matrix.dotted(tag)}-slim"


def wheel_for(accelerator: str, tag: str, dist: Path) -> WheelFile:
    """The wheel in `dist` of this version, the accelerator and Python. Raises BuildError with the command that builds
    it."""
    label = matrix.load().accelerator(accelerator).label
    found = sorted(dist.glob(f"apex_{accelerator}-{identity.version()}+{label}-{tag}-{tag}-*_x86_64.whl"))
    if not found:
        raise BuildError(
            f"{dist} holds no wheel apex-{accelerator} for {tag}. "
            f"Run: nox -s build-{accelerator} -- --python {matrix.dotted(tag)}"
        )
    return WheelFile(found[-1])


def torch_for(accelerator: str, wheel: WheelFile, tag: str, base: Contents, wanted: str | None) -> TorchFrom:
    """The torch of the base stays; else `wanted` (2.13.0, 2.13.0+cpu), else the newest that the wheel has a binding
    for. Raises BuildError where the base has another than the wanted one."""
    if base.torch:
        if wanted and wanted not in (base.torch, base.torch.partition("+")[0]):
            raise BuildError(
                f"the base has torch {base.torch}, which stays; choose a base without it for {wanted}"
            )
        return TorchFrom("")
    if wanted and "+" in wanted:
        return TorchFrom(f"torch=={wanted}")
    releases = [wanted] if wanted else [torch["release"] for torch in reversed(wheel.facts["torch"])]
    if accelerator == "cuda":
        return TorchFrom(f"torch=={releases[0]}")  # the package index has a CUDA build
    label = matrix.load().accelerator(accelerator).label
    local = [file.filename for file in package_index.configured_files("torch")]
    for release in releases:
        begin = f"torch-{release}+{label}-{tag}-"
        if any(name.startswith(begin) and name.endswith("x86_64.whl") for name in local):
            return TorchFrom(f"torch=={release}+{label}")
    there = torch_supply.PUBLIC if accelerator == "cpu" else f"{TORCH_INDEX}/{label}"
    return TorchFrom(f"torch=={releases[0]}+{label}", there)


def labels(wheel: WheelFile, base: str, torch: str, python: str) -> dict[str, str]:
    """The cell and the pins. Keys of the image specification where it has one."""
    about, facts = wheel.about(), wheel.facts
    found = {
        "org.opencontainers.image.title": facts["distribution"],
        "org.opencontainers.image.version": f"{facts['version']}+{facts['local']}",
        "org.opencontainers.image.licenses": sbom.LICENSE,
        "org.opencontainers.image.base.name": base,
        "apex.cell.accelerator": facts["accelerator"],
        "apex.cell.archs": " ".join(facts["archs"]),
        "apex.cell.torch": torch,
        "apex.cell.python": python,
        "apex.cell.platform": wheel.platform,
        "apex.wheel": wheel.path.name,
        "apex.wheel.sha256": about["sha256"],
        "apex.source.sha256": facts["source_sha256"],
    }
    if commit := _commit():
        found["org.opencontainers.image.revision"] = commit
    for release in facts["torch"]:
        found[f"apex.pin.torch-{release['release']}"] = release["git_version"]
    for compiler in filter(None, [facts["host_compiler"], *facts["toolchains"]]):
        found[f"apex.pin.{compiler['name']}"] = f"{compiler['version']} sha256:{compiler['sha256']}"
    return {name: value for name, value in found.items() if value}


def _commit() -> str:
    """The commit of the checkout, where it is one without changes."""
    git = ["git", "-C", str(REPOSITORY)]
    try:
        changed = subprocess.run(
            [*git, "status", "--porcelain"], text=True, capture_output=True, check=True
        ).stdout
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], text=True, capture_output=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return "" if changed.strip() else head


def bake(
    accelerator: str,
    dist: Path,
    *,
    base: str | None = None,
    python: str = "python3",
    torch: str | None = None,
    torch_index: str | None = None,
    tag: str | None = None,
    builder: builders.Builder,
    base_tag: str,
) -> tuple[str, Contents]:
    """Makes the image, and tries it: `python -m apex` and a training step. Returns its name and contents.

    Raises ContainerError when it cannot be made or does not work, BuildError without a wheel or torch for the base.
    """
    base = base or default_base(base_tag)
    there = ask(builder, base, python)
    if there.apex:
        raise BuildError(
            f"{base} has {there.apex} already; two hold the same files. Choose a base without it"
        )
    if not there.pip:
        raise BuildError(f"{python} of {base} has no pip: --python names another, --base a base that has it")
    wheel = wheel_for(accelerator, there.python, dist)
    supply = torch_for(accelerator, wheel, there.python, there, torch)
    facts = wheel.facts
    name = tag or f"localhost/{facts['distribution']}:{facts['version']}-{facts['local']}-{there.python}"
    settings = pip_settings.read()
    variables = dict(settings.variables)
    authority = variables.pop("PIP_CERT", None)
    with files.temporary("bake") as folder:
        context, secret = folder / "context", folder / "pip"
        index.write([wheel.path], context / "index")
        shutil.copyfile(PLACE / "install.sh", context / "install.sh")
        secret.write_text("".join(f"export {key}={shlex.quote(value)}\n" for key, value in variables.items()))
        root = matrix.load().accelerator(accelerator).roots[0]
        version = f"{facts['version']}+{facts['local']}"
        builder.build(
            builders.Recipe(
                containerfile=PLACE / "Containerfile",
                context=context,
                tag=name,
                arguments={
                    "BASE": base,
                    "PYTHON": python,
                    "TORCH": supply.requirement,
                    "TORCH_INDEX": torch_index or supply.index,
                    "APEX": f"{facts['distribution']}=={version}",
                    "ROOT": root,
                },
                labels=labels(
                    wheel, base, there.torch or supply.requirement.partition("==")[2], there.python
                ),
                secrets={"pip": secret, **({"ca": Path(authority)} if authority else {})},
                shown=[path for path in settings.paths if str(path) != authority],
            )
        )
    return name, ask(builder, name, python)


def check(builder: builders.Builder, image: str, python: str = "python3") -> list[str]:
    """Runs `python -m apex` and a training step in an image. Returns what they printed.

    Raises ContainerError when the probe calls the installation broken, or the step fails."""
    said = []
    for what, command, given, allowed in (
        ("python -m apex", [python, "-m", "apex"], "", range(BROKEN)),
        ("a training step", [python, "-"], (PLACE / "train_step.py").read_text(), (0,)),
    ):
        ended = builder.run(image, command, given)
        if ended.returncode not in allowed:
            text = (ended.stdout + ended.stderr).strip()[-2000:]
            raise ContainerError(f"{what} ended with {ended.returncode} in {image}:\n{text}\n")
        said.append(ended.stdout.strip())
    return said
