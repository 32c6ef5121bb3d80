"""GitHub's jobs are the matrix, and the workflow file is what the matrix makes."""

import fnmatch
import json
import shlex
import subprocess
import sys

import yaml
from click.testing import CliRunner

from build_matrix import REPOSITORY, commands
from build_matrix.commands import farm
from build_matrix.commands import plan as plan_command
from build_matrix.farm import plan, workflow
from build_matrix.farm.plan import Selection
from build_matrix.spec import matrix

JOBS = workflow.jobs(plan.resolve(Selection()))


def options(row):
    """What `nox -s farm` would make of a row's options, as a plan."""
    asked = farm.command.make_context("farm", shlex.split(row["options"])).params
    tags = tuple(f"cp{tag.replace('.', '')}" for tag in asked["tags"])
    chosen = Selection(
        *(asked["accelerators"], asked["archs"], asked["torches"], tags, asked["only"]),
        platforms=asked["platforms"],
    )
    return plan.make(chosen, check=False)


def test_the_workflow_is_current():
    assert workflow.FILE.read_text(encoding="utf-8") == workflow.render(), (
        "run: python -m build_matrix.farm.workflow"
    )


def test_its_jobs_are_the_matrix():
    said = yaml.safe_load(workflow.FILE.read_text(encoding="utf-8"))["jobs"]
    assert {name: said[name]["strategy"]["matrix"] for name in JOBS} == JOBS


def test_the_parts_together_are_the_release_and_none_is_made_twice():
    whole = plan.make(Selection(), check=False).steps
    parts = [step.id for row in JOBS["parts"]["include"] for step in options(row).steps]
    assert sorted(parts) == sorted(step.id for step in whole if step.kind != "wheel")
    wheels = [s for row in JOBS["wheels"]["include"] for s in options(row).steps if s.kind == "wheel"]
    assert sorted(wheels, key=str) == sorted((step for step in whole if step.kind == "wheel"), key=str)


def test_every_job_brings_the_toolchains_of_its_archs():
    for row in [*JOBS["parts"]["include"], *JOBS["wheels"]["include"]]:
        steps = options(row).steps
        archs = {step.arguments[0] for step in steps if step.kind == "code"}
        wanted = {matrix.load().pack(a).toolchains[0] for a in archs}
        platforms = {step.arguments[-1] for step in steps} & {p.name for p in matrix.load().platforms}
        wanted |= {matrix.load().platform(name).toolchain for name in platforms} - {""}
        assert set(row["toolchains"].split()) == wanted, row["name"]


def test_the_command_prints_json_and_nothing_else():
    command = [sys.executable, "-m", "build_matrix", "plan", "--format", "github"]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode == 0 and json.loads(done.stdout) == JOBS
    part = CliRunner().invoke(
        plan_command.command, ["--format", "github", "--arch", "sm_90", "--torch", "2.8.0"]
    )
    assert [row["name"] for row in json.loads(part.output)["wheels"]["include"]] == [
        "apex-cuda",
        "apex-cuda linux_aarch64",
        "apex-cuda win_amd64",
    ]


def test_a_wheel_that_is_python_alone_asks_for_no_part():
    jobs = workflow.jobs(plan.resolve(Selection(accelerators=("npu",))))
    assert [row["name"] for row in jobs["wheels"]["include"]] == ["apex-npu"] and not jobs["parts"]["include"]


def test_parts_are_of_platforms_that_a_compiled_wheel_is_for():
    """There is none of ROCm for aarch64, where the one for NPUs serves, too."""
    chosen = Selection(accelerators=("rocm", "npu"), archs=("gfx942",), torches=("2.13.0",))
    jobs = workflow.jobs(plan.resolve(chosen))
    names = [row["name"] for row in jobs["parts"]["include"]]
    assert names == ["library", "torch 2.13.0", "packs clang-hip-7.2"] and len(jobs["wheels"]["include"]) == 2
    steps = plan.make(chosen, check=False).steps
    assert not [step.id for step in steps if "linux_aarch64" in step.id]
    assert [step.name for step in steps if step.kind == "wheel"][-1] == "apex-npu py3"


def test_a_download_may_write_where_root_was_before():
    """Toolchains are brought as root, and the digests of compilers are remembered in build/store."""
    steps = yaml.safe_load(workflow.FILE.read_text(encoding="utf-8"))["jobs"]["wheels"]["steps"]
    (at,) = [n for n, step in enumerate(steps) if "download-artifact" in step.get("uses", "")]
    assert "sudo chown" in steps[at - 1]["run"] and steps[at]["with"]["path"].startswith("build/")
    assert "nox -s toolchain" in steps[at - 2]["run"]


def test_windows_tries_the_wheel_that_was_built_for_it():
    """Every op by the portable binding; from a folder in which the checkout's apex is not found first."""
    job = yaml.safe_load(workflow.FILE.read_text(encoding="utf-8"))["jobs"]["windows"]
    assert job["runs-on"].startswith("windows-")
    (download,) = [s["with"] for s in job["steps"] if "download-artifact" in s.get("uses", "")]
    assert download["pattern"] in [row["name"] for row in JOBS["wheels"]["include"]]
    runs = [step for step in job["steps"] if "run" in step and "pip" not in step["run"]]
    assert [step["run"] for step in runs] == ["python -m apex", "python ../tests/L0/binding_values.py"]
    assert all(step["working-directory"] == download["path"] for step in runs)
    assert runs[1]["env"] == {"APEX_BINDING": "portable"}
    assert (REPOSITORY / "tests/L0/binding_values.py").is_file()


def test_the_last_job_lays_all_wheels_together():
    """By the artifacts' own names, with a session that there is."""
    said = yaml.safe_load(workflow.FILE.read_text(encoding="utf-8"))["jobs"]
    assert said["release"]["needs"] == "wheels"
    (download,) = [s["with"] for s in said["release"]["steps"] if "download-artifact" in s.get("uses", "")]
    (upload,) = [s["with"] for s in said["wheels"]["steps"] if "upload-artifact" in s.get("uses", "")]
    assert upload["name"] == "${{ matrix.name }}" and upload["path"].startswith(f"{download['path']}/")
    names = [row["name"] for row in JOBS["wheels"]["include"]]
    assert names == fnmatch.filter(names, download["pattern"]) and download["merge-multiple"]
    (run,) = [step["run"] for step in said["release"]["steps"] if "run" in step]
    assert run.endswith("nox -s publish") and "publish" in commands.NAMES
