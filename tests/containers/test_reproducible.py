"""The same sources in two containers that share nothing but the compilers: the same bytes."""

import hashlib
import os
import subprocess

import pytest

from build_matrix.containers import engine, pip_settings, wheels
from build_matrix.errors import ToolchainMissing
from tests.containers.conftest import long

pytestmark = [pytest.mark.container, long]
# One cell; APEX_CONTAINER_CELL="rocm gfx942" builds a pack too.
ACCELERATOR, *ARCHS = os.environ.get("APEX_CONTAINER_CELL", "cpu").split()
SETTINGS = [
    "-C",
    f"farm={ACCELERATOR}",
    "-C",
    "torch=2.13.0",
    *(["-C", f"arch={','.join(ARCHS)}"] if ARCHS else []),
]

PLAIN = 'exec "$@"'
# Another year, and a locale whose capital i is not I. (What needs the network has run: certificates would be too old.)
ELSEWHEN = """
apt-get update -qq && apt-get install -qq -y faketime locales >/dev/null
localedef -i tr_TR -f UTF-8 tr_TR.UTF-8
export LC_ALL=tr_TR.UTF-8 TZ=Pacific/Kiritimati
umask 077
exec faketime -f '+1000d' "$@"
"""
SCRIPT = """
set -eu
mkdir -p "$WHERE"
cp -r /sources/. "$WHERE"
cd "$WHERE"
export PATH=$(echo /opt/python/cp3*-cp3*/bin | tr ' ' '\\n' | grep -v cp39-):$PATH
python -m pip install --quiet 'pip>=25.1'
python -m pip install --quiet setuptools --group farm
python -c 'from build_matrix.store import Store
from build_matrix.toolchains import headers
headers.published("2.13.0", Store())'
cat >/run/wrapped
sh -eu /run/wrapped sh -c 'echo "$(date +%Y) $(nproc) $(umask) ${LC_ALL:-none} $PWD" >&2; exec "$@"' - \\
  python -m pip wheel . --no-deps --no-build-isolation --wheel-dir /output "$@"
"""


def build(engine_name, image, sources, output, where, cores, wrapper):
    """Builds with an empty store under `where` in a container of its own. Returns {name: SHA-256}, and what the
    container said of itself."""
    options = [f"--cpuset-cpus={cores}", f"--env=WHERE={where}", f"--env=APEX_JOBS={len(cores.split(','))}"]
    options += [engine.volume(sources, "/sources"), engine.volume(output, "/output", read_only=False)]
    settings = pip_settings.read()
    options += [f"--env={name}={value}" for name, value in settings.variables.items()]
    options += [engine.volume(path) for path in settings.paths]
    options += [option.replace(f"{wheels.PROJECT}/", f"{where}/") for option in wheels.toolchains(ARCHS)]
    command = [engine_name, "run", "--rm", "--interactive", "--network=host", *engine.limits(), *options]
    ended = subprocess.run(
        [*command, image, "bash", "-c", SCRIPT, "-", *SETTINGS], input=wrapper, text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout[-3000:]
    made = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in output.glob("*.whl")}
    assert len(made) == 1
    (said,) = [line for line in ended.stderr.splitlines() if line.endswith(where)]
    return made, said.split(maxsplit=4)


def test_two_containers_give_the_same_bytes(engine_name, image, tmp_path):
    """Path, time, time zone, locale, umask and cores differ."""
    try:
        wheels.toolchains(ARCHS)
    except ToolchainMissing as error:
        pytest.skip(str(error))
    wheels.export(tmp_path / "sources")
    made, said = {}, {}
    for name, where, cores, wrapper in (
        ("one", "/src", "0", PLAIN),
        ("two", "/home/builder/a long/path-ünd more/apex", "0,1" if os.cpu_count() > 1 else "0", ELSEWHEN),
    ):
        (tmp_path / name).mkdir()
        made[name], said[name] = build(
            engine_name, image, tmp_path / "sources", tmp_path / name, where, cores, wrapper
        )
    print(said, made)
    assert int(said["two"][0]) - int(said["one"][0]) >= 2, "the second container's clock is not another"
    assert (said["one"][2:4], said["two"][2:4]) == (["0022", "C.UTF-8"], ["0077", "tr_TR.UTF-8"])
    assert made["one"] == made["two"]
