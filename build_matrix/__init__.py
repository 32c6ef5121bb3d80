"""The build farm: device packs, host library, bindings, wheels and index of apex.

Building (`registry`, `store`, `toolchains`, `packs`, `host_library`, `headers`, `bindings`, `tree`) needs
nothing that torch does not bring, because setup.py uses it too. The command line, wheels and index use the
libraries of pyproject.toml's dependency group `farm`; `which` runs wherever Python does.
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
