"""Sphinx's settings; `nox -s docs` runs it (build_matrix/site)."""

from build_matrix.site import docstrings
from build_matrix.spec import identity

project = "apex"
author = "the apex maintainers"
copyright = "its authors, BSD 3-Clause"
version = release = identity.version()

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["extra", "LICENSE"]
html_extra_path = ["extra"]

# Pages: links to headings are as on GitHub.
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # a page may begin its sections at any level

# Docstrings: `name` is code, and Args, Returns and Raises are sections.
default_role = "code"
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # torch says of forward() what is true of any module
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"apex {release}"
html_static_path = ["_static"]
html_css_files = ["apex.css"]
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def setup(app):
    """Docstrings are made reStructuredText before napoleon reads their sections."""

    def read(app, what, name, obj, options, lines):
        lines[:] = docstrings.convert(lines)

    app.connect("autodoc-process-docstring", read, priority=400)
