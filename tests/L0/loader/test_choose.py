"""The choice of a variant, on machines that are written down: one row a case, the reason above it."""

import pytest

from apex._loader.choose import choose
from apex._loader.machine import Device

from .described import CPU, HIPRTC, NVRTC_128, NVRTC_130, UNIT, cubin, gpu, hsaco, machine, ptx


def taken(device, packs=(), unit=UNIT, **facts):
    choice = choose(machine(packs=tuple(packs), **facts), unit, device)
    return choice.taken.variant if choice.taken else None


def reasons(device, packs=(), unit=UNIT, **facts):
    return {
        c.variant: c.reason for c in choose(machine(packs=tuple(packs), **facts), unit, device).candidates
    }


NVIDIA = [cubin("sm_75"), cubin("sm_80"), cubin("sm_90"), cubin("sm_100"), cubin("sm_120"), ptx("compute_80")]


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("sm_80", "sm_80"),  # the exact pack
        ("sm_86", "sm_80"),  # a lower minor of the same major serves
        ("sm_89", "sm_80"),
        ("sm_103", "sm_100"),
        ("sm_121", "sm_120"),
        ("sm_87", "compute_80"),  # Tegra: no binary code of other chips; PTX goes
        ("sm_110", "compute_80"),  # a major without a pack
        ("sm_70", "reference"),  # lower than everything; PTX does not go down
    ],
)
def test_nvidia_families(arch, expected):
    assert taken(gpu(arch), NVIDIA, cuda_driver=(13, 0)) == expected


def test_a_cubin_of_a_higher_minor_does_not_serve():
    assert taken(gpu("sm_80"), [cubin("sm_86")]) == "reference"
    assert "needs that minor or a higher one" in reasons(gpu("sm_80"), [cubin("sm_86")])["sm_86"]


def test_the_nearest_family_pack_is_first():
    assert taken(gpu("sm_89"), [cubin("sm_80"), cubin("sm_86")]) == "sm_86"


def test_the_highest_ptx_that_serves_is_first():
    packs = [ptx("compute_80"), ptx("compute_120", (8, 7)), ptx("compute_90")]
    assert taken(gpu("sm_100"), packs, cuda_driver=(13, 0)) == "compute_90"
    assert taken(gpu("sm_120"), packs, cuda_driver=(13, 0)) == "compute_120"


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ((12, 7), "reference"),  # PTX 8.7 came with CUDA 12.8
        ((12, 8), "compute_80"),
        ((13, 0), "compute_80"),
    ],
)
def test_ptx_needs_a_driver_that_takes_its_version(driver, expected):
    assert taken(gpu("sm_90"), [ptx("compute_80", (8, 7))], cuda_driver=driver) == expected


def test_cubins_of_a_newer_toolkit_major_need_a_newer_driver():
    packs = [cubin("sm_90", (13, 0)), ptx("compute_80", (8, 0))]
    assert taken(gpu("sm_90"), packs, cuda_driver=(12, 4)) == "compute_80"
    assert "CUDA 13.0" in reasons(gpu("sm_90"), packs, cuda_driver=(12, 4))["sm_90"]
    assert taken(gpu("sm_90"), [cubin("sm_90", (12, 8))], cuda_driver=(12, 4)) == "sm_90"


def test_a_pack_that_lacks_the_unit_is_passed_over_for_that_unit_only():
    packs = [cubin("sm_90", units=("other",)), ptx("compute_80")]
    assert taken(gpu("sm_90"), packs) == "compute_80"
    assert taken(gpu("sm_90"), packs, unit="other") == "sm_90"


def test_damage_is_a_reason():
    packs = [cubin("sm_86", fault="x.cubin is damaged"), cubin("sm_80")]
    assert taken(gpu("sm_86"), packs) == "sm_80"
    assert reasons(gpu("sm_86"), packs)["sm_86"] == "x.cubin is damaged"


AMD = [hsaco("gfx90a"), hsaco("gfx942")]


@pytest.mark.parametrize(
    ("arch", "expected"),
    [("gfx90a", "gfx90a"), ("gfx942", "gfx942"), ("gfx1100", "reference"), ("gfx1150", "reference")],
)
def test_amd_archs_without_generic_packs(arch, expected):
    assert taken(gpu(arch), AMD, hip_runtime=(7, 2)) == expected


def test_an_absent_arch_lists_what_is_there():
    assert "gfx90a, gfx942" in reasons(gpu("gfx1150"), AMD)["gfx1150"]


GENERIC = [hsaco(f"gfx{family}-generic", 6) for family in ("9-4", "10-3", "11", "12")]


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("gfx942", "gfx9-4-generic"),
        ("gfx950", "gfx9-4-generic"),
        ("gfx90a", "reference"),  # gfx9-4 does not hold it
        ("gfx1030", "gfx10-3-generic"),
        ("gfx1010", "reference"),
        ("gfx1151", "gfx11-generic"),
        ("gfx1201", "gfx12-generic"),
    ],
)
def test_amd_families(arch, expected):
    assert taken(gpu(arch), GENERIC, hip_runtime=(7, 2)) == expected


def test_the_exact_amd_pack_is_before_the_generic_one():
    assert taken(gpu("gfx942"), [*GENERIC, hsaco("gfx942")]) == "gfx942"


def test_generic_code_needs_a_runtime_that_loads_its_version():
    assert taken(gpu("gfx1100"), GENERIC, hip_runtime=(6, 2)) == "reference"
    assert (
        "code object version 6 needs ROCm 6.3"
        in reasons(gpu("gfx1100"), GENERIC, hip_runtime=(6, 2))["gfx11-generic"]
    )


def test_settings_that_an_object_insists_on():
    packs = [hsaco("gfx90a", features=("xnack+",))]
    assert taken(gpu("gfx90a", features=("sramecc+", "xnack-")), packs) == "reference"
    assert taken(gpu("gfx90a", features=("sramecc+", "xnack+")), packs) == "gfx90a"


@pytest.mark.parametrize(
    ("arch", "compilers", "driver", "kind", "target"),
    [
        ("sm_90", [NVRTC_128], (12, 8), "cubin", "sm_90"),
        ("sm_121", [NVRTC_128], (13, 0), "cubin", "sm_120"),  # unknown minor: the lower one serves
        ("sm_110", [NVRTC_128], (13, 0), "ptx", "compute_100"),  # unknown major: PTX of the next lower arch
        ("gfx942", [HIPRTC], None, "hsaco", "gfx942"),
    ],
)
def test_jit_targets(arch, compilers, driver, kind, target):
    choice = choose(machine(compilers=compilers, cuda_driver=driver), UNIT, gpu(arch))
    assert (choice.taken.variant, choice.taken.target.kind, choice.taken.target.arch) == ("jit", kind, target)


def test_jit_is_after_packs_and_before_the_reference():
    assert taken(gpu("sm_90"), [cubin("sm_90")], compilers=[NVRTC_130]) == "sm_90"
    assert taken(gpu("sm_90"), [cubin("sm_80")], compilers=[NVRTC_130]) == "jit"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"compilers": [NVRTC_128], "env": {"APEX_JIT": "0"}}, "APEX_JIT=0"),
        ({"compilers": []}, "torch brings no NVRTC here"),
        ({"compilers": [], "no_compiler": {"cuda": "because"}}, "because"),
        ({"compilers": [HIPRTC]}, "torch brings no NVRTC here"),
        ({"compilers": [NVRTC_128], "sources": ()}, f"the device source {UNIT}.cu is not installed"),
        ({"compilers": [NVRTC_130], "cuda_driver": (12, 8)}, "NVRTC 13.0: code made by CUDA 13.0"),
    ],
)
def test_why_there_is_no_jit(facts, reason):
    assert reasons(gpu("sm_90"), **facts)["jit"].startswith(reason)


def test_compilers_are_not_opened_where_a_pack_serves():
    class Trap(tuple):
        def __iter__(self):
            raise AssertionError("a compiler was looked for")

    assert taken(gpu("sm_90"), [cubin("sm_90")], compilers=Trap()) == "sm_90"


def test_a_driver_too_old_for_the_device_itself():
    found = reasons(gpu("sm_120"), NVIDIA, cuda_driver=(12, 4), compilers=[NVRTC_128])
    assert (
        "needs a driver for CUDA 12.8" in found["sm_120"] and "needs a driver for CUDA 12.8" in found["jit"]
    )


def test_cpu():
    assert taken(CPU, NVIDIA) == "cpu"
    assert taken(CPU, cpu_units=()) == "reference"
    assert taken(CPU, library="libapex.so is not installed") == "reference"
    assert [c.variant for c in choose(machine(packs=NVIDIA), UNIT, CPU).candidates] == ["cpu", "reference"]


def test_other_devices_run_the_reference():
    assert taken(Device("xpu", 0, "pvc"), NVIDIA) == "reference"


def test_without_a_fitting_binding_nothing_native_is_reached():
    facts = {"binding": "built for torch 2.12, running 2.13.0"}
    assert taken(gpu("sm_90"), NVIDIA, **facts) == taken(CPU, **facts) == "reference"
    assert "built for torch 2.12" in reasons(gpu("sm_90"), NVIDIA, **facts)["sm_90"]


@pytest.mark.parametrize(
    ("name", "on_gpu", "on_cpu"),
    [
        ("reference", "reference", "reference"),
        ("jit", "jit", "cpu"),  # no word for another kind of device
        ("sm_80", "sm_80", "cpu"),
        ("compute_80", "compute_80", "cpu"),
        ("cpu", "sm_86", "cpu"),
        ("gfx942", "sm_86", "cpu"),
        ("sm_90", None, "cpu"),  # a pack that cannot run here
        ("sm_99", None, "cpu"),  # no such pack
    ],
)
def test_forced_variant(name, on_gpu, on_cpu):
    packs = [*NVIDIA, cubin("sm_86")]
    facts = {"compilers": [NVRTC_128], "env": {"APEX_VARIANT": name}, "cuda_driver": (13, 0)}
    assert taken(gpu("sm_86"), packs, **facts) == on_gpu
    assert taken(CPU, packs, **facts) == on_cpu


def test_a_forced_variant_that_cannot_run_says_why():
    choice = choose(machine(env={"APEX_VARIANT": "sm_90"}, packs=NVIDIA), UNIT, gpu("sm_86"))
    assert choice.taken is None
    assert choice.refusal.startswith("APEX_VARIANT=sm_90 cannot serve") and "own major" in choice.refusal
    choice = choose(machine(env={"APEX_VARIANT": "banana"}, packs=NVIDIA), UNIT, gpu("sm_86"))
    assert "there is no variant of this name" in choice.refusal


@pytest.mark.parametrize(
    "name", ["refrence", "CPU", "cpu-v3", "sm90", "sm_9", "gfx", "gfx94x", "gfx942:xnack-", "0", "off"]
)
def test_a_mistyped_variant_is_refused_on_every_device(name):
    """Else the CPU variant would be taken for what was asked."""
    for device in (CPU, gpu("sm_86"), gpu("gfx942"), Device("xpu", 0, "pvc")):
        choice = choose(machine(env={"APEX_VARIANT": name}, packs=NVIDIA), UNIT, device)
        assert choice.taken is None and "there is no variant of this name" in choice.refusal


def test_an_empty_switch_is_one_that_is_not_set():
    env = {"APEX_VARIANT": " ", "APEX_STRICT": "", "APEX_JIT": ""}
    assert taken(CPU, NVIDIA, env=env) == "cpu"
    assert taken(gpu("sm_86"), [], env=env, compilers=[NVRTC_128], cuda_driver=(13, 0)) == "jit"
    assert taken(gpu("sm_86"), [], env=env) == "reference"


def test_strict_refuses_the_reference_unless_it_was_named():
    strict = {"APEX_STRICT": "1"}
    assert taken(gpu("sm_90"), [], env=strict) is None
    assert taken(gpu("sm_90"), [cubin("sm_90")], env=strict) == "sm_90"
    assert taken(gpu("sm_90"), [], env={**strict, "APEX_VARIANT": "reference"}) == "reference"
    assert taken(gpu("sm_90"), [], env={"APEX_STRICT": "0"}) == "reference"


def test_what_failed_before_is_passed_over_with_its_reason():
    failures = {("cuda", 0, UNIT, "jit"): "the compiler refused"}
    facts = {"compilers": [NVRTC_128], "failures": failures}
    assert taken(gpu("sm_90"), **facts) == "reference"
    assert reasons(gpu("sm_90"), **facts)["jit"] == "the compiler refused"
    assert taken(gpu("sm_90", index=1), **facts) == "jit"  # a device's failures are its own


def test_every_pack_is_listed_once_with_a_reason():
    choice = choose(machine(packs=NVIDIA), UNIT, gpu("sm_86"))
    assert sorted(c.variant for c in choice.candidates) == sorted(
        ["sm_86", "sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_80", "jit", "reference"]
    )
    assert all(candidate.reason for candidate in choice.candidates)
    assert [candidate.variant for candidate in choice.passed_over] == ["sm_86"]


def test_mixed_devices_are_judged_each_by_itself():
    devices = [gpu("sm_80", 0), gpu("sm_90", 1), gpu("gfx942", 2)]
    packs = [*NVIDIA, *AMD]
    assert [taken(device, packs) for device in devices] == ["sm_80", "sm_90", "gfx942"]
