"""One answer: the loader, the doctor, `explain`, `compat` and `which` say the same of the same machine, by way of a
checkout (`build_matrix`) and of a wheel (`python -m apex`): whether a wheel serves, which one, and the line."""

import dataclasses
import json

import pytest

from apex import __main__ as front
from apex._loader import bindings, doctor, explain, offers, probe, registry, release
from apex._loader.fit import fit
from build_matrix.serve import compat, which
from build_matrix.spec import matrix, pins

SYSTEM = matrix.NATIVE
GIT = pins.torch("2.13.0").sha
CUDA, ROCM, CPU = (
    f"apex-{a.name}=={release.load().version}+{a.label} --index-url <index>/whl/{a.roots[0]}/"
    for a in (release.load().accelerator(name) for name in ("cuda", "rocm", "cpu"))
)
INSTALL = "python -m pip install"
TORCH = f"{INSTALL} --force-reinstall torch --index-url https://download.pytorch.org/whl"


def case(line, torch, *archs, found=True, **more):
    return pytest.param(
        {"torch": torch, "archs": archs, "python": "cp311", "system": SYSTEM, **more}, found, line,
        id=" ".join([str(torch), *archs, *more.values()]),
    )  # fmt: skip


def upgrade(accelerator):
    wheel = release.load().accelerator(accelerator)
    return f"{INSTALL} --upgrade --no-deps {wheel.distribution} --index-url <index>/whl/{wheel.roots[0]}/"


MACHINES = [
    # releases, by label and by switch: a binding serves every toolkit of its torch
    case(f"{INSTALL} {CUDA}", "2.13.0+cu130", "sm_90"),
    case(f"{INSTALL} {CUDA}", "2.13.0+cu128", "sm_90"),
    case(f"{INSTALL} {CUDA}", "2.13", "sm_90", cuda="12.8"),
    case(f"{INSTALL} {CUDA}", "2.13.0+cu128", "sm_90", driver="570"),
    case(f"{INSTALL} {CUDA}", "2.13", "sm_90", cuda="11.8"),
    case(f"{INSTALL} {CUDA}", "2.13", "sm_90"),
    case(f"{INSTALL} {CUDA}", "2.13.0+cu126.with.pypi.cudnn", "sm_80"),
    case(f"{INSTALL} {ROCM}", "2.13.0+rocm7.2", "gfx942:sramecc+:xnack-"),
    case(f"{INSTALL} {ROCM}", "2.13.0+rocm7.0", "gfx942"),
    case(f"{INSTALL} {ROCM}", "2.13", "gfx942", rocm="7.0"),
    case(f"{INSTALL} {ROCM}", "2.13", "gfx1010"),  # no pack: hipRTC
    case(f"{INSTALL} {CPU}", "2.13.0+cpu"),
    case(f"{INSTALL} {CPU}", "2.13.0+xpu"),
    case(f"{INSTALL} {CPU}", "2.8.0+cpu.cxx11.abi"),
    case(f"{INSTALL} {CUDA}", "2.15.0+cu130", "sm_87"),
    case(f"{INSTALL} {CUDA}", "2.13.0+cu130", "sm_90", "sm_130"),
    # builds that are no release: by their own binding where they are the very build, else by the portable one
    case(f"{INSTALL} {CUDA}", "2.13.0a0+git1234567", "sm_90"),
    case(f"{INSTALL} {CUDA}", "2.13.0.dev20260501+cu130", "sm_90"),
    case(f"{INSTALL} {CUDA}", "2.14.0rc1+cu130", "sm_90"),
    case(f"{INSTALL} {ROCM}", "2.13.0+gitabc", "gfx942"),
    case(f"{INSTALL} {CUDA}", "2.13.0a0+81ea7a4.nv25.9", "sm_90", cuda="13.0"),
    case(f"{INSTALL} {CPU}", "2.13.0+mine"),
    case(f"{INSTALL} {CUDA}", "2.13.0a0+gitcf30153", "sm_90", git_version=GIT),
    case(f"{INSTALL} {CUDA}", "2.13.0+mine", "sm_90", git_version=GIT, cuda="13.0"),
    case(f"{INSTALL} {CUDA}", "2.13.0+mine", "sm_90", git_version="f" * 40, cuda="13.0"),
    # releases that came after the wheel
    case(f"{INSTALL} {CUDA}", "2.99.0+cu130", "sm_90"),
    case(f"{INSTALL} {ROCM}", "3.0+rocm7.2", "gfx942"),
    # torch that no wheel is for, or that cannot use the card
    case(f"{INSTALL} 'torch>=2.8'", "2.7.1+cu128", "sm_90", found=False),
    case(f"{INSTALL} 'torch>=2.8'", "1.13", found=False),
    case(f"{TORCH}/cu130", "2.13.0+cpu", "sm_90", found=False),
    case(f"{TORCH}/rocm7.2", "2.13.0+cpu", "gfx942", found=False),
    # Pythons and platforms
    # No torch of PyTorch's is for this Python: somebody built one.
    case(f"{INSTALL} {CUDA}", "2.15.0+cu130", "sm_90", python="cp310"),
    case(offers.SOURCE, "2.13.0+cpu", python="cp314", found=False),
    case(offers.SOURCE, "2.13.0+cpu", python="cp313t", found=False),
    case("use Python 3.10 or newer", "2.8.0+cpu", python="cp39", found=False),
    case(f"{INSTALL} {CUDA}", "2.13.0+cu130", "sm_90", system="linux_aarch64"),
    case(offers.SOURCE, "2.13.0+rocm7.2", "gfx942", system="linux_aarch64", found=False),
    case(f"{INSTALL} {CUDA}", "2.13.0+cu130", "sm_90", system="win_amd64"),
    case(f"{INSTALL} {CUDA}", "2.15.0+cu130", "sm_90", python="cp310", system="win_amd64"),
    case(f"use one of {SYSTEM}", "2.13.0+rocm7.2", "gfx942", system="win_amd64", found=False),
    case(f"use one of {SYSTEM}, linux_aarch64, win_amd64", "2.13.0+cpu", system="darwin_arm64", found=False),
    # cards and drivers
    case(upgrade("cuda"), "2.13.0+cu130", "sm_61", found=False),
    case(offers.DRIVER, "2.13.0+cu130", "sm_120", driver="550", found=False),
    case(offers.DRIVER, "2.13.0+cu130", "sm_90", driver="535", found=False),
    case(f"{INSTALL} torch", None, found=False),
]


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch, tmp_path):
    """No index named, no part of a wheel here, and one unit, which stands for every op."""
    (tmp_path / "apex").mkdir()
    monkeypatch.setenv("APEX_TREE", str(tmp_path))
    monkeypatch.delenv("APEX_INDEX", raising=False)
    for name in ("ops", "units"):
        monkeypatch.setattr(registry, name, lambda: (release.EVERY,))


def options(question):
    """A question as the command line takes it."""
    names = {"archs": "arch", "system": "platform"}
    said = []
    for key, value in question.items():
        for word in value if key == "archs" else [value] if value else []:
            said += [f"--{names.get(key, key).replace('_', '-')}", word]
    return said


def spoken(run, capsys, *arguments):
    """(exit code, JSON) of a front end."""
    code = run([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def verdict(found):
    """(whether a wheel serves, the line) of what compat and which print."""
    return found["found"], found["command"] if found["found"] else found["mend"]


@pytest.mark.parametrize(("question", "found", "line"), MACHINES)
def test_every_front_end_gives_the_same_answer(question, found, line, capsys, monkeypatch):
    described = explain.described(**question)
    offer = offers.offer(described, release.load())
    assert (offer.found, offer.command) == (found, line), offer.missing

    monkeypatch.setattr(probe, "describe", lambda: described)
    for run in (which.main, lambda rest: front.main(["which", *rest])):
        code, said = spoken(run, capsys)
        assert (code, *verdict(said)) == (0 if found else 2, found, line)
    if question["torch"] is None:
        return
    for run in (compat.main, lambda rest: front.main(["compat", *rest])):
        code, said = spoken(run, capsys, *options(question))
        assert (code, *verdict(said)) == (0 if found else 2, found, line)
        assert said.get("wheel", offer.wheel) == offer.wheel
        assert all(said.get("pins", {"-": "-"}).values())
        assert said.get("binding") == (offer.fit.kind if found else None)
        assert bool(said.get("pins")) == found or said["binding"] == "portable"
    _, said = spoken(lambda rest: front.main(["explain", *rest]), capsys, *options(question))
    reasons = list(offer.reasons if found else offer.missing)
    assert said["offer"] == {"found": found, "wheel": offer.wheel, "command": line, "reasons": reasons}


@pytest.mark.parametrize(("question", "found", "line"), MACHINES)
def test_the_doctor_and_the_loader_agree_with_it(question, found, line, monkeypatch):
    offer = offers.offer(explain.described(**question), release.load())
    with_wheel = doctor.assume(offer.machine)  # as the wheel leaves the machine
    assert (with_wheel.state == "fine") == found, with_wheel.problems
    before = doctor.assume(explain.described(**question))  # nothing is installed: what to do about it
    assert next(p.remedy for p in before.problems if p.severity != "note") == line
    if question["torch"] is None:
        return
    binding = fit(offer.machine)
    of_a_card = ("no kernel for", "cannot use the", "needs a driver")  # a fault that no binding has
    of_the_binding = not found and not any(words in offer.missing[0] for words in of_a_card)
    assert (binding.module or binding.portable) != of_the_binding
    if of_the_binding:
        monkeypatch.setattr(bindings.layout, "build_facts", dict)
        assert bindings.mismatch_remedy(offer.machine, binding) == line


def test_the_table_of_a_wheel_is_the_checkout_s(tmp_path, monkeypatch):
    """An installed wheel reads release.json: what it answers is what the checkout answers."""
    from build_matrix.parts import releases

    table = releases.table() | {"grades": []}
    (tmp_path / "apex" / release.FILE).write_text(json.dumps(table))
    of_checkout = release.load()
    monkeypatch.setattr(release.layout, "checkout", lambda: None)
    assert release.load() == of_checkout
    assert (releases.FILE, releases.FORMAT) == (release.FILE, release.FORMAT)
    (tmp_path / "apex" / release.FILE).write_text(json.dumps(table | {"format": 9}))
    with pytest.raises(ValueError, match="format 9"):
        release.load()


def test_the_index_that_wheels_recommend_is_the_matrix_s():
    told = dataclasses.replace(release.load(), index="https://apex.example/whl")
    asked = explain.described("2.13.0+cu130", ["sm_90"], python="cp311", system=SYSTEM)
    assert offers.offer(asked, told).command.endswith(" --index-url https://apex.example/whl/cu130/")


def test_cards_are_seen_whatever_torch_can_use(tmp_path):
    assert probe.cards(tmp_path) == ()
    (tmp_path / "nvidiactl").touch()
    assert probe.cards(tmp_path) == ()
    (tmp_path / "nvidia0").touch()
    (tmp_path / "kfd").touch()
    assert probe.cards(tmp_path) == ("cuda",)
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    assert probe.cards(tmp_path) == ("cuda", "rocm")


def test_a_card_that_torch_cannot_use_is_said_by_which_and_the_doctor():
    described = dataclasses.replace(
        explain.described("2.13.0+cpu", python="cp311", system=SYSTEM), cards=("cuda",)
    )
    offer = offers.offer(described, release.load())
    assert not offer.found and offer.mend == f"{TORCH}/cu130"
    report = doctor.assume(offer.machine)
    assert report.state == "degraded" and report.problems[0].name == "unused card"


def test_an_offer_asks_nothing_but_what_it_is_given(monkeypatch):
    """Pure: no file, no process, no torch."""
    described, table = (
        explain.described("2.13.0+cu130", ["sm_90"], python="cp311", system=SYSTEM),
        release.load(),
    )

    def raises(*arguments, **keywords):
        raise AssertionError(f"asked: {arguments}")

    monkeypatch.setattr("builtins.open", raises)
    monkeypatch.setattr("subprocess.Popen", raises)
    assert offers.offer(described, table).found
