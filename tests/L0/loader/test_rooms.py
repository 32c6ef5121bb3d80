"""How the loader is built: its modules import each other in one direction, and one process may look at two trees."""

import ast
import json
from graphlib import TopologicalSorter

import pytest

from apex._loader import environment, installed, library, machine, pack_files, probe, registry
from apex._loader.choose import outcome
from apex._loader.machine import Binding

from .described import BINDING, CPU, ROOT, TORCH, UNIT, python
from .described import machine as written_down

FOLDER = ROOT / "apex" / "_loader"
HERE = pytest.mark.skipif(installed.library_fault() is not None, reason="no host library in this tree")


def modules():
    """name -> path of the loader's modules."""
    found = {}
    for path in FOLDER.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree):
    """Full names that a module imports, wherever the statement stands, but for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            yield from imported(node)


def graph():
    """module -> the loader's modules that it imports; what stands for the folder itself is its doorway, `load`."""
    known, found = modules(), {}
    for name, path in known.items():
        names = set(imported(ast.parse(path.read_text(encoding="utf-8"))))
        targets = {n if n in known else n.rpartition(".")[0] for n in names}
        found[name] = {target for target in targets if target in known and target != "apex._loader"}
    return found


def test_imports_have_no_circle():
    """Within functions, too: a circle that is cut by a late import is one still."""
    found = graph()
    assert found["apex._loader.library"] >= {"apex._loader.resolver"}  # it does find edges
    tuple(TopologicalSorter(found).static_order())  # raises CycleError, which names the circle


def test_what_decides_looks_at_nothing():
    """The machine and the functions of it know neither the probe nor what is installed."""
    found, reached = graph(), {"apex._loader.choose", "apex._loader.fit", "apex._loader.machine"}
    while more := set().union(*(found[name] for name in reached)) - reached:
        reached |= more
    asks = {"probe", "installed", "library", "drivers", "vendor", "mapped", "layout", "jit"}
    assert not reached & {f"apex._loader.{name}" for name in asks}


@HERE
def test_one_process_may_look_at_two_trees(tmp_path, monkeypatch):
    """What was found out under one APEX_TREE is not answered under another, in either order."""
    here = (installed.library_fault(), installed.cpu_units(), len(installed.packs()), registry.schemas())
    (tmp_path / "apex").mkdir()
    monkeypatch.setenv("APEX_TREE", str(tmp_path))
    assert installed.library_fault() == "libapex.so is not installed"
    assert installed.cpu_units() == () and installed.packs() == () and installed.bindings() == ()
    assert "cannot be used" in installed.portable_fault()
    monkeypatch.delenv("APEX_TREE")
    assert here == (
        installed.library_fault(),
        installed.cpu_units(),
        len(installed.packs()),
        registry.schemas(),
    )


def test_units_that_a_test_writes_down_do_not_outlive_it(monkeypatch):
    """They were kept as the CPU units of the host library."""
    with monkeypatch.context() as patch:
        patch.setattr(registry, "units", lambda: ("every op",))
        installed.cpu_units()
    assert "every op" not in installed.cpu_units()


def test_a_registry_follows_its_tree(tmp_path, monkeypatch):
    from apex._loader import layout

    monkeypatch.setattr(layout, "checkout", lambda: None)
    for name in ("one", "two"):
        folder = tmp_path / name / "apex"
        (folder / "device").mkdir(parents=True)
        (folder / "device" / f"{name}.cu").touch()
        (folder / "ops.schemas").write_text(f"{name}(Tensor x) -> Tensor\n")
        row = {"name": name, "group": "optimizers", "ops": [name], "state": "complete"}
        (folder / "extensions.json").write_text(json.dumps([row]))
    for name in ("one", "two", "one"):
        monkeypatch.setenv("APEX_TREE", str(tmp_path / name))
        assert (*registry.schemas(),) == (*registry.units(),) == (*registry.extensions(),) == (name,)


@HERE
def test_the_outcome_is_what_the_loader_does():
    """A host library without compiled bindings: the doctor said reference, the loader took the portable binding."""
    found = outcome(written_down(torch=TORCH, bindings=(), devices=(CPU,)), (UNIT,))
    assert found.fit.kind == "portable" and found.choices[0].taken.variant == "cpu"
    found = outcome(
        written_down(torch=TORCH, bindings=(), devices=(CPU,), portable="no host library"), (UNIT,)
    )
    assert found.fit.kind == "reference" and found.choices[0].taken.variant == "reference"
    assert found.machine.binding == found.fit.reason


@HERE
@pytest.mark.parametrize("kind", ["exact", "portable", "reference"])
def test_the_doctor_says_what_apex_binding_does(kind):
    code = (
        "import json, sys\nfrom apex import _loader\nfrom apex._loader import doctor\n"
        "report = doctor.examine()\nprint(json.dumps([report.facts.fit.kind, _loader.load().kind,"
        "[p.remedy for p in report.problems if p.severity != 'note' and p.name != 'wrong vendor']]))"
    )
    said, loaded, remedies = json.loads(python(code, APEX_BINDING=kind).stdout.splitlines()[-1])
    assert said == loaded == kind and not [r for r in remedies if "pip" in r]


@HERE
def test_a_keyboard_interrupt_stays_one(monkeypatch):
    lib = library.load()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(lib.resolver, "answer", interrupted)
    lib.c.apex_forget_choices()
    with pytest.raises(KeyboardInterrupt):
        lib.resolve("cpu", 0, UNIT)
    lib.c.apex_forget_choices()


def test_sixteen_threads_describe_the_machine_once(monkeypatch):
    import threading
    import time

    calls, seen = [], []

    def describe():
        calls.append(1)
        time.sleep(0.05)
        return machine.Machine()

    monkeypatch.setattr(probe, "describe", describe)
    probe.here.forget()
    threads = [threading.Thread(target=lambda: seen.append(probe.here())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    probe.here.forget()
    assert len(calls) == 1 and len(set(map(id, seen))) == 1


@pytest.mark.parametrize("name", ["APEX_JIT", "APEX_STRICT"])
def test_switches_of_yes_and_no(name):
    for text, on in (("1", True), ("yes", True), ("0", False), ("OFF", False), ("no", False)):
        assert environment.is_on({name: text}, name) is on
    assert environment.is_on({name: ""}, name, "1") and not environment.is_on({}, name)


def test_types_of_the_machine_are_its_own():
    """Those who read files make them, and do not define them."""
    assert pack_files.Pack is machine.Pack and isinstance(BINDING, Binding)


FORK = """
import os, signal, threading
import torch
from apex._loader import bindings, library, probe, reference
held, done = threading.Event(), threading.Event()
def hold():
    with bindings.load._lock, library.load._lock, probe.here._lock, reference.register._lock:
        held.set()
        done.wait(30)
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    bindings.load()
    flag, out = torch.zeros(1, dtype=torch.int32), [torch.empty(3)]
    torch.ops.apex.multi_tensor_scale([torch.ones(3)], out, flag, 2.0)
    os._exit(0 if out[0].tolist() == [2.0] * 3 else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
done.set()
print("child ended with", code)
"""


@pytest.mark.parametrize("kind", ["exact", "portable", "reference"])
def test_a_child_that_was_forked_while_another_thread_loads(kind):
    """A lock of a thread that the child has not would be waited for in vain; that of the references was."""
    if kind != "reference" and (installed.library_fault() or not installed.bindings()):
        pytest.skip("no built bindings in this tree")
    assert python(FORK, APEX_BINDING=kind, OMP_NUM_THREADS=1).stdout == "child ended with 0\n"


THREADS = """
import threading
import torch
gate, found = threading.Barrier(16), []
def first():
    gate.wait()
    from apex import _loader
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam
    kind = _loader.load().kind
    x = torch.randn(4, 8)
    torch.testing.assert_close(FusedLayerNorm(8)(x), torch.nn.functional.layer_norm(x, (8,)))
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    FusedAdam([p], lr=0.1).step()
    found.append((kind, round(p[0].item(), 4)))
threads = [threading.Thread(target=first) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found), *sorted(set(found)))
"""


@pytest.mark.parametrize("kind", ["exact", "portable", "reference"])
def test_sixteen_threads_whose_first_call_it_is(kind):
    if kind != "reference" and (installed.library_fault() or not installed.bindings()):
        pytest.skip("no built bindings in this tree")
    assert python(THREADS, APEX_BINDING=kind, OMP_NUM_THREADS=1).stdout == f"16 ('{kind}', 0.9)\n"


def test_once_runs_again_after_it_raised():
    from apex._loader.once import Once

    calls = []

    @Once
    def made():
        """Says what it is."""
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("not yet")
        return len(calls)

    assert made.made() is None and made.__doc__ == "Says what it is."
    with pytest.raises(ValueError, match="not yet"):
        made()
    assert made() == made() == made.made() == 2
    made.forget()
    assert made() == 3
