"""What a source build is asked for, and what it says when something is missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_matrix import REPOSITORY, backend
from build_matrix.errors import BuildError, GateError, RequirementMissing
from build_matrix.parts import gate, packs
from build_matrix.parts.inspect_code import Inspected, Kernel
from build_matrix.spec import identity, matrix
from build_matrix.spec.archs import Arch
from build_matrix.spec.registry import Registry, device_units
from build_matrix.toolchains import headers
from build_matrix.wheels import source_install

REGISTRY = Registry.load()


def test_options_are_taken_out_of_the_command_line():
    arguments = ["setup.py", "--cuda_ext", "bdist_wheel", "--cpp_ext", "--dist-dir", "x"]
    assert source_install.take_options(arguments, REGISTRY) == ["--cuda_ext", "--cpp_ext"]
    assert arguments == ["setup.py", "bdist_wheel", "--dist-dir", "x"]


@pytest.mark.parametrize(
    ("vendor", "text", "archs"),
    [
        ("cuda", "9.0", ["sm_90"]),
        ("cuda", "8.0;9.0+PTX", ["sm_80", "sm_90", "compute_90"]),
        ("cuda", "8.0 9.0a, 12.0", ["sm_80", "sm_90", "sm_120"]),
        ("rocm", "gfx90a:sramecc+:xnack-;gfx942", ["gfx90a", "gfx942"]),
    ],
)
def test_arch_lists_of_torch_are_understood(vendor, text, archs):
    variable = source_install.ARCH_VARIABLES[vendor]
    assert source_install.archs(vendor, {variable: text}) == archs


def test_no_arch_list_means_the_matrix_and_nonsense_is_named():
    assert "sm_90" in source_install.archs("cuda", {}) and "gfx942" in source_install.archs("rocm", {})
    with pytest.raises(BuildError, match="'Hopper'"):
        source_install.archs("cuda", {"TORCH_CUDA_ARCH_LIST": "Hopper"})


class Compiler:
    name, version = "nvcc", "13.0.88"

    def knows(self, arch: Arch) -> bool:
        return arch.name in ("sm_80", "sm_90")


def test_an_arch_that_was_named_must_be_known(monkeypatch):
    monkeypatch.setattr(source_install, "of_vendor", lambda vendor: [Compiler()])
    assert list(source_install.toolchains("cuda", ["sm_70", "sm_90"], False, "X")) == ["sm_90"]
    with pytest.raises(BuildError, match="sm_70: no compiler here knows it"):
        source_install.toolchains("cuda", ["sm_70", "sm_90"], True, "X")


def test_a_missing_compiler_is_named_with_the_variable_and_the_command(monkeypatch):
    monkeypatch.setattr(source_install, "of_vendor", lambda vendor: [])
    with pytest.raises(RequirementMissing, match="APEX_BUILD_AMP_C needs it. Run: nox -s toolchain"):
        source_install.toolchains("cuda", ["sm_90"], False, "APEX_BUILD_AMP_C")


def test_missing_torch_names_build_isolation(monkeypatch):
    monkeypatch.setattr(headers, "installed_version", lambda: None)
    with pytest.raises(RequirementMissing, match="--no-build-isolation"):
        source_install.request([])


def test_packs_of_one_extension_hold_its_ops_and_the_helpers():
    asked = REGISTRY.asked({"APEX_BUILD_AMP_C": "1"})
    units = set(source_install.units(asked))
    assert set(asked[0].ops) - set(asked[0].host_ops) <= units
    assert units - set(REGISTRY.device_ops()) == {p.stem for p in device_units()} - set(REGISTRY.device_ops())
    other = set(source_install.units(REGISTRY.asked({"APEX_BUILD_XENTROPY": "1"})))
    assert not other & set(asked[0].ops)


def test_build_version_replaces_the_version(monkeypatch):
    assert source_install.version() == identity.version()
    monkeypatch.setenv("BUILD_VERSION", "1.10.1+mine")
    assert source_install.version() == "1.10.1+mine"


def setup(*arguments, **variables):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **variables}
    command = [sys.executable, "setup.py", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, encoding="utf-8", capture_output=True)


def test_setup_py_says_its_name_and_version_and_refuses_unknown_variables():
    assert setup("--name", "--version", BUILD_VERSION="9.9").stdout.split()[-2:] == ["apex", "9.9"]
    done = setup("--version", APEX_BUILD_AMP_D="1")
    assert done.returncode and "APEX_BUILD_AMP_D names no extension" in done.stderr
    assert setup("--cpp_ext", "--version").returncode == 0
    for extension in (e for e in REGISTRY.extensions if e.state == "planned"):
        done = setup("--version", **{extension.variable: "1"})
        said = f"{extension.variable} asks for what is not in this build: {extension.name}"
        assert done.returncode and said in done.stderr


def test_on_windows_the_wheel_is_named():
    program = "import runpy, sys; sys.platform = 'win32'; runpy.run_path('setup.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode == 1 and done.stderr.startswith("apex: this source tree is built on Linux")
    assert "pip install apex-cuda" in done.stderr


def test_make_clean_leaves_only_sources(tmp_path):
    ignored = (REPOSITORY / ".gitignore").read_text().split()
    assert {"/build/", "/dist/", "/.whl/", "/.whl.lock", ".nox/", ".ruff_cache/", ".pytest_cache/"} <= set(
        ignored
    )
    # What a compiler leaves among the sources by hand is not an output of a command; .carry is a person's own.
    folders = [name.strip("/") for name in ignored if name.endswith("/") and "carry" not in name]
    folders = [name.replace("*", "x") for name in folders if name != ".toolchains"]
    for name in (*folders, "build/store", "apex/__pycache__", ".toolchains/x"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / ".whl.lock").write_text("")
    (tmp_path / "apex/__init__.py").write_text("")
    shutil.copyfile(REPOSITORY / "Makefile", tmp_path / "Makefile")
    if shutil.which("make") is None:
        pytest.skip("make is not here")
    subprocess.run(["make", "--quiet", "clean"], cwd=tmp_path, check=True)
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")}
    assert left == {"Makefile", "apex", "apex/__init__.py", ".toolchains", ".toolchains/x"}


class Nvrtc(Compiler):
    name = "nvrtc"

    def __init__(self, version):
        self.version = version

    def knows(self, arch: Arch) -> bool:
        return True


def test_compilers_are_taken_in_the_order_of_the_matrix(monkeypatch):
    """NVRTC 12.8 compiles sm_70 with spills where 12.3, which the matrix names for it, does not."""
    old, middle, new = Nvrtc("12.3.107"), Nvrtc("12.8.93"), Nvrtc("13.0.88")
    monkeypatch.setattr(source_install, "of_vendor", lambda vendor: [new, middle, old])
    chosen = source_install.toolchains("cuda", ["sm_70", "compute_120", "sm_90", "sm_87"], True, "X")
    # sm_87 is not in the matrix: the first that knows it.
    assert chosen == {"sm_70": old, "compute_120": middle, "sm_90": new, "sm_87": new}
    monkeypatch.setattr(source_install, "of_vendor", lambda vendor: [Nvrtc("12.30.1"), middle])
    assert source_install.toolchains("cuda", ["sm_70"], True, "X")["sm_70"].version == "12.30.1"


def test_spills_are_told_in_a_source_install_and_stop_a_release(capsys):
    kernel = Inspected(
        "sm_70", {"multi_tensor_adam_f32": Kernel(registers=64, max_threads=512, spill_bytes=8)}
    )
    of = ("multi_tensor_adam", b"", kernel, Arch("sm_70"), matrix.load(), "nvrtc 12.8.93")
    words = "multi_tensor_adam for sm_70 by nvrtc 12.8.93"
    assert gate.check(*of, lenient=True) == [f"{words}: multi_tensor_adam_f32: spills 8 bytes (accepted: 0)"]
    with pytest.raises(GateError, match=f"{words} does not pass its gate:\n.*spills 8 bytes"):
        gate.check(*of)


def test_a_code_object_that_may_spill_is_never_one_of_a_release():
    class Known(Nvrtc):
        headers = None

        def describe(self):
            return {"name": self.name, "version": self.version, "sha256": "0"}

        def flags(self, arch):
            return []

    of = ("sm_70", Known("12.3.107"), ["multi_tensor_adam"])
    assert packs.units(*of, lenient=True)[0].key != packs.units(*of)[0].key


@pytest.mark.parametrize(
    "given", ["--cpp_ext --cuda_ext", ["--cpp_ext", "--cuda_ext"], ["--cpp_ext --cuda_ext"]]
)
@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_options_in_one_setting_are_as_many_as_they_are(monkeypatch, given, hook):
    """pip before 23.1 keeps the last of two settings of one name; setuptools splits a text, and no list."""
    taken = []
    monkeypatch.setattr(backend.build_meta, hook, lambda place, settings, metadata: taken.append(settings))
    getattr(backend, hook)("x", {"--build-option": given, "other": "a b"})
    assert taken == [{"--build-option": ["--cpp_ext", "--cuda_ext"], "other": "a b"}]
    asked = source_install.take_options(["setup.py", *taken[0]["--build-option"]], REGISTRY)
    assert asked == ["--cpp_ext", "--cuda_ext"]
