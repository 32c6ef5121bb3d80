"""What is left of a distribution when another one that holds the same files is uninstalled: pip takes the package
`apex` away with it, whoever else owns it. Each distribution therefore brings two files of its own: a .pth that adds a
folder to the end of sys.path, and in it an `apex` that is only found where the package is gone, and says what happened.
"""

from __future__ import annotations

from apex._loader import release, remedies
from build_matrix.spec import matrix

TEXT = '''"""Stands in for the package apex where its files are gone: {name} {version} is installed, and another
distribution that held the same files was uninstalled."""

import os
import re
import sys

INDEX = re.sub("(/whl)?/*$", "", os.environ.get("APEX_INDEX") or {index!r})
MEND = {mend!r}.replace("<index>", INDEX)
TEXT = (
    "{name} {version} is installed, but its files are gone: they were removed with another apex "
    "distribution that held the same files"
)

if __name__ == "__main__":
    if "--json" in sys.argv:
        import json

        problem = {{"severity": "broken", "name": "half-deleted apex", "text": TEXT, "remedy": MEND}}
        print(json.dumps({{"apex": {version!r}, "state": "broken", "exit_code": 2, "problems": [problem]}}, indent=2))
    else:
        print(f"apex {version}: broken\\n\\nbroken: half-deleted apex\\n  {{TEXT}}\\n\\nto mend it: {{MEND}}")
    sys.exit(2)
raise ImportError(f"{{TEXT}}. To mend it: {{MEND}}", name="apex")
'''


def files(distribution: str, version: str) -> dict[str, bytes]:
    """The two files, by their names in the wheel. `apex` is the distribution of a build from source."""
    own = (distribution if distribution != "apex" else "apex-source").replace("-", "_")
    index, mend = matrix.load().index or "<index>", _mend(distribution, version)
    text = TEXT.format(name=distribution, version=version, index=index, mend=mend)
    return {f"{own}.pth": f"_{own}\n".encode(), f"_{own}/apex.py": text.encode()}


def _mend(distribution: str, version: str) -> str:
    for accelerator in matrix.load().accelerators:
        if accelerator.distribution == distribution:
            root = f"{release.SOMEWHERE}/whl/{accelerator.roots[0]}/"
            return remedies.install(distribution, version, root, remedies.ANEW)
    return remedies.of_source()
