"""The build farm: what is built of this checkout, how, and what is checked and served of it.

Its rooms, each of which imports from those above it alone (tests/farm/test_rooms.py):

    store       outputs of work units by the hash of what went in; files, digests, archives
    spec        what is asked for: matrix, pins, registry of extensions, identity of the checkout
    toolchains  compilers, headers, Pythons: where they are, and how they come
    generator   the bindings' generated C++
    parts       packs, host library, bindings; the tree that they are laid into
    wheels      wheels, what lies beside them and what is in them; source installs
    farm        the whole release as a plan of steps, on Dask or GitHub Actions
    check       lint, tests and their receipts, what a release must pass
    serve       the index, the compatibility table, the answers of compat and which
    containers  wheels in containers, images with apex
    site        the documentation, and the tables of README
    commands    the command line, a file a command

`backend` is the build backend of pyproject.toml, and `rings` takes durations of tests: both are run by these names.
Building (the rooms down to `parts`, and wheels.source_install) needs nothing that torch does not bring, because
setup.py uses it too. The command line, wheels and index use the libraries of pyproject.toml's dependency group `farm`;
`which` and `compat` run wherever Python does.
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
