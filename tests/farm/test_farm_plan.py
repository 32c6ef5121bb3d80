"""Which steps a release is made of, what they cost, and how long they take on N workers."""

import itertools
import pickle

import pytest

from build_matrix import errors
from build_matrix.errors import BuildError, PythonMissing, ToolchainMissing
from build_matrix.farm import costs, plan, progress, report, steps
from build_matrix.farm.plan import Selection
from build_matrix.farm.steps import Done, Step
from build_matrix.parts import host_library
from build_matrix.spec import matrix
from build_matrix.spec.registry import device_units
from build_matrix.store import Store
from build_matrix.toolchains import by_arch, host_compiler, pythons

AXES = matrix.load()


@pytest.fixture(scope="module")
def whole():
    return plan.make(Selection(), check=False)


def test_the_whole_release_has_every_cell(whole):
    cells = [
        (t, p) for t in AXES.torch for p in (*AXES.python, *AXES.optional_python) if not AXES.why_not(t, p)
    ]
    assert ("2.8.0", "cp313") in cells and ("2.8.0", "cp314") not in cells
    *names, windows = [platform.name for platform in AXES.platforms]
    assert (names, windows) == (["linux_x86_64", "linux_aarch64"], "win_amd64")
    bindings = {step.arguments for step in whole.steps if step.kind == "3b"}
    assert bindings == {(*cell, name) for cell in cells for name in names}
    libraries = {step.arguments for step in whole.steps if step.kind == "3a"}
    assert libraries == {(torch, name) for torch in AXES.torch for name in names}
    assert whole.count()["code"] == len(AXES.packs) * len(device_units())  # of no platform
    objects = [len(host_library.sources(name)) for name in (*names, windows)]
    assert whole.count()["object"] == sum(objects)
    # No ROCm on aarch64 and Windows, which has one for every Python; one of Python alone for all.
    assert whole.count()["wheel"] == (3 + 2) * 5 + 2 + 1


def test_steps_come_after_what_they_need(whole):
    seen = set()
    for step in whole.steps:
        assert seen.issuperset(step.needs), step
        assert step.id not in seen
        seen.add(step.id)


def test_a_wheel_needs_its_own_parts_and_no_other(whole):
    needs = {step.name: set(step.needs) for step in whole.steps if step.kind == "wheel"}
    rocm = needs["apex-rocm cp310"]
    assert "3b torch 2.14.1 cp310" in rocm and "3a torch 2.15.0" not in rocm and "library libapex.so" in rocm
    assert {n.split()[1].partition("/")[0] for n in rocm if n.startswith("code")} == set(AXES.archs("rocm"))
    assert not [n for n in needs["apex-cpu cp312"] if n.startswith("code")]
    foreign = needs["apex-cuda cp311 linux_aarch64"]
    host = {n for n in foreign if not n.startswith("code")}
    assert "library libapex.so linux_aarch64" in host and all(n.endswith(" linux_aarch64") for n in host)
    assert foreign - host == {n for n in needs["apex-cuda cp311"] if n.startswith("code")}


def test_a_selection_plans_its_part_of_the_matrix():
    chosen = Selection(("rocm",), ("sm_90", "gfx942"), ("2.13.0",), ("cp312",))
    made = plan.make(chosen, check=False)
    assert {s.name.partition("/")[0] for s in made.steps if s.kind == "code"} == {"gfx942"}
    assert [s.name for s in made.steps if s.kind == "wheel"] == ["apex-rocm cp312"]
    without = plan.make(Selection(only=("bindings", "library")), check=False)
    assert set(without.count()) == {"headers", "object", "library", "3a", "3b"}
    # An arch alone is a wish for the wheels that hold it.
    named = plan.make(Selection(archs=("sm_90",), pythons=("cp311",)), check=False)
    assert [s.name for s in named.steps if s.kind == "wheel"] == [
        "apex-cuda cp311",
        "apex-cuda cp311 linux_aarch64",
        "apex-cuda py3 win_amd64",
    ]
    foreign = plan.make(Selection(only=("library", "bindings"), platforms=("linux_aarch64",)), check=False)
    assert {s.arguments[-1] for s in foreign.steps} == {"linux_aarch64"}


def test_a_gpu_test_wants_its_card_and_its_wheel():
    own = pythons.own_tag()
    made = plan.make(Selection(archs=("sm_90", "gfx942"), tests=("gfx942",)), check=False)
    (found,) = [step for step in made.steps if step.kind == "test"]
    assert (found.resource, found.needs) == ("gfx942", (f"wheel apex-rocm {own}",))
    with pytest.raises(
        BuildError, match=f"the tests on sm_90 want the wheel apex-cuda for {own}, which is not"
    ):
        plan.make(Selection(archs=("sm_80",), tests=("sm_90",)), check=False)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (Selection(torches=("2.7.0",)), "torch 2.7.0 is not in matrix.toml; there are 2.8.0, "),
        (Selection(pythons=("cp39",)), "Python cp39 is not in matrix.toml"),
        (Selection(archs=("sm_60",)), "no pack is made for sm_60"),
        (Selection(accelerators=("xpu",)), "no accelerator is called xpu"),
        (Selection(accelerators=("rocm",), archs=("sm_90",)), "no arch of rocm was chosen"),
        (
            Selection(platforms=("linux_riscv64",)),
            "no wheel is built for linux_riscv64; there are linux_x86_64,",
        ),
        (
            Selection(("rocm",), platforms=("linux_aarch64",)),
            "no wheel apex-rocm is built for linux_aarch64: no torch for ROCm",
        ),
        (
            Selection(only=("library",), tests=("sm_90",)),
            "--test tries a wheel, and --only makes none",
        ),
        (Selection(only=("wheels",)), "wheels is no part of a release; there are library, bindings, packs"),
    ],
)
def test_what_the_matrix_does_not_have_is_named(chosen, words):
    with pytest.raises(BuildError, match=words):
        plan.make(chosen, check=False)


def test_what_is_missing_here_is_all_named_or_left_out(monkeypatch):
    def toolchain_for(arch):
        if arch.startswith("gfx"):
            raise ToolchainMissing("clang-hip-7.2", "nox -s toolchain -- clang-hip-7.2")

    def find(tag):
        if tag in ("cp310", "cp314"):
            raise PythonMissing(tag)

    def compiler(platform):
        if platform == "linux_aarch64":
            raise ToolchainMissing("g++-aarch64", "nox -s toolchain -- g++-aarch64")

    monkeypatch.setattr(by_arch, "toolchain_for", toolchain_for)
    monkeypatch.setattr(pythons, "find", find)
    monkeypatch.setattr(host_compiler, "find", compiler)
    chosen = Selection(archs=("sm_90", "gfx942", "gfx1100"))
    with pytest.raises(BuildError) as fault:
        plan.make(chosen)
    *lines, command = str(fault.value).splitlines()[1:]
    assert [line.partition(":")[0] for line in lines] == ["cp310", "gfx942, gfx1100", "linux_aarch64"]
    assert command == "Run: nox -s toolchain -- clang-hip-7.2 g++-aarch64" and fault.value.exit_code == 3
    everything, missing = plan.whole(chosen)  # what is predicted is the whole, whatever is here
    assert str(missing) == str(fault.value)
    assert {step.arguments[0] for step in everything.steps if step.kind == "code"} == set(chosen.archs)
    assert [why.partition(":")[0] for why in everything.left_out] == ["cp314"]
    made = plan.make(chosen, available=True)
    assert [why.partition(":")[0] for why in made.left_out] == [
        *("cp314", "cp310", "gfx942", "gfx1100"),
        "linux_aarch64",
    ]
    assert {step.arguments[1] for step in made.steps if step.kind == "3b"} == {"cp311", "cp312", "cp313"}
    assert not [step for step in made.steps if step.id.endswith("linux_aarch64")]
    # A Python that no release must have is left out without being asked.
    assert plan.make(
        Selection(archs=("sm_90",), pythons=("cp311", "cp314"), platforms=("linux_x86_64",))
    ).left_out == (f"cp314: {PythonMissing('cp314')}",)


def step(name, *needs):
    return Step("x", name, (), tuple(f"x {need}" for need in needs))


#   a(3) -> c(4) -> e(1),  b(2) -> d(2) -> e
GRAPH = [step("a"), step("b"), step("c", "a"), step("d", "b"), step("e", "c", "d")]
SECONDS = {"x a": 3.0, "x b": 2.0, "x c": 4.0, "x d": 2.0, "x e": 1.0}


def test_simulated_times():
    assert costs.ranks(GRAPH, SECONDS) == {"x a": 8, "x b": 5, "x c": 5, "x d": 3, "x e": 1}
    assert costs.simulate(GRAPH, SECONDS, 1) == sum(SECONDS.values())
    assert costs.simulate(GRAPH, SECONDS, 2) == costs.simulate(GRAPH, SECONDS, 99) == 8
    assert costs.simulate(GRAPH, SECONDS, 1, done={"x a", "x c"}) == 5
    assert costs.simulate([], {}, 2) == 0
    assert costs.simulate(GRAPH, SECONDS, 0) == sum(SECONDS.values())  # one is still to come


def test_no_simulation_beats_the_work_or_the_critical_path(whole):
    seconds = costs.Costs(Store("/nonexistent")).expected(whole.steps)
    total, path = sum(seconds.values()), max(costs.ranks(whole.steps, seconds).values())
    times = [costs.simulate(whole.steps, seconds, n) for n in (1, 2, 8, 10_000)]
    assert times[0] == pytest.approx(total) and times[-1] == pytest.approx(path)
    for n, found in zip((1, 2, 8), times, strict=False):
        assert max(total / n, path) <= found + 1e-6 <= total / n + path  # Graham's bound


def test_sum_against_product():
    """2 sources, 1 torch for 2 Pythons, 2 archs of 2 units: (host 3 + 3a 10 + 3b 20 + pack) for each of 6 cells; and
    the same on a platform that one of the archs is not on, for each of 4 cells."""
    kinds = {"object": 1.0, "library": 1.0, "headers": 9.0, "3a": 10.0, "3b": 20.0, "code": 5.0, "wheel": 7.0}

    def host(platform):
        yield from (Step("object", f"{n} {platform}", (n, platform)) for n in "ab")
        yield Step("library", f"l {platform}", (platform,))
        yield Step("headers", f"h {platform}", ("2.8.0", platform))
        yield Step("3a", f"t {platform}", ("2.8.0", platform))
        yield from (Step("3b", f"t {p} {platform}", ("2.8.0", p, platform)) for p in ("cp311", "cp312"))

    graph = [*host("linux_x86_64"), Step("wheel", "w", ())]
    graph += [Step("code", f"{a}/{u}", (a, u)) for a in ("sm_90", "gfx942") for u in "xy"]
    seconds = {step.id: kinds[step.kind] for step in graph}
    cells, shares = costs.sum_and_product(graph, seconds)
    assert cells == 6
    assert [(s.once, s.apart) for s in shares] == [(3, 6 * 3), (10 + 2 * 20, 3 * 2 * 30), (4 * 5, 2 * 4 * 5)]
    assert sum(s.apart for s in shares) == 2 * (
        (3 + 30) + 2 * (3 + 30 + 10)
    )  # a host, a binding, a pack each
    assert costs.sum_and_product(graph[:3], seconds)[0] == 0
    both = [*graph, *host("linux_aarch64")]
    cells, shares = costs.sum_and_product(both, {step.id: kinds[step.kind] for step in both})
    assert cells == 6 + 4
    assert [(s.once, s.apart) for s in shares] == [(6, 10 * 3), (100, 10 * 30), (20, 2 * 20 + 2 * 10)]


def test_what_a_plan_took_stands_beside_its_prediction(tmp_path, capsys):
    store, made = Store(tmp_path), plan.Plan(tuple(GRAPH))
    new = [Done("x", name, "", 1.0, 0, stored=False) for name in "abcde"]
    costs.note(store, GRAPH, new, 1, 14.21)
    costs.note(store, GRAPH, new, 2, 9.0)
    costs.note(store, GRAPH, new, 2, 8.5)
    costs.note(store, GRAPH, [*new[:4], Done("x", "e", "", 1.0, 0, stored=True)], 4, 1.0)  # not from nothing
    costs.note(store, GRAPH[:4], new[:4], 8, 1.0)  # another plan
    with open(tmp_path / costs.RUNS, "a") as file:
        file.write('{"plan": "cut')
    assert costs.measured(store, GRAPH) == {1: 14.2, 2: 8.5}
    assert costs.measured(Store(tmp_path / "none"), GRAPH) == {}
    report.workers_table(made, SECONDS, SECONDS, store, (2, 32))
    rows = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert rows[1:] == [["1", "12", "12", "14"], ["2", "8", "8", "8"], ["32", "8", "8"], ["endless", "8"]]


def test_costs_are_learnt(tmp_path):
    store = Store(tmp_path)
    for name, seconds in (("a", 9), ("a", 3), ("b", 5)):
        store.note({"kind": "x", "name": name, "key": "", "seconds": seconds})
    known = costs.Costs(store)
    assert known.of(step("a")) == 3 and known.of(step("b")) == 5 and known.of(step("new")) == 5
    assert known.of(Step("3a", "torch 2.8.0", ())) == costs.FIRST["3a"]
    assert known.expected(GRAPH[:2], {"x b"}) == {"x a": 3, "x b": costs.HIT}


def test_a_plan_is_measured_from_nothing_whatever_is_stored(tmp_path, monkeypatch):
    from contextlib import nullcontext

    from build_matrix.farm import cluster

    store, seen = Store(tmp_path / "own"), []

    def run(made, client, elsewhere):
        seen.append((client, elsewhere.root != store.root and not elsewhere.root.joinpath("x").exists()))
        elsewhere.note({"kind": "x", "name": "a", "key": "", "seconds": 7.0})
        return [Done("x", name, "", 1.0, 0, stored=False) for name in "abcde"]

    monkeypatch.setattr(cluster, "local", lambda count: nullcontext(count))
    monkeypatch.setattr(cluster, "run", run)
    cluster.measure(plan.Plan(tuple(GRAPH)), store, (1, 2))
    assert seen == [(1, True), (2, True)] and set(costs.measured(store, GRAPH)) == {1, 2}
    assert costs.Costs(store).of(step("a")) == 7.0


def test_looking_up_what_is_stored_makes_nothing(tmp_path):
    made = plan.make(Selection(only=("library",)), check=False)
    assert costs.stored(made.steps, Store(tmp_path)) == set() == set(tmp_path.iterdir())


def test_looking_up_makes_nothing_of_what_is_damaged(tmp_path, monkeypatch):
    store = Store(tmp_path)
    made = plan.make(Selection(only=("library",), platforms=(matrix.NATIVE,)), check=False)
    objects = [step for step in made.steps if step.kind == "object"]
    for step in objects:
        store.folder(steps.unit(step, store)).mkdir(parents=True)
    monkeypatch.setattr(Store, "build", lambda self, unit: pytest.fail(f"{unit.name} was made"))
    assert costs.stored(made.steps, store) == {step.id for step in objects}


def test_time_left_follows_the_pace():
    farm = progress.Farm(plan.Plan(tuple(GRAPH)), SECONDS, 1)
    assert farm.left == 12 and farm.words() == "0 stored, 0 made, 0:12 left"
    farm.add(Done("x", "a", "", 6.0, 0, stored=False))  # twice as long as was thought
    farm.add(Done("x", "b", "", 6.0, 0, stored=True))  # says nothing of the pace
    assert farm.left == 14 and farm.words() == "1 stored, 1 made, 0:14 left"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_clock(seconds, text):
    assert progress.clock(seconds) == text


def test_every_kind_of_step_has_its_unit(whole):
    assert set(whole.count()) == set(steps.UNITS) == set(costs.FIRST) - {"test"}


FAULTS = [
    errors.BuildError("x"),
    errors.NoToml("x"),
    errors.LoadError("x"),
    errors.ToolchainMissing("nvcc-13.0", "nox"),
    errors.PythonMissing("cp311"),
    errors.Incomplete([("sm_90", "nvcc is not here", "nox -s toolchain -- nvcc-13.0")]),
    errors.CompileError("x.cu", ["nvcc"], "error: no"),
    errors.GateError("x", ["a", "b"]),
    errors.PinError("torch 2.13.0", "a", "b"),
    errors.PackageIndexError("x"),
    errors.RequirementMissing("x", "y", "z"),
    errors.UnknownVariable("APEX_BUILD_X", ["APEX_BUILD_Y"]),
    errors.NotInThisBuild("APEX_BUILD_MLP", {"mlp_cuda": "torch.nn.Sequential"}),
    errors.ContainerError("no engine is here", "apt-get install podman"),
    errors.ReceiptError("receipt.json", "it is cut"),
    errors.NothingRan("L0(cpu)", "no test ran"),
    errors.SignatureError("apex.whl", "it is not signed"),
    errors.StoreError("/store", "no space is left"),
    errors.FarmError([("3a", "no")], 2, 6),
]


def test_faults_travel_between_processes():
    kinds = {k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, BuildError)}
    assert {type(fault) for fault in FAULTS} == kinds
    for fault, protocol in itertools.product(FAULTS, range(2, pickle.HIGHEST_PROTOCOL + 1)):
        copy = pickle.loads(pickle.dumps(fault, protocol))
        assert (type(copy), str(copy), copy.__dict__) == (type(fault), str(fault), fault.__dict__)
        assert copy.exit_code == fault.exit_code
