"""Wheel variants: variantlib reads what was written from the ledger, and chooses as the machine asks."""

import json

import pytest

pytest.importorskip("variantlib")

from variantlib.api import get_variants_by_priority
from variantlib.constants import VALIDATION_WHEEL_NAME_REGEX
from variantlib.plugins import loader
from variantlib.variant_dist_info import VariantDistInfo

from build_matrix.errors import BuildError
from build_matrix.parts import ledger
from build_matrix.wheels import variants, wheel
from build_matrix.wheels.wheel_file import WheelFile

KERNEL = {"registers": 32, "spill_bytes": 0}
LABELS = {"cpu": "cpu", "cuda": "cu130", "rocm": "rocm7.2"}


def make(folder, accelerator, archs, lacking=(), tag="cp311-cp311-manylinux_2_27_x86_64"):
    """A wheel with a ledger: two kernels on each of `archs`, one of them on those that are `lacking`."""
    folder.mkdir(exist_ok=True)
    manifests = {
        arch: {
            "units": {
                "adam": {
                    "sha256": "a" * 64,
                    "bytes": 1,
                    "kernels": {
                        name: KERNEL for name in ("adam_f32", "adam_f16")[: 1 if arch in lacking else 2]
                    },
                }
            }
        }
        for arch in archs
    }
    coverage = ledger.ledger("1.10.0", manifests, [*archs, "sm_60"] if accelerator == "cuda" else archs, {})
    facts = {"version": "1.10.0", "local": LABELS[accelerator], "accelerator": accelerator, "archs": archs}
    files = {"apex/build.json": facts, "apex/coverage.json": coverage, "apex/lib/bindings.json": []}
    version = f"1.10.0+{LABELS[accelerator]}"
    path = folder / f"apex_{accelerator}-{version}-{tag}.whl"
    contents = {name: json.dumps(value).encode() for name, value in files.items()}
    wheel.write(path, f"apex-{accelerator}", version, tag, contents, {"sboms/apex.cdx.json": b"{}"})
    return path


@pytest.fixture
def dist(tmp_path):
    folder = tmp_path / "dist"
    make(folder, "cpu", [])
    make(folder, "cuda", ["sm_80", "sm_90", "compute_120"], lacking=["sm_80"])
    make(folder, "rocm", ["gfx942", "gfx1100", "gfx11-generic"])
    make(folder, "cuda", ["sm_80", "sm_90", "compute_120"], ["sm_80"], "cp312-cp312-manylinux_2_27_aarch64")
    return sorted(folder.glob("*.whl"))


def test_properties_are_what_the_ledger_holds(dist):
    found = {
        path.name.split("-")[0]: variants.properties(WheelFile(path).json("apex/coverage.json"))
        for path in dist
    }
    assert found == {
        "apex_cpu": [],
        "apex_cuda": ["nvidia :: sm_arch :: 90_real", "nvidia :: sm_arch :: 120_virtual"],
        "apex_rocm": ["amd :: gfx_arch :: gfx942", "amd :: gfx_arch :: gfx1100"],
    }


def test_variantlib_reads_what_was_written(dist, tmp_path):
    *wheels, index = variants.write(dist, tmp_path / "out")
    assert index.name == "apex-1.10.0-variants.json"
    all_of_them = json.loads(index.read_text())["variants"]
    assert set(all_of_them) == {"null", "cu130", "rocm7.2"} and all_of_them["null"] == {}
    for path in wheels:
        name = VALIDATION_WHEEL_NAME_REGEX.fullmatch(path.name)
        built = WheelFile(path)
        text = built.data("apex-1.10.0.dist-info/variant.json")
        said = VariantDistInfo(text, expected_label=name["variant_label"])
        assert said.variant_desc.to_dict() == all_of_them[name["variant_label"]]
        assert built.platform == f"linux_{name['plat'].partition('_27_')[2]}"
        assert b"Name: apex\nVersion: 1.10.0\n" in built.data("apex-1.10.0.dist-info/METADATA")
        assert "apex-1.10.0.dist-info/sboms/apex.cdx.json" in built.members
    assert len(wheels) == len(dist) == 4
    again = variants.write(dist, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in (*wheels, index)]


PLUGIN = """
class Feature:
    multi_value = True
    def __init__(self, name, values):
        self.name, self.values = name, values

class Plugin:
    namespace = {namespace!r}
    @staticmethod
    def get_all_configs():
        return [Feature({feature!r}, {all!r})]
    @staticmethod
    def get_supported_configs():
        return [Feature({feature!r}, {here!r})] if {here!r} else []
"""


@pytest.mark.parametrize(
    ("nvidia", "amd", "chosen"),
    [
        (["90_real", "80_real"], [], ["cu130", "null"]),
        ([], ["gfx1100"], ["rocm7.2", "null"]),
        (["90_real"], ["gfx942"], ["cu130", "rocm7.2", "null"]),
        (["75_real"], ["gfx1030"], ["null"]),
        ([], [], ["null"]),
    ],
)
def test_an_installer_would_choose(dist, tmp_path, monkeypatch, nvidia, amd, chosen):
    """Providers as PROVIDERS names them, of a machine with those cards."""
    plugins = {
        "nvidia_variant_provider": (
            "nvidia",
            "sm_arch",
            ["75_real", "80_real", "90_real", "120_virtual"],
            nvidia,
        ),
        "amd_variant_provider": ("amd", "gfx_arch", ["gfx942", "gfx1030", "gfx1100"], amd),
    }
    for package, (namespace, feature, everything, here) in plugins.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        name = variants.PROVIDERS[namespace][1].partition(":")[2]
        text = PLUGIN.format(namespace=namespace, feature=feature, all=everything, here=here)
        (tmp_path / package / "plugin.py").write_text(text.replace("class Plugin", f"class {name}"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(loader, "VARIANT_PROVIDER_CACHE_TABLE", {})  # of the machine of the last case
    index = variants.write(dist, tmp_path / "out")[-1]
    found = get_variants_by_priority(variants_json=json.loads(index.read_text()))
    assert [variant.label for variant in found] == chosen


def test_what_is_no_variant_is_named(tmp_path):
    with pytest.raises(BuildError, match="has no pack with a property: it is no variant"):
        variants.write([make(tmp_path, "cuda", [])], tmp_path / "out")
    wheels = [
        make(tmp_path, "cuda", ["sm_90"]),
        make(tmp_path, "cuda", ["sm_80"], tag="cp312-cp312-manylinux_2_27_x86_64"),
    ]
    with pytest.raises(BuildError, match="cp312.*: another wheel cu130 has other packs"):
        variants.write(wheels, tmp_path / "out")


def test_a_variant_appears_when_it_is_whole(dist, tmp_path, monkeypatch):
    def killed(path, *arguments):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(variants.wheel, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        variants.write(dist, tmp_path / "variants")
    assert not list((tmp_path / "variants").glob("[!.]*"))
