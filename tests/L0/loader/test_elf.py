"""Reading code objects and shared libraries, on files that the real compilers made."""

import random
import struct

import pytest

from apex._loader import elf

KERNELS = ("unit_one_f16", "unit_one_f32")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_cubin(cubin, arch):
    found = elf.read_code_object(cubin(arch))
    assert (found.kind, found.arch, found.kernels) == ("cubin", arch, KERNELS)
    assert found.toolkit >= (12, 0)


def test_ptx(cubin):
    found = elf.read_code_object(cubin("compute_80"))
    assert (found.kind, found.arch, found.kernels) == ("ptx", "compute_80", KERNELS)
    assert found.version >= (7, 0) and found.toolkit >= (11, 0)


@pytest.mark.parametrize(
    ("target", "arch", "features", "version"),
    [
        ("gfx942", "gfx942", (), 5),
        ("gfx1100", "gfx1100", (), 5),
        ("gfx90a:xnack-", "gfx90a", ("xnack-",), 5),
        ("gfx9-4-generic", "gfx9-4-generic", (), 6),
    ],
)
def test_hsaco(hsaco, target, arch, features, version):
    found = elf.read_code_object(hsaco(target))
    assert (found.kind, found.arch, found.features, found.version) == ("hsaco", arch, features, version)
    assert found.kernels == KERNELS


def test_a_cut_object_is_refused_at_every_length(cubin):
    whole = cubin("sm_80")
    for length in range(0, len(whole), 97):
        with pytest.raises(elf.NotElf):
            elf.read_code_object(whole[:length])


def test_cut_ptx_is_refused(cubin):
    whole = cubin("compute_80")
    with pytest.raises(elf.NotElf):
        elf.read_code_object(whole[: whole.rindex(b"}")])


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"hello" * 40, b"__CLANG_OFFLOAD_BUNDLE__" + bytes(100)])
def test_other_bytes_are_refused(data):
    with pytest.raises(elf.NotElf):
        elf.read_code_object(data)


def test_a_host_library_is_no_code_object(shared_library):
    with pytest.raises(elf.NotElf, match="not a GPU code object"):
        elf.read_code_object(shared_library("libx.so", "libx.so").read_bytes())


def test_dynamic_section(shared_library):
    needed = shared_library("lib/libneeded.so.4", "libneeded.so.4")
    path = shared_library("libuser.so", "libuser.so.1", needed=[needed], runpath="$ORIGIN/lib")
    found = elf.read_shared_library(path)
    assert found.soname == "libuser.so.1" and "libneeded.so.4" in found.needed
    assert found.runpath == (f"{path.parent}/lib",)
    names = {symbol.name for symbol in elf.Elf(path.read_bytes()).symbols(dynamic=True) if symbol.defined}
    assert "marker" in names


def _with_section(data, number, offset, form, value):
    """The file with one field of one row of its section table changed."""
    changed = bytearray(data)
    table, size = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 58)[0]
    struct.pack_into(form, changed, table + size * number + offset, value)
    return bytes(changed)


def test_tables_that_are_damaged_are_refused_by_name(shared_library):
    """struct.error and IndexError went through everything that describes a machine."""
    data = shared_library("libx.so", "libx.so").read_bytes()
    sections = struct.unpack_from("<H", data, 60)[0]
    told = 0
    for number in range(sections):
        size = struct.unpack_from("<Q", data, struct.unpack_from("<Q", data, 40)[0] + 64 * number + 32)[0]
        for offset, form, value in (
            (32, "<Q", max(size - 1, 0)),
            (40, "<I", 9999),
            (24, "<Q", 3),
            (32, "<Q", 2**60),
        ):
            try:
                file = elf.Elf(_with_section(data, number, offset, form, value))
                file.symbols(), file.symbols(dynamic=True), file.dynamic(), file.notes()
            except elf.NotElf:
                told += 1
    assert told > sections  # every reach past the end, and what is wrong with tables that are read
    odd = bytearray(data)
    struct.pack_into("<H", odd, 58, 1)
    with pytest.raises(elf.NotElf, match="has 1 bytes"):
        elf.Elf(bytes(odd))


@pytest.mark.parametrize("arch", ["sm_80", "compute_80"])
def test_random_damage_is_refused_or_read(cubin, arch):
    whole, generator = cubin(arch), random.Random(0)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(generator.choice((1, 4, 30))):
            data[generator.randrange(min(len(data), generator.choice((64, 4096, len(data)))))] = (
                generator.randrange(256)
            )
        try:
            elf.read_code_object(bytes(data))
        except elf.NotElf as error:
            assert str(error)
