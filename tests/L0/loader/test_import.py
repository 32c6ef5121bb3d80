"""`import apex`: light, no torch, no driver, no write, anywhere."""

import os
import statistics
import subprocess
import sys

from .described import ROOT, python

DRIVERS = ("libcuda.so", "libamdhip64", "libnvrtc", "libhiprtc", "libapex", "libcudart")


def test_imports_neither_torch_nor_a_driver():
    code = f"""
import sys, apex
assert "torch" not in sys.modules and "apex._loader" not in sys.modules
maps = open("/proc/self/maps").read()
assert not [name for name in {DRIVERS!r} if name in maps]
print(apex.__version__)
"""
    assert python(code).stdout.startswith("1.")


def test_loading_opens_no_driver_either():
    """Report 10: a CUDA torch without libcuda.so.1; here: nothing maps it."""
    code = f"""
import apex._loader, torch
before = open("/proc/self/maps").read()
apex._loader.load()
after = open("/proc/self/maps").read()
print([n for n in {DRIVERS[:5]!r} if n != "libapex" and n in after and n not in before])
"""
    assert python(code).stdout.strip() == "[]"


def test_import_time():
    """It adds at most 100 ms to `import torch`; the median of three fresh processes."""
    code = "import torch, time; t = time.perf_counter(); import apex; print(time.perf_counter() - t)"
    times = [float(python(code).stdout) for _ in range(3)]
    assert statistics.median(times) < 0.1, times


def test_read_only_home_and_a_path_with_python_only(tmp_path):
    """Report 16: no compiler process, no write."""
    code = """
import os, sys, apex, apex._loader, torch
apex._loader.load()
flag = torch.zeros(1, dtype=torch.int32)
out = [torch.empty(3)]
torch.ops.apex.multi_tensor_scale([torch.ones(3)], out, flag, 2.0)
print(out[0].tolist())
"""
    home = tmp_path / "home"
    home.mkdir()
    command = [sys.executable, "-B", "-c", code]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-dac_override", *command]
    home.chmod(0o555)
    environment = {"HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": "/nonexistent"}
    setpriv = {"PATH": os.environ["PATH"]} if os.geteuid() == 0 else {}
    inner = ["env", "PATH=/nonexistent"] if os.geteuid() == 0 else []
    if inner:
        position = command.index(sys.executable)
        command[position:position] = inner
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, **setpriv}, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[2.0, 2.0, 2.0]" and not os.listdir(home)


def test_lazy_subpackages():
    code = """
import sys, apex
assert "apex.optimizers" not in sys.modules
assert apex.optimizers.__name__ == "apex.optimizers" and "torch" in sys.modules
assert "optimizers" in dir(apex) and not hasattr(apex, "nothing_of_the_kind")
try:
    from apex import nothing_of_the_kind
except ImportError as error:
    print(type(error).__name__, error)
"""
    assert "cannot import name 'nothing_of_the_kind' from 'apex'" in python(code).stdout


def test_every_module_imports():
    """Report 18, for the torch that is installed."""
    code = """
import importlib, pkgutil, apex
count = 0
for module in pkgutil.walk_packages(apex.__path__, "apex."):
    if module.name.rsplit(".", 1)[1] not in ("__main__", "_C"):
        importlib.import_module(module.name)
        count += 1
print(count)
"""
    assert int(python(code).stdout) > 20
