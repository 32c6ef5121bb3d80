"""libapex.so under the resolver: real library, machines written down, no GPU.

The library is the one of this tree (build/tree or APEX_TREE); without one these tests skip.
"""

import ctypes
import hashlib
import json
import threading
import warnings

import pytest

from apex._loader import environment, errors, installed, library, machine, pack_files, probe

from .described import NVRTC_130, UNIT, gpu, python

pytestmark = pytest.mark.skipif(
    installed.library_fault() is not None, reason=f"no host library here: {installed.library_fault()}"
)


@pytest.fixture
def described(monkeypatch):
    """Sets the machine that the resolver sees; everything is forgotten afterwards."""

    def use(**facts):
        facts = {"devices": (environment.cpu_device(3),), "cpu_units": (UNIT,), "sources": (UNIT,), **facts}
        monkeypatch.setattr(probe, "describe", lambda: machine.Machine(**facts))
        lib = library.load()
        monkeypatch.setattr(lib.resolver, "_warned", set())
        library.forget()
        return lib

    yield use
    library.forget()


def pack_on_disk(folder, arch, data, unit=UNIT):
    """A real pack of one unit, read back."""
    folder = folder / arch
    folder.mkdir()
    (folder / "code").write_bytes(data)
    row = {"file": "code", "sha256": hashlib.sha256(data).hexdigest(), "kernels": {}}
    kind = "ptx" if arch.startswith("compute") else "cubin"
    manifest = {"format": 1, "arch": arch, "vendor": "cuda", "kind": kind, "units": {unit: row}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return pack_files.read(folder)


def test_cpu_units_are_the_exported_ones():
    exported = ctypes.CDLL(str(installed.library()))
    assert {"multi_tensor_adam", "layer_norm"} <= set(installed.cpu_units())
    for unit in installed.cpu_units():
        assert hasattr(exported, f"apex_{unit}") or hasattr(exported, f"apex_{unit}_forward"), unit


def test_cpu(described):
    lib = described()
    assert lib.resolve("cpu", 0, UNIT) == library.CPU
    assert library.choices()["cpu", 0, UNIT].taken.variant == "cpu"


def test_torch_s_cpu_index_is_minus_one(described):
    assert described().resolve("cpu", -1, UNIT) == library.CPU


def test_forced_reference(described):
    lib = described(env={"APEX_VARIANT": "reference"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lib.resolve("cpu", 0, UNIT) == library.REFERENCE


def test_a_pack_is_registered(described, cubin, tmp_path):
    lib = described(
        devices=(gpu("sm_86", 0), gpu("sm_90", 1)), packs=(pack_on_disk(tmp_path, "sm_80", cubin("sm_80")),)
    )
    assert lib.resolve("cuda", 0, UNIT) == library.KERNEL
    with pytest.warns(errors.SlowPathWarning, match="own major"):
        assert lib.resolve("cuda", 1, UNIT) == library.REFERENCE  # report 13: said once, no launch, no fault


def test_the_warning_comes_once_a_unit_and_arch(described):
    lib = described(devices=(gpu("sm_90", 0), gpu("sm_90", 1)))
    with pytest.warns(errors.SlowPathWarning) as caught:
        assert [lib.resolve("cuda", index, UNIT) for index in (0, 1)] == [library.REFERENCE] * 2
    assert len(caught) == 1


def test_an_exception_is_stored_and_raised_not_printed(described, capfd):
    lib = described(devices=())
    with pytest.raises(errors.ResolverError, match="torch has no device cuda:3"):
        lib.resolve("cuda", 3, UNIT)
    assert capfd.readouterr().err == ""
    with pytest.raises(errors.ResolverError):  # asked again, not remembered
        lib.resolve("cuda", 3, UNIT)


def test_any_exception_keeps_its_cause(described, monkeypatch, capfd):
    lib = described()
    monkeypatch.setattr(lib.resolver, "answer", lambda *a: 1 // 0)
    with pytest.raises(errors.ResolverError) as caught:
        lib.resolve("cpu", 0, UNIT)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert capfd.readouterr().err == ""


def test_strict(described):
    lib = described(devices=(gpu("sm_90"),), env={"APEX_STRICT": "1"})
    with pytest.raises(errors.VariantUnavailableError, match="APEX_STRICT") as caught:
        lib.resolve("cuda", 0, UNIT)
    assert caught.value.wanted == UNIT and "cuda:0 sm_90" in caught.value.found and caught.value.remedy


def test_a_compiler_that_fails_gives_way_to_the_next_variant(described, monkeypatch):
    from apex._loader import jit

    def fail(unit, target, driver):
        raise errors.CompileError("NVRTC cannot compile it")

    monkeypatch.setattr(jit, "build", fail)
    lib = described(devices=(gpu("sm_90"),), compilers=(NVRTC_130,), cuda_driver=(13, 0))
    with pytest.warns(errors.SlowPathWarning, match="NVRTC cannot compile it"):
        assert lib.resolve("cuda", 0, UNIT) == library.REFERENCE


def test_a_file_that_vanished_gives_way_to_the_next_variant(described, cubin, tmp_path):
    pack = pack_on_disk(tmp_path, "sm_90", cubin("sm_90"))
    assert pack.units[UNIT].fault is None
    (tmp_path / "sm_90" / "code").unlink()
    lib = described(devices=(gpu("sm_90"),), packs=(pack,))
    with pytest.warns(errors.SlowPathWarning, match="vanished"):
        assert lib.resolve("cuda", 0, UNIT) == library.REFERENCE


def test_jit_compiles_and_registers(described, nvrtc_130, tmp_path, monkeypatch):
    from apex._loader.jit import nvrtc

    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    lib = described(devices=(gpu("sm_90"),), compilers=(nvrtc.describe(nvrtc_130),), cuda_driver=(13, 0))
    assert lib.resolve("cuda", 0, UNIT) == library.KERNEL
    assert len([path for path in tmp_path.iterdir() if path.suffix == ""]) == 1


def test_sixteen_threads_at_once(described):
    lib = described()
    answers = []

    def ask():
        answers.append(lib.resolve("cpu", 0, UNIT))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [library.CPU] * 16


def test_errors_belong_to_their_thread(described, monkeypatch):
    lib = described()

    def answer(platform, device, unit):
        raise RuntimeError(threading.current_thread().name)

    monkeypatch.setattr(lib.resolver, "answer", answer)
    seen = {}

    def ask():
        try:
            lib.resolve("cpu", 0, UNIT)
        except errors.ResolverError as error:
            seen[threading.current_thread().name] = str(error.__cause__)

    threads = [threading.Thread(target=ask, name=f"t{k}") for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {f"t{k}": f"t{k}" for k in range(8)}


def test_an_old_refusal_does_not_take_another_error_s_place():
    """Whoever calls an op of torch.ops gets C++'s error; the exception behind it stayed, and came up at the next."""
    code = """
import torch
from apex import _loader
from apex._loader import library
from apex.normalization import FusedLayerNorm
if _loader.load().kind != "exact":
    raise SystemExit("skip")
def refuse(*arguments):
    raise ValueError("refused")
resolver, answer = library.load().resolver, library.load().resolver.answer
resolver.answer = refuse
try:
    flag = torch.zeros(1, dtype=torch.int32)
    torch.ops.apex.multi_tensor_scale([torch.ones(3)], [torch.empty(3)], flag, 2.0)
except RuntimeError as error:
    assert "refused" in str(error), error
resolver.answer = answer
try:
    FusedLayerNorm(8)(torch.ones(3, 7))
except Exception as error:
    print(type(error).__name__, "refused" in str(error))
"""
    done = python(code, check=False)
    if "skip" in done.stderr:
        pytest.skip("the built binding is for another torch")
    assert done.stdout.endswith("False\n") and done.stdout != "ResolverError False\n", (
        done.stdout + done.stderr
    )


def test_what_is_stored_is_raised_where_it_is_spoken_of():
    for said, raised in (("op: no such variant", True), (None, True), ("out of memory", False)):
        library._stored.error = errors.VariantUnavailableError("no such variant", remedy="another")
        if raised:
            with pytest.raises(errors.VariantUnavailableError):
                library.raise_stored(said)
        else:
            library.raise_stored(said)
        assert library._stored.error is None


def test_a_forked_child_can_ask(described):
    import os

    lib = described()
    lib.resolve("cpu", 0, UNIT)
    child = os.fork()
    if child == 0:
        try:
            lib.c.apex_forget_choices()
            os._exit(0 if lib.resolve("cpu", 0, UNIT) == library.CPU else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_forget_reads_the_environment_again():
    code = f"""
import os
from apex._loader import library
lib = library.load()
print(lib.resolve("cpu", 0, {UNIT!r}))
os.environ["APEX_VARIANT"] = "reference"
print(lib.resolve("cpu", 0, {UNIT!r}))
library.forget()
print(lib.resolve("cpu", 0, {UNIT!r}))
"""
    assert python(code).stdout.split() == ["2", "2", "3"]


def test_no_gpu_library_is_a_hard_dependency():
    """Report 10: importing must not need the driver, so no library lists it."""
    from apex._loader import elf, layout

    for path in layout.libraries().rglob("*.so*"):
        needed = elf.read_shared_library(path).needed
        assert not [name for name in needed if "cuda" in name or "amdhip" in name or "nvrtc" in name], path
