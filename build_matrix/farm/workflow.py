"""The release as GitHub Actions runs it: the jobs of its matrix, and .github/workflows/release.yml made from them.

`python -m build_matrix.farm.workflow` writes the file anew; a test compares.

Three stages. The first makes the parts, each job those of one toolchain or one torch; what its store holds then travels
as an artifact. The second finds them there and zips the wheels. Keys hold the digests of the compilers, so the second
stage provisions the same ones, and makes again what differs. The third lays all wheels together, with their digests,
the compatibility table and the index; then the documentation is built and published as GitHub's pages.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, StrictUndefined

from build_matrix import REPOSITORY
from build_matrix.farm.plan import Selection, hosts, resolve
from build_matrix.spec import matrix
from build_matrix.store import files

FILE = REPOSITORY / ".github/workflows/release.yml"
TEMPLATE = Path(__file__).with_name("release.yml.jinja")


def jobs(chosen: Selection) -> dict[str, dict]:
    """{"parts": {"include": [...]}, "wheels": {"include": [...]}}: two job matrices. `chosen` is resolved. Each
    row names the job, the toolchains it brings first, and the options of `nox -s farm`."""
    by_toolchain: dict[str, list[str]] = {}
    for arch in chosen.archs:
        by_toolchain.setdefault(matrix.load().pack(arch).toolchains[0], []).append(arch)
    platforms = [matrix.load().platform(name) for name in hosts(chosen)]
    parts = [_row(f"library{p.suffix}", _cross(p), ["--only library", *_on(p)]) for p in platforms]
    parts += [
        _row(
            f"torch {t}{p.suffix}", _cross(p), ["--only bindings", f"--torch {t}", *_pythons(chosen), *_on(p)]
        )
        for p in platforms
        if not p.windows
        for t in chosen.torches
    ]
    for toolchain, archs in by_toolchain.items():
        parts.append(
            _row(f"packs {toolchain}", [toolchain], ["--only packs", *(f"--arch {a}" for a in archs)])
        )
    wheels = []
    compiled = matrix.load().compiled(chosen.accelerators)
    for platform, name in [(p, a) for p in platforms for a in compiled if a in p.accelerators]:
        own = [a for a in chosen.archs if matrix.load().pack(a).arch.vendor == name]
        toolchains = [t for t, archs in by_toolchain.items() if set(archs) & set(own)]
        toolchains += _cross(platform)
        options = [f"--accelerator {name}"]
        if not platform.windows:
            options += [*(f"--torch {t}" for t in chosen.torches), *_pythons(chosen)]
        options += [*_on(platform), *(f"--arch {a}" for a in own)]
        wheels.append(_row(f"apex-{name}{platform.suffix}", toolchains, options))
    pure = [name for name in chosen.accelerators if name not in compiled]
    wheels += [_row(f"apex-{name}", [], [f"--accelerator {name}"]) for name in pure]  # one for every platform
    return {"parts": {"include": parts}, "wheels": {"include": wheels}}


def _cross(platform: matrix.Platform) -> list[str]:
    return [platform.toolchain] if platform.toolchain else []


def _on(platform: matrix.Platform) -> list[str]:
    return [f"--platform {platform.name}"]


def _row(name: str, toolchains: list[str], options: list[str]) -> dict[str, str]:
    return {"name": name, "toolchains": " ".join(toolchains), "options": " ".join(options)}


def _pythons(chosen: Selection) -> list[str]:
    return [f"--python {matrix.dotted(tag)}" for tag in chosen.pythons]


def render() -> str:
    """The text of release.yml for the whole matrix."""
    chosen = resolve(Selection())
    made = jobs(chosen)
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        variable_start_string="<<",
        variable_end_string=">>",
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        parts=made["parts"]["include"],
        wheels=made["wheels"]["include"],
        # The last one is the one that runs nox.
        pythons=sorted(map(matrix.dotted, chosen.pythons), key=lambda python: python == "3.11"),
    )


def write() -> None:
    """Writes the file anew."""
    files.write(FILE, render())


if __name__ == "__main__":
    write()
