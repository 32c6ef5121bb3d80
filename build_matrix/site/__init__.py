"""The documentation as a site: `nox -s docs`, or `python -m build_matrix.site`, writes build/docs.

Pages are those of the repository, as they stand: README is the first one, and links between them work in both places.
To them come what only a build makes: the reference of every public module from its docstrings (api), which names of
public apex are here (names), plots of the recorded measurements (plots), and which wheel serves which machine (page).
Sphinx makes HTML of it, for which a warning is an error; then every link within the site is looked at (links).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.serve import compat, page
from build_matrix.site import api, links, names, plots

OUTPUT = REPOSITORY / "build/docs"
STAGE = REPOSITORY / "build/docs-source"
COMPATIBILITY = "compatibility.html"
# Of the first page: headings of the contents, and the pages under them.
CONTENTS = {
    "Use": (
        "docs/install",
        "docs/npu",
        "docs/windows",
        "docs/migration",
        "docs/torch_amp",
        "docs/support",
        "docs/names",
        "docs/decisions",
        "docs/compatibility",
        "docs/speed",
    ),
    "Guides": (
        *(
            "docs/optimizers",
            "docs/dense",
            "docs/fp8",
            "docs/convolutions",
            "docs/spatial",
            "docs/fmha",
            "docs/openfold",
            "docs/multihead_attn",
            "docs/amp",
            "docs/parallel",
            "docs/tensor_parallel",
            "docs/pipeline_parallel",
            "docs/transformer_testing",
            "docs/public_tests",
            "docs/transformer_engine",
            "docs/sync_batchnorm",
            "docs/group_batchnorm",
        ),
        *("docs/distributed_optimizers", "docs/combined_tensors", "docs/transformer_engine_jax"),
        "docs/sparsity",
    ),
    "Reference": ("api/index",),
    "Inside": (
        "docs/architecture",
        "docs/portable_binding",
        "docs/adding_an_op",
        "docs/testing",
        "docs/build",
        "docs/containers",
        "CONTRIBUTING",
    ),
    "Releases": ("release_notes/*",),
}


def build(output: Path = OUTPUT, stage: Path = STAGE) -> None:
    """Writes the site. Raises BuildError where Sphinx warns, a page stands in no contents, or a link leads nowhere."""
    from sphinx.cmd.build import main as sphinx

    shutil.rmtree(stage, ignore_errors=True)
    shutil.rmtree(output, ignore_errors=True)
    write_sources(stage)
    if sphinx(["-W", "--keep-going", "-q", "-b", "html", str(stage), str(output)]):
        raise BuildError("the documentation has faults, which stand above: a warning is one, too")
    if faults := links.faults(output):
        raise BuildError("links of the documentation lead nowhere:\n" + "\n".join(faults))


def write_sources(stage: Path) -> None:
    """Everything that Sphinx reads."""
    for pattern in ("CONTRIBUTING.md", "LICENSE", "docs/*.md", "release_notes/*.md"):
        for path in REPOSITORY.glob(pattern):
            _write(stage / path.relative_to(REPOSITORY), _of_site(path.read_text(encoding="utf-8")))
    shutil.copy(REPOSITORY / "docs/conf.py", stage / "conf.py")
    shutil.copytree(REPOSITORY / "docs/_static", stage / "_static")
    _write(stage / "index.md", (REPOSITORY / "README.md").read_text(encoding="utf-8") + _contents())
    for name, text in api.pages().items():
        _write(stage / "api" / f"{name}.rst", text)
    plots.write(stage / "docs/plots")
    speed = stage / "docs/speed.md"
    _write(
        speed, speed.read_text(encoding="utf-8").replace(plots.PLACE, plots.markdown("plots") + plots.PLACE)
    )
    _write(stage / "docs/compatibility.md", _compatibility())
    _write(stage / "docs/names.md", names.markdown())
    _write(stage / "extra" / COMPATIBILITY, page.render(page.of_checkout()))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _of_site(text: str) -> str:
    return text.replace("../README.md", "../index.md")


def _contents() -> str:
    found = ""
    for heading, pages in CONTENTS.items():
        listed = "\n".join(pages)
        found += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n:glob:\n\n{listed}\n```\n"
    return found


def _compatibility() -> str:
    return f"""# Which wheel for which machine

<a href="../{COMPATIBILITY}">The whole matrix, to filter</a> by torch, architecture, Python and platform, with pip's
line. For one machine `python -m apex which` answers, for another one `python -m apex compat`.

What is known of each pack beside each torch, from the receipts of the tests: *built* is code that the gate has looked
at and no card has run.

{compat.table()}
"""
