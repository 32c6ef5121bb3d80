"""The documentation: every public module has a page, docstrings are read as they are meant, links lead somewhere, and
the contents name every page. `nox -s docs` builds all of it."""

import importlib
import re
from types import ModuleType

import pytest
import yaml

from apex._legacy import public_names
from build_matrix import REPOSITORY, site
from build_matrix.farm import workflow
from build_matrix.serve import page
from build_matrix.site import api, docstrings, links, names, speed


@pytest.fixture(scope="module")
def pages():
    return api.pages()


def test_every_public_module_is_on_a_page(pages):
    text = "\n".join(pages.values())
    listed = re.findall(r"^\.\. automodule:: (\S+)$", text, re.MULTILINE)
    assert sorted(listed) == api.modules() and len(listed) == len(set(listed))
    assert {
        "apex",
        "apex.optimizers.fused_adam",
        "apex.contrib.group_norm",
        "apex.transformer.functional",
    } <= set(listed)
    sources = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for path in (REPOSITORY / "apex").rglob("*.py")
    }
    public = {
        name for name in sources if not re.search(r"(^|\.)_", name) and not name.startswith("apex.reference")
    }
    assert public == set(listed)


def test_every_public_name_is_on_a_page_once(pages):
    entries = re.findall(
        r"^\.\. (?:auto(?:class|function|exception)|py:data):: (\S+)$",
        "\n".join(pages.values()),
        re.MULTILINE,
    )
    objects = {}
    for name in entries:
        module, _, attribute = name.rpartition(".")
        value = (
            getattr(importlib.import_module(module), attribute) if module else importlib.import_module(name)
        )
        if not isinstance(value, ModuleType):
            assert objects.setdefault(id(value), name) == name
    shown = set(objects)
    for module in map(importlib.import_module, api.modules()):
        assert all(id(getattr(module, name)) in shown for name in api.names(module)), module.__name__


def test_the_contents_name_every_page_of_docs():
    named = {name for pages in site.CONTENTS.values() for name in pages}
    assert {f"docs/{path.stem}" for path in REPOSITORY.glob("docs/*.md")} <= named
    made = {"docs/compatibility", "docs/names", "api/index"}
    assert all(list(REPOSITORY.glob(f"{name}.md")) for name in named - made)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Adds.\n\n    y = f(x)\n    y **= 2\n\nThen.", "Adds.\n\n::\n\n    y = f(x)\n    y **= 2\n\nThen."),
        ("The norm |p| of `a|b`.", "The norm \\|p\\| of `a|b`."),
        ("As clip_grad_norm_ does, `x_` too.", "As clip_grad_norm\\_ does, `x_` too."),
        ("At 2**16 at first.", "At 2\\*\\*16 at first."),
        ("Of [..., *shape].", "Of [..., \\*shape]."),
        ("Args:\n    x: a tensor\n        of two.\n", "Args:\n    x: a tensor\n        of two.\n"),
        ("Args:\n    x: one.\n\n        deep()\n", "Args:\n    x: one.\n\n    ::\n\n        deep()\n"),
    ],
)
def test_docstrings_are_read_as_they_are_meant(text, expected):
    assert "\n".join(docstrings.convert(text.split("\n"))) == expected


def test_links_that_lead_nowhere_are_told(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="sub/a.html#here">1</a> <a href="gone.html">2</a> <a href="#top">3</a>'
        '<a href="https://example.org/x">4</a> <img src="plot.svg"> <a href="sub/a.html#gone">5</a>'
    )
    (tmp_path / "sub/a.html").write_text('<p id="here"></p><a href="../index.html#top">back</a>')
    assert links.faults(tmp_path) == [
        "index.html: gone.html",
        "index.html: plot.svg",
        "index.html: sub/a.html#gone",
    ]


def test_the_sources_hold_plots_tables_and_the_page_of_wheels(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    site.write_sources(tmp_path)
    text = (tmp_path / "docs/speed.md").read_text(encoding="utf-8")
    for run in speed.runs():
        for theme in ("light", "dark"):
            assert f"plots/{run.benchmark}-{theme}.svg" in text
            drawn = (tmp_path / f"docs/plots/{run.benchmark}-{theme}.svg").read_text(encoding="utf-8")
            mine = speed.ours(next(iter(run.cases.values())))
            assert f"{mine['implementation']}, {mine['graph'] * 1e6:.0f} µs" in drawn
    whole = (tmp_path / "extra" / site.COMPATIBILITY).read_text(encoding="utf-8")
    assert whole == page.render(page.of_checkout())
    first = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert (
        first.startswith((REPOSITORY / "README.md").read_text(encoding="utf-8"))
        and "docs/compatibility" in first
    )
    assert "../README.md" not in "".join(p.read_text(encoding="utf-8") for p in tmp_path.glob("docs/*.md"))


def test_a_warning_and_a_dead_link_fail_it(tmp_path, monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.setattr(site, "write_sources", lambda stage: _small(stage, "[gone](gone.md)"))
    with pytest.raises(site.BuildError, match="a warning is one"):
        site.build(tmp_path / "out", tmp_path / "stage")
    monkeypatch.setattr(site, "write_sources", lambda stage: _small(stage, '<a href="gone.html">gone</a>'))
    with pytest.raises(site.BuildError, match="lead nowhere:\nindex.html: gone.html"):
        site.build(tmp_path / "out", tmp_path / "stage")


def _small(stage, text):
    stage.mkdir(parents=True)
    (stage / "conf.py").write_text('extensions = ["myst_parser"]\nhtml_theme = "basic"\n')
    (stage / "index.md").write_text(f"# Title\n\n{text}\n")


def test_a_release_publishes_it():
    said = yaml.safe_load(workflow.FILE.read_text(encoding="utf-8"))["jobs"]["docs"]
    steps = [step.get("run", step.get("uses", "")) for step in said["steps"]]
    built, kept, published = steps[-3:]
    assert built.endswith("nox -s docs") and "upload-pages-artifact@" in kept and "deploy-pages@" in published
    assert said["steps"][-2]["with"]["path"] == site.OUTPUT.relative_to(REPOSITORY).as_posix()
    assert said["needs"] == "release" and said["permissions"]["pages"] == "write"


def test_names_of_public_apex_are_counted_once_and_what_is_absent_is_told():
    rows = names.rows()
    assert sum(here + len(absent) for here, absent in rows.values()) == len(public_names.listed())
    assert rows["apex.optimizers"][0] > 5 and not rows["apex.optimizers"][1]
    assert rows["apex.contrib.torchsched"] == (
        0,
        [
            name
            for name in public_names.listed()
            if name.rpartition(".")[0] == "apex.contrib.torchsched"
            and not public_names.listed()[name].is_module
            or name == "apex.contrib.torchsched"
        ],
    )
    told = names.markdown()
    assert (
        "| `apex.contrib.torchsched` | 0 | the module: torch.compile; `get_backend`: torch.compile;" in told
    )


@pytest.mark.parametrize(
    "name,here", [("apex.amp.initialize", True), ("apex.pyprof.x", False), ("apex.no", False)]
)
def test_a_name_is_here_or_not(name, here):
    assert names.is_here(name) is here
