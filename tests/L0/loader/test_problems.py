"""Wrong states in words: facts that are written down, and what is said about them."""

import dataclasses

import pytest

from apex._loader import offers, problems, release
from apex._loader.choose import outcome
from apex._loader.distributions import Distribution, Installation
from apex._loader.environment import switches
from apex._loader.facts import BROKEN, DEGRADED, NOTE, Facts
from apex._loader.fit import Fit
from apex._loader.machine import Torch

from .described import BINDING, CPU, NVRTC_130, UNIT, cubin, gpu, hsaco, machine, ptx

WHEEL = Distribution("apex-cuda", "1.10.0+cu130", "/site")
PACKAGE = "/site/apex"
RELEASE = release.load()
CUDA = f"apex-cuda=={RELEASE.version}+cu130 --index-url <index>/whl/cu130/"
ROCM = f"apex-rocm=={RELEASE.version}+rocm7.2 --index-url <index>/whl/rocm7.2/"
CPU_WHEEL = f"apex-cpu=={RELEASE.version}+cpu --index-url <index>/whl/cpu/"


@pytest.fixture(autouse=True)
def no_index(monkeypatch):
    monkeypatch.delenv("APEX_INDEX", raising=False)


def found(devices=(CPU,), installed=(WHEEL,), intact=True, **changes):
    """name -> Problem for a machine where all is well but for the changes."""
    own = {
        name: changes.pop(name) for name in list(changes) if name in (*Facts.__dataclass_fields__, "portable")
    }
    portable = None if own.pop("portable", False) else "no host library"
    given = {"bindings": (BINDING,), "devices": devices, "packs": (cubin("sm_90"),), "portable": portable}
    seen = outcome(machine(**{**given, **changes}), (UNIT,))
    there = Installation(tuple(installed), PACKAGE, intact)
    own = {"offer": offers.offer(seen.machine, RELEASE), **own}
    facts = Facts(seen.machine, seen.choices, seen.fit, installation=there, **own)
    return {problem.name: problem for problem in problems.find(facts)}


@pytest.mark.parametrize("device", [CPU, gpu("sm_90")])
def test_all_is_well(device):
    assert not [p for p in found([device]).values() if p.severity != NOTE]


PYRAMID = Distribution("apex", "0.9.10.dev0", "/site", summary="Pyramid based web toolkit")


@pytest.mark.parametrize(("intact", "severity"), [(True, DEGRADED), (False, BROKEN)])
def test_the_unrelated_apex_of_pypi(intact, severity):
    """Report 3, installed before and after this project's wheel."""
    problem = found(installed=[WHEEL, PYRAMID], intact=intact)["foreign apex"]
    assert problem.severity == severity and "unrelated PyPI package" in problem.text
    assert problem.remedy.startswith("python -m pip uninstall -y apex &&") and "apex-cuda" in problem.remedy


def test_the_public_apex_from_source():
    public = Distribution("apex", "0.1", "/site")
    assert "another distribution owns the package" in found(installed=[WHEEL, public])["foreign apex"].text


def test_half_deleted():
    """Report 3: after the other one was uninstalled."""
    gone = dataclasses.replace(WHEEL, missing=("apex/__init__.py", "apex/amp/__init__.py"))
    problem = found(installed=[gone], intact=False)["half-deleted apex"]
    assert problem.severity == BROKEN and "2 files" in problem.text
    assert problem.remedy == f"python -m pip install --force-reinstall --no-deps {CUDA}"


def test_two_distributions():
    problem = found(installed=[WHEEL, Distribution("apex-cpu", "1.10.0+cpu", "/site")])[
        "two apex distributions"
    ]
    assert "apex-cpu and apex-cuda" in problem.text
    away = "python -m pip uninstall -y apex-cpu apex-cuda"
    assert problem.remedy == f"{away} && python -m pip install {CUDA}"


def test_a_shadowed_wheel():
    assert found(installed=[dataclasses.replace(WHEEL, location="/else")])["shadowed wheel"].severity == NOTE


def test_no_torch():
    problem = found(torch=None)["no torch"]
    assert (problem.severity, problem.remedy) == (BROKEN, "python -m pip install torch")


@pytest.mark.parametrize(
    ("version", "says", "remedy"),
    [
        # a wheel of the farm holds 2.14, so that the installed one, of the same version, is laid anew
        (
            "2.14.0",
            "built for torch 2.13, running 2.14.0",
            f"python -m pip install --force-reinstall --no-deps {CUDA}",
        ),
        (
            "2.99.0",
            "built for torch 2.13, running 2.99.0",
            f"python -m pip install --force-reinstall --no-deps {CUDA}",
        ),
        ("2.13.0a0+81ea7a4", "pre-release", f"python -m pip install --force-reinstall --no-deps {CUDA}"),
        ("2.5.1", "older than 2.8", "python -m pip install 'torch>=2.8'"),
    ],
)
def test_unsupported_torch(version, says, remedy):
    """Where the host library, which the portable binding needs, is not here."""
    problem = found(torch=Torch(version, "another", cuda="13.0"))["unsupported torch"]
    assert problem.severity == DEGRADED and says in problem.text and problem.remedy == remedy


@pytest.mark.parametrize("version", ["2.99.0", "2.13.0a0+81ea7a4", "3.0.1+mine"])
def test_the_portable_binding_is_a_note(version):
    problems = found(torch=Torch(version, "another", cuda="13.0"), portable=True)
    assert "unsupported torch" not in problems and problems["portable binding"].severity == NOTE
    assert "kernels and results are the same" in problems["portable binding"].text


def test_ops_without_a_portable_form_are_counted():
    torch = Torch("2.99.0", "another", cuda="13.0")
    problem = found(torch=torch, portable=True, unserved=("f_forward", "f_backward"))["no portable form"]
    assert problem.severity == DEGRADED
    assert "no form of f_forward, f_backward: 2 of its ops run on the reference" in problem.text
    assert "no portable form" not in found(torch=torch, portable=True)


def test_the_portable_binding_takes_no_old_torch():
    assert found(torch=Torch("2.5.1", "another", cuda="13.0"), portable=True)["unsupported torch"]


def test_the_abi_is_named():
    problem = found(torch=Torch("2.13.0", "another", cxx11_abi=False))["unsupported torch"]
    assert "C++ ABI" in problem.text


def test_python_only():
    problem = found(bindings=())["Python only"]
    assert problem.severity == DEGRADED and problem.remedy.endswith(f"--no-deps {CUDA}")
    problem = found(bindings=(), env={"APEX_TREE": "/gone"})["Python only"]
    assert "APEX_TREE names /gone" in problem.text and problem.remedy == "unset APEX_TREE"


def test_wrong_python():
    assert "cp312" in found(python="cp312")["wrong Python"].text


def test_wrong_processor():
    """Report 22: wrong machine arch."""
    fault = "libapex.so was built for another processor (ELF machine 183, this one is x86_64)"
    assert found(library=fault)["host library"].severity == BROKEN


def test_loading_failed():
    assert found(load_error="InstallationError: x")["cannot load"].text == "InstallationError: x"


def test_no_pack():
    """Report 13: a wheel of 8.0 only, no PTX, no compiler, on sm_90."""
    problem = found([gpu("sm_90")], packs=(cubin("sm_80"),), no_compiler={"cuda": "none"})["no pack"]
    assert problem.severity == DEGRADED
    assert "sm_90" in problem.text and "installed: sm_80" in problem.text and UNIT in problem.text


def test_wrong_vendor():
    problem = found([gpu("gfx942")], torch=Torch("2.13.0+rocm7.2", hip="7.2"))["wrong vendor"]
    assert "packs are for cuda, the device needs rocm" in problem.text
    assert problem.remedy == f"python -m pip uninstall -y apex-cuda && python -m pip install {ROCM}"


ROCM_WHEEL = Distribution("apex-rocm", "1.10.0+rocm7.2", "/site")


def test_packs_that_never_run_under_this_torch():
    """Also where no GPU is: apex-rocm under a torch for the CPU, or for CUDA."""
    facts = {"packs": (hsaco("gfx942"),), "installed": [ROCM_WHEEL]}
    problem = found(torch=Torch("2.13.0+cpu", "cf30153c"), **facts)["wrong vendor"]
    assert problem.severity == DEGRADED and "they can never run here" in problem.text
    assert "built for neither CUDA nor ROCm" in problem.text
    assert problem.remedy == f"python -m pip uninstall -y apex-rocm && python -m pip install {CPU_WHEEL}"
    problem = found(torch=Torch("2.13.0+cu130", "cf30153c", cuda="13.0"), **facts)["wrong vendor"]
    assert problem.remedy == f"python -m pip uninstall -y apex-rocm && python -m pip install {CUDA}"


@pytest.mark.parametrize(("card", "label"), [("rocm", "rocm7.2"), ("cuda", "cu130")])
def test_a_machine_with_a_card_is_never_sent_to_the_wheel_without_packs(card, label):
    facts = {"torch": Torch("2.13.0+cpu", "cf30153c"), "cards": (card,), "packs": (hsaco("gfx942"),)}
    there = found(installed=[ROCM_WHEEL], **facts)
    assert there["unused card"].severity == DEGRADED
    line = "python -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/"
    assert there["unused card"].remedy == there["wrong vendor"].remedy == line + label


def test_a_wheel_without_packs_beside_a_card_is_a_note():
    cpu = Distribution("apex-cpu", "1.10.0+cpu", "/site")
    facts = {"packs": (), "compilers": (NVRTC_130,), "cuda_driver": (13, 0), "installed": [cpu]}
    problem = found([gpu("sm_90")], **facts)["packs elsewhere"]
    assert problem.severity == NOTE and "apex-cuda holds compiled kernels for sm_90" in problem.text
    assert problem.remedy == f"python -m pip uninstall -y apex-cpu && python -m pip install {CUDA}"
    assert "packs elsewhere" not in found([gpu("sm_90")], **{**facts, "packs": (cubin("sm_90"),)})


def test_an_unlisted_gfx_arch():
    """Report 14: RDNA with packs of two Instinct archs."""
    facts = {"packs": (hsaco("gfx90a"), hsaco("gfx942")), "torch": Torch("2.13.0+rocm7.2", hip="7.2")}
    problem = found([gpu("gfx1150")], **facts)["no compiler"]
    assert "gfx90a, gfx942" in problem.text


def test_the_override_is_a_risk():
    problem = found(env={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})["HSA_OVERRIDE_GFX_VERSION"]
    assert problem.severity == NOTE and "11.0.0" in problem.text and "does not rely on it" in problem.text


def test_a_driver_older_than_the_device():
    problem = found([gpu("sm_120")], cuda_driver=(12, 4))["old driver"]
    assert problem.severity == BROKEN and "CUDA 12.8" in problem.text


def test_a_driver_older_than_the_packs():
    problem = found([gpu("sm_90")], cuda_driver=(12, 4))["old driver"]
    assert problem.severity == DEGRADED and "made by CUDA 13.0, this driver serves CUDA 12.4" in problem.text


def test_ptx_saves_an_older_driver():
    packs = (cubin("sm_90"), ptx("compute_80"))
    assert not [
        p for p in found([gpu("sm_90")], packs=packs, cuda_driver=(12, 4)).values() if p.severity != NOTE
    ]


def test_a_damaged_pack_is_named_even_where_another_variant_stands_in():
    packs = (cubin("sm_90", fault="x.cubin is damaged"), ptx("compute_80"))
    assert "x.cubin is damaged" in found([gpu("sm_90")], packs=packs)["damaged pack"].text


def test_two_hip_runtimes():
    mapped = {"libamdhip64.so": ("/a/libamdhip64.so.7", "/opt/rocm/lib/libamdhip64.so.6")}
    problem = found(mapped=mapped)["two HIP runtimes"]
    assert problem.severity == BROKEN and "/opt/rocm/lib/libamdhip64.so.6" in problem.text


def test_cuda_runtimes_of_two_majors():
    """Report 9: one sentence with both majors."""
    problem = found(mapped={"libcudart.so": ("/t/libcudart.so.13", "/x/libcudart.so.12")})[
        "CUDA runtime mismatch"
    ]
    assert "CUDA 13 runtime" in problem.text and "CUDA 12" in problem.text


def test_no_gpu_is_a_note():
    assert found()["no GPU"].severity == NOTE


def test_forbidden():
    problem = found([gpu("sm_80")], env={"APEX_VARIANT": "sm_90"})["forbidden"]
    assert problem.severity == BROKEN and problem.remedy == "unset APEX_VARIANT APEX_STRICT"
    assert found([gpu("sm_80")], env={"APEX_STRICT": "1"})["forbidden"].severity == BROKEN


def test_a_mistyped_switch_is_told():
    for name in ("refrence", "CPU", "sm90"):
        problem = found(env={"APEX_VARIANT": name})["forbidden"]
        assert problem.severity == BROKEN and "there is no variant of this name" in problem.text
    problem = found(env={"APEX_VARIANT": "gfx9042"})["mistyped switch"]
    assert problem.severity == NOTE and "no say" in problem.text and problem.remedy == "unset APEX_VARIANT"
    assert "mistyped switch" not in found([gpu("sm_80")], env={"APEX_VARIANT": "sm_80"})
    problem = found(env={"APEX_VARIENT": "cpu"})["mistyped switch"]
    assert "it reads APEX_VARIANT" in problem.text and problem.remedy == "unset APEX_VARIENT"


def test_what_is_read_of_the_environment():
    given = {
        "APEX_VARIANT": "",
        "APEX_JIT": "0",
        "APEX_STRIKT": "1",
        "APEX_BUILD_TYPO": "1",
        "APEX_STORE": "x",
    }
    assert switches(given) == {"APEX_JIT": "0", "APEX_STRIKT": "1"}


def test_an_asked_for_reference_is_no_problem():
    there = found([gpu("sm_80")], env={"APEX_VARIANT": "reference"})
    assert {p.severity for p in there.values()} == {NOTE} and "switches" in there


def test_a_cache_that_cannot_be_written_matters_to_jit_only():
    facts = {"cache_writable": False, "compilers": (NVRTC_130,), "cuda_driver": (13, 0)}
    assert found([gpu("sm_80")], **facts)["no cache"].severity == NOTE
    assert "no cache" not in found([gpu("sm_90")], **facts)


def test_the_worst_comes_first():
    severities = [
        p.severity for p in found(torch=None, env={"APEX_JIT": "0"}, installed=[WHEEL, PYRAMID]).values()
    ]
    assert severities == sorted(severities, key=(BROKEN, DEGRADED, NOTE).index)


def test_every_remedy_is_one_line():
    for check in problems.CHECKS:
        assert check.__name__ and "\n" not in check.__name__
    assert all(
        "\n" not in p.remedy for p in found(torch=None, installed=[WHEEL, PYRAMID], intact=False).values()
    )


def test_an_old_build_is_named():
    stale = Fit(None, False, False, "the build is older than csrc/ops.schemas: f changed", stale=True)
    described = machine(bindings=(BINDING,), devices=(CPU,), binding=stale.reason)
    problem = next(iter(problems.torch_unsupported(Facts(described, fit=stale))))
    assert (problem.name, problem.remedy) == ("old build", "python -m build_matrix tree")


def test_a_wheel_without_packs_is_known_by_its_build_json():
    """apex-rocm under a CUDA torch: hipRTC, which would compile for it, never comes."""
    problem = found([gpu("sm_90")], packs=(), vendor="rocm")["wrong vendor"]
    assert "are for rocm" in problem.text and problem.remedy.endswith(CUDA)
    assert "wrong vendor" not in found([gpu("sm_90")], packs=(), vendor="cuda")
    assert "wrong vendor" not in found(packs=(), vendor="cpu")
