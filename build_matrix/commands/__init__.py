"""The commands of `python -m build_matrix`, a file each: `load_test.command` is `load-test`. What several of them take
is in `options`; `alone` serves where their packages are missing. Only the one that is asked for is imported: a package
that it lacks keeps no other from running."""

NAMES = (
    "tree", "wheel", "index", "publish", "variants", "bake", "serve", "toolchain", "quickstart", "ensure-torch",
    "compat", "which", "load-test", "canary", "farm", "plan", "explain", "diff", "sign", "verify", "lint", "tests",
    "tier", "release-check", "receipts", "changelog", "readme", "transformer-engine",
)  # fmt: skip
