"""Reading code objects and shared libraries, on files that the real compilers made."""

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
