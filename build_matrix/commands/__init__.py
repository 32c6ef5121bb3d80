"""The commands of `python -m build_matrix`."""
