"""Wheels: from a tree to a file in dist/, what lies beside it (statement, bill of materials, signature), and what is
inside one. `source_install` is what `pip install .` does instead."""
