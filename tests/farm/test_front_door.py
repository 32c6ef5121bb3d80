"""README is short and says what a stranger asks, in that order; what docs/architecture.md names is there; links lead
somewhere."""

import re

import pytest

from build_matrix import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("release_notes/*.md")]
)
SECTIONS = ["Two commands", "Install", "Use", "Where things are", "How the kernel is picked", "Limits"]


def test_readme_is_short():
    assert len(README.encode()) <= 7000


def test_readme_has_its_sections_in_their_order():
    assert README.startswith("# Apex, prebuilt\n\nFused CUDA and HIP kernels")  # what it is comes first
    assert re.findall(r"^## (.+)$", README, re.MULTILINE) == SECTIONS


def test_readme_leaves_tables_of_extensions_and_speed_to_their_pages():
    assert re.findall(r"<!-- begin: (\w+) -->", README) == ["install", "cards"]
    for page in (
        "support.md",
        "speed.md",
        "architecture.md",
        "migration.md",
        "install.md",
        "testing.md",
        "build.md",
    ):
        assert f"(docs/{page})" in README


def anchors(text):
    """Of headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+://", target):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), f"{page.name}: {target}"


def walk():
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", text, re.MULTILINE)


def test_both_walks_are_there():
    assert len(walk()) > 20
    assert {"step", "apex_multi_tensor_adam", "norm_forward_rows", "run_norm_backward"} <= {
        name for _, name in walk()
    }


@pytest.mark.parametrize(("file", "name"), walk())
def test_the_walks_name_what_there_is(file, name):
    assert re.search(rf"\b{name}\b", (REPOSITORY / file).read_text(encoding="utf-8")), f"{file} has no {name}"


def test_other_files_that_the_architecture_names_are_there():
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:apex|csrc|build_matrix|tests|benchmarks|docs)/[\w./]*)`", text)
    assert names and all((REPOSITORY / name).exists() for name in names), names
