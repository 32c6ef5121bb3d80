"""The import names of public apex's compiled extensions: amp_C, apex_C, syncbn and the rest.

A name whose extension is complete is a generated top-level module of the wheel (`module_text`) that takes its
functions from `apex._legacy.<name>`. Any other name of the registry is absent: importing it raises
ModuleNotFoundError, and `importlib.util.find_spec` gives None, because Megatron-LM, transformers, DeepSpeed
and NeMo probe by these two. Once apex is imported, that error says that it is not in this build, and what to use.
"""

from __future__ import annotations

import importlib


def module_text(name):
    """Source of the generated top-level module `name`. It imports torch itself, as users may not have."""
    return f'"""Functions of public apex\'s {name}. Generated."""\n\nimport torch  # noqa: F401\n\n' + (
        f"from apex._legacy.{name} import *  # noqa: F403\n"
    )


def message(name):
    """What an import of the absent extension `name` says, or None if the registry does not hold it."""
    from apex._legacy import public_names
    from apex._loader import layout, registry

    extension = registry.extensions().get(name)
    if extension is None:
        return None
    version = layout.version()
    if extension.state == "complete":
        return (
            f"No module named {name!r}: it belongs to apex {version} but is not installed; "
            "reinstall the wheel (`python -m apex` names it)"
        )
    told = public_names.not_in_this_build(f"No module named {name!r}", extension.successor)
    return f"{told}; apex {extension.release} brings it" if extension.release else told


def require(name):
    """The extension module `name`. Raises ModuleNotFoundError with `message(name)` and `name` set."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(message(name) or str(error), name=name) from None
