"""Packs are really compiled here, for every arch whose toolchain this machine has, and pass their gate."""

import json
from dataclasses import replace

import pytest

from apex._loader.elf import Elf
from build_matrix.errors import CompileError, GateError
from build_matrix.parts import gate, msgpack, packs
from build_matrix.parts.inspect_code import Inspected, Kernel, inspect
from build_matrix.spec import matrix
from build_matrix.spec.archs import Arch
from build_matrix.spec.registry import device_units
from build_matrix.toolchains import ptxas

UNIT = "multi_tensor_scale"
ARCHS = ["sm_70", "sm_80", "sm_90", "compute_80", "gfx90a", "gfx942", "gfx1100", "gfx9-4-generic"]


def compiled(arch, toolchain_of):
    (source,) = [path for path in device_units() if path.stem == UNIT]
    made = toolchain_of(arch).compile(source, Arch(arch))
    return made.image, inspect(made.image, Arch(arch).kind, made.spills)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_pack_says_what_it_is(arch, toolchain_of, store, tmp_path):
    toolchain = toolchain_of(arch)
    units = packs.units(arch, toolchain, [UNIT])
    manifest = packs.assemble(arch, toolchain, [store.build(unit) for unit in units], tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest
    assert manifest["arch"] == arch and manifest["compiler"]["sha256"]
    entry = manifest["units"][UNIT]
    assert (tmp_path / entry["file"]).stat().st_size == entry["bytes"]
    assert f"{UNIT}_f32_f32" in entry["kernels"]
    for kernel in entry["kernels"].values():
        assert kernel["wave_size"] == (64 if arch.startswith("gfx9") else 32)
        assert kernel["spill_bytes"] == 0
        assert Arch(arch).kind == "ptx" or kernel["registers"] > 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_70", "gfx942"])
def test_code_objects_are_the_same_twice(arch, toolchain_of):
    assert compiled(arch, toolchain_of)[0] == compiled(arch, toolchain_of)[0]


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_a_compiler_leaves_nothing_in_another_folder_for_temporary_files(
    arch, toolchain_of, tmp_path, monkeypatch
):
    """A compiler in a chroot has no such folder."""
    found = toolchain_of(arch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert compiled(arch, lambda _: found)[0]
    assert not list(tmp_path.iterdir())


def test_two_toolchains_see_the_same_kernels(toolchain_of):
    one, two = compiled("sm_90", toolchain_of)[1], compiled("gfx942", toolchain_of)[1]
    assert set(one.kernels) == set(two.kernels)


def test_the_gate_finds_another_arch(toolchain_of):
    image, code = compiled("sm_80", toolchain_of)
    assert not gate.faults(UNIT, image, code, Arch("sm_80"), matrix.load())
    assert gate.faults(UNIT, image, code, Arch("sm_90"), matrix.load()) == [
        "the object says it is for sm_80, not sm_90"
    ]


def test_the_gate_finds_another_amd_machine(toolchain_of):
    image, code = compiled("gfx942", toolchain_of)
    faults = gate.faults(UNIT, image, code, Arch("gfx1100"), matrix.load())
    assert any("for gfx942" in fault for fault in faults)
    assert any("machine 0x4c, not 0x41" in fault for fault in faults)
    assert any("wave size 64, not 32" in fault for fault in faults)


def test_the_gate_finds_an_array_in_an_amd_card_s_memory(toolchain_of):
    image, code = compiled("gfx942", toolchain_of)
    name, kernel = next(iter(code.kernels.items()))
    for spilled, stack, found in ((0, 0, 0), (212, 216, 0), (352, 332, 0), (0, 48, 1)):
        of = Inspected("gfx942", {name: replace(kernel, spill_bytes=spilled, stack_bytes=stack)})
        faults = gate.faults(UNIT, image, of, Arch("gfx942"), matrix.load())
        assert len(faults) == found and all("48 bytes of a thread lie in memory" in fault for fault in faults)


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        ({}, "holds no kernel"),
        ({"other_f32": Kernel(registers=8)}, "does not begin with"),
        ({f"{UNIT}_f32": Kernel(registers=0)}, "no register count"),
        ({f"{UNIT}_f32": Kernel(registers=8, spill_bytes=4)}, "spills 4 bytes"),
        ({f"{UNIT}_f32": Kernel(registers=128, max_threads=1024)}, "cannot be launched"),
        ({f"{UNIT}_f32": Kernel(registers=8, wave_size=64)}, "wave size 64"),
    ],
)
def test_the_gate_names_each_fault(kernels, words):
    with pytest.raises(GateError, match=words):
        gate.check(UNIT, b"", Inspected("sm_90", kernels), Arch("sm_90"), matrix.load())


def test_the_gate_stops_code_over_its_budget_where_it_is_compiled():
    good = Inspected("sm_90", {f"{UNIT}_f32": Kernel(registers=8)})
    allowed = matrix.load().unit_budget(UNIT, "sm_90")
    assert gate.check(UNIT, bytes(allowed), good, Arch("sm_90"), matrix.load()) == []
    of = (UNIT, bytes(allowed + 1), good, Arch("sm_90"), matrix.load())
    with pytest.raises(GateError, match=f"{UNIT} for sm_90: {allowed + 1} bytes are over its budget"):
        gate.check(*of)
    assert gate.check(*of, lenient=True) == []  # a source install runs what its compiler made


def test_archs_of_one_build_must_agree_on_kernels():
    of_cuda = replace(matrix.load(), kernels_of_a_vendor=({"kernels": "*_copies_*", "vendor": "cuda"},))
    whole = {"x", "a_copies_f16"}
    gate.check_same_kernels({"sm_80": {"a": whole}, "sm_90": {"a": whole}, "gfx942": {"a": {"x"}}}, of_cuda)
    with pytest.raises(GateError, match="sm_90: a lacks a_copies_f16$"):
        gate.check_same_kernels(
            {"sm_80": {"a": whole}, "sm_90": {"a": {"x"}}, "gfx942": {"a": {"x"}}}, of_cuda
        )
    with pytest.raises(GateError, match="gfx942: a lacks x$"):
        gate.check_same_kernels({"sm_80": {"a": whole}, "gfx942": {"a": set()}}, of_cuda)


def test_a_compiler_s_own_words_are_kept(toolchain_of, tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text("this is no code\n")
    with pytest.raises(CompileError) as caught:
        toolchain_of("sm_80").compile(source, Arch("sm_80"))
    assert "error" in caught.value.log and "broken.cu" in str(caught.value)


def test_editing_a_header_changes_the_unit_and_nothing_else_does(toolchain_of, tmp_path, monkeypatch):
    from build_matrix.spec import registry

    for path in device_units()[0].parent.glob("*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(registry, "device_units", lambda: sorted(tmp_path.glob("*.cu")))
    toolchain = toolchain_of("sm_80")

    def keys():
        return {unit.name: unit.key for unit in packs.units("sm_80", toolchain)}

    before = keys()
    header = tmp_path / f"{UNIT}.h"
    header.write_text(header.read_text() + "\n// changed\n")
    changed = {name for name, key in keys().items() if before[name] != key}
    assert changed == {f"sm_80/{UNIT}"}


def test_accepting_a_spill_changes_the_unit_and_nothing_else_does(toolchain_of, monkeypatch):
    toolchain, known = toolchain_of("sm_80"), matrix.load()

    def keys():
        return {unit.name: unit.key for unit in packs.units("sm_80", toolchain)}

    before = keys()
    spill = {"kernel": f"{UNIT}_f32_f32", "archs": ["sm_80"], "bytes": 8, "reason": "a test's"}
    monkeypatch.setattr(matrix, "load", lambda: replace(known, spills=(*known.spills, spill)))
    changed = {name for name, key in keys().items() if before[name] != key}
    assert changed == {f"sm_80/{UNIT}"}


def test_files_that_are_no_code_objects_are_refused():
    for kind, image in [("cubin", b"\x7fELF"), ("hsaco", b"__CLANG_OFFLOAD_BUNDLE__"), ("cubin", b"")]:
        with pytest.raises(ValueError):
            inspect(image, kind)
    with open("/proc/self/exe", "rb") as program, pytest.raises(ValueError, match="machine"):
        inspect(program.read(), "hsaco")


def test_elf_names_sections():
    with open("/proc/self/exe", "rb") as program:
        elf = Elf(program.read())
    assert any(section.name == ".dynsym" for section in elf.sections)


def test_msgpack_of_the_specification():
    assert msgpack.decode(b"\x82\xa3one\x01\xa4list\x94\xc0\xc3\xff\xcd\x01\x00") == {
        "one": 1,
        "list": [None, True, -1, 256],
    }
    assert msgpack.decode(b"\xdc\x00\x02\xd9\x01a\xd1\xff\x00") == ["a", -256]
    with pytest.raises(ValueError, match="0xca"):
        msgpack.decode(b"\xca\x00\x00\x00\x00")


def test_spills_are_read_from_the_words_of_ptxas():
    log = "Function properties for k1\n 8 bytes stack frame, 16 bytes spill stores, 4 bytes spill loads\n"
    log += "Function properties for k2\n 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    assert ptxas.spills(log) == {"k1": 16, "k2": 0}
