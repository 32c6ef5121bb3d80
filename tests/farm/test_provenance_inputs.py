"""What a compiler and a linker read is known by its contents, wherever it lies; a part of which nothing is known has no
digest."""

import json
import locale

import pytest

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.parts import bindings, host_library, packs
from build_matrix.spec.archs import Arch
from build_matrix.store import Store, digest
from build_matrix.toolchains import host_compiler, inputs, pythons
from build_matrix.toolchains.headers import TorchHeaders

TORCH = "#pragma once\n#include <vector>\n"


def test_a_rule_for_make_names_files():
    assert inputs.of_rule("it: a.cpp /usr/x\\ y.h \\\n /b$$c.h \\\n d\\#e.h\n") == [
        "a.cpp",
        "/usr/x y.h",
        "/b$c.h",
        "d#e.h",
    ]


def test_a_linker_names_what_it_puts_in():
    said = "/a/crti.o\n/b/libgcc.a\n(/b/libc.a)x.o\n/b/libgcc.a(y.o)\n/lib/libc.so.6\n"
    assert inputs.of_trace(said) == ["/a/crti.o", "/b/libc.a", "/b/libgcc.a"]


def test_files_are_of_the_part_whose_folder_holds_them(tmp_path):
    for name in ("torch/a.h", "own/python/b.h", "own/c.h", "usr/d.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "torch")
    read = [tmp_path / n for n in ("link/a.h", "torch/a.h", "own/python/b.h", "own/c.h", "usr/../usr/d.h")]
    parts = {"torch": [tmp_path / "torch"], "python": [tmp_path / "own/python"]}
    assert inputs.sort(map(str, read), parts, [tmp_path / "own"]) == {
        "python": [digest.of_bytes(b"own/python/b.h")],
        "system": [digest.of_bytes(b"usr/d.h")],
        "torch": [digest.of_bytes(b"torch/a.h")],
    }


def compiled(folder, header, name="include"):
    """The parts of a library whose source includes a header of `folder` and one of C++."""
    include = folder / name
    include.mkdir(parents=True)
    (include / "torch.h").write_text(header)
    (folder / "it.cpp").write_text("#include <torch.h>\nint f() { return std::vector<int>(3).size(); }\n")
    compiler = host_compiler.find()
    read = compiler.compile(folder / "it.cpp", folder / "it.o", ["-fPIC", "-isystem", str(include)])
    read += compiler.link([folder / "it.o"], folder / "it.so", [])
    assert not list(folder.glob(".*"))
    found = inputs.sort(read, {"torch": [include]}, [folder])
    return {part: inputs.of_part([found], part) for part in found}


def test_the_same_headers_have_the_same_digest_wherever_they_lie(tmp_path):
    first = compiled(tmp_path / "a", TORCH)
    assert first["torch"] == digest.of_values([digest.of_bytes(TORCH.encode())])
    assert compiled(tmp_path / "far away", TORCH, "other headers") == first
    changed = compiled(tmp_path / "c", TORCH + "// another\n")
    assert changed["torch"] != first["torch"] and changed["system"] == first["system"]
    more = compiled(tmp_path / "d", TORCH + "#include <map>\n")
    assert more["system"] != first["system"]


def test_what_nothing_is_known_of_has_no_digest(tmp_path):
    with pytest.raises(BuildError, match="no header of python is known"):
        inputs.of_part([{"torch": ["a"]}, {"torch": ["b"]}], "python")
    with pytest.raises(BuildError, match="does not say which headers it was compiled with"):
        inputs.read(tmp_path)
    inputs.write(tmp_path, {"torch": ["a"]})
    assert inputs.read(tmp_path) == {"torch": ["a"]}


def test_an_object_of_the_host_library_keeps_what_it_read(tmp_path):
    (source,) = [path for path in host_library.sources() if path.stem == "status"]
    unit = host_library.object_unit(source, host_compiler.find())
    folder = Store(tmp_path).build(unit).folder
    assert set(inputs.read(folder)) == {"system"}
    assert str(REPOSITORY) not in (folder / inputs.FILE).read_text()


@pytest.mark.parametrize("arch", ["sm_80", "compute_80", "sm_70", "gfx942"])
def test_a_code_object_keeps_which_headers_its_compiler_read(arch, toolchain_of, store):
    """nvcc reads its toolkit's and, through them, the system's; the others read the sources alone."""
    toolchain = toolchain_of(arch)
    (unit,) = packs.units(arch, toolchain, ["multi_tensor_scale"])
    read = inputs.read(store.build(unit).folder)
    if toolchain.headers is None:
        assert read == {}
        return
    assert set(read) == {"toolkit", "system"}
    assert digest.of_file(toolchain.headers / "cuda_runtime.h") in read["toolkit"]
    assert not set(read["toolkit"]) & set(read["system"])
    sources = {digest.of_file(path) for path in (REPOSITORY / "csrc/device").iterdir()}
    assert not sources & {*read["toolkit"], *read["system"]}


def test_a_compiler_in_this_process_leaves_its_locale(toolchain_of, tmp_path):
    """NVRTC 12.3 sets that of the thread that calls it, which setlocale() neither sees nor mends."""
    source = tmp_path / "x.cu"
    source.write_text('extern "C" __global__ void x() {}\n')
    before = locale.nl_langinfo(locale.CODESET)
    assert toolchain_of("compute_80").compile(source, Arch("compute_80")).image
    assert locale.nl_langinfo(locale.CODESET) == before


def test_units_that_keep_it_are_not_those_that_did_not(toolchain_of, tmp_path):
    """A store of before holds bindings and code that say nothing."""
    python = pythons.find(pythons.own_tag())
    headers = TorchHeaders("2.99.0", "abc", None, tmp_path, "0" * 64, installed=False)
    (code,) = packs.units("sm_80", toolchain_of("sm_80"), ["multi_tensor_scale"])
    for unit in (bindings.torch_library(headers), bindings.python_module(headers, python), code):
        assert unit.inputs["beside"] == inputs.FILE
        assert str(tmp_path) not in json.dumps(unit.inputs)
