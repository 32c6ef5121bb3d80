"""The registry of extensions (csrc/extensions.toml), checked as a build needs it; the loader's reader reads it, and the
schemas (csrc/ops.schemas)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from apex._loader.registry import Extension, of_table, schemas
from build_matrix import REPOSITORY
from build_matrix.errors import BuildError, NotInThisBuild, UnknownVariable
from build_matrix.spec import toml

__all__ = ["Extension", "Registry", "device_units", "schemas"]
GROUPS = {"cpp": ("APEX_BUILD_CPP_OPS", "APEX_BUILD_CPU_OPS"), "cuda": ("APEX_BUILD_CUDA_OPS",)}
STATES = ("complete", "planned")
NEEDED = ("variable", "option", "minimum_torch")  # by a build, and not by who runs apex


class Registry:
    """All extensions, in the order of the file."""

    def __init__(self, extensions: list[Extension]):
        self.extensions = extensions
        for attribute in ("name", "variable"):
            seen = [getattr(extension, attribute) for extension in extensions]
            for value in {value for value in seen if seen.count(value) > 1}:
                raise BuildError(f"csrc/extensions.toml: {attribute} {value!r} is there twice")

    @classmethod
    def load(cls, path: Path | None = None) -> Registry:
        """Raises BuildError naming the extension that breaks a rule, or has a field that is unknown or missing."""
        path = path or REPOSITORY / "csrc/extensions.toml"
        return cls([_checked(table, path.name) for table in toml.read(path).get("extension", [])])

    def ops(self) -> list[str]:
        """Every op with a binding, each once, in the order of the file."""
        return list(
            dict.fromkeys(op for extension in self.extensions for op in extension.ops + extension.host_ops)
        )

    def device_ops(self) -> list[str]:
        """The ops that have a device source."""
        host = {op for extension in self.extensions for op in extension.host_ops}
        return [op for op in self.ops() if op not in host]

    def complete(self) -> list[Extension]:
        """The extensions whose import name goes into wheels."""
        return [extension for extension in self.extensions if extension.state == "complete"]

    def as_json(self) -> list[dict]:
        """What apex/extensions.json holds: the loader runs on Pythons that cannot read TOML."""
        return [asdict(extension) for extension in self.extensions]

    def asked(self, environment: Mapping[str, str], options: Sequence[str] = ()) -> list[Extension]:
        """The extensions that variables and `--option`s of a source build ask for.

        APEX_BUILD_<OP>, the group variables, and the other tree's APEX_<OPTION> (APEX_CPP_EXT,
        APEX_XENTROPY); a variable asks when it is set to anything but "", "0", "false", "no" or "off". Raises
        UnknownVariable for an APEX_BUILD_ variable or an option that names nothing, NotInThisBuild for one that names
        planned extensions alone: pip shows what a build says only where it fails.
        """
        names = self._names()
        wanted: set[str] = set()
        for variable, value in environment.items():
            if variable.startswith("APEX_BUILD_") and variable not in names:
                near = difflib.get_close_matches(
                    variable, [n for n in names if n.startswith("APEX_BUILD_")], 2
                )
                raise UnknownVariable(variable, near)
            if variable in names and value.strip().lower() not in ("", "0", "false", "no", "off"):
                wanted |= self._here(variable, names[variable])
        for option in options:
            if option not in names:
                near = difflib.get_close_matches(option, [n for n in names if n.startswith("--")], 2)
                raise UnknownVariable(option, near)
            wanted |= self._here(option, names[option])
        return [extension for extension in self.extensions if extension.name in wanted]

    def _here(self, switch: str, names: set[str]) -> set[str]:
        """The names that a switch asks for, if one of them at least is in this build."""
        asked = [extension for extension in self.extensions if extension.name in names]
        if all(extension.state == "planned" for extension in asked):
            raise NotInThisBuild(switch, {extension.name: extension.successor for extension in asked})
        return names

    def options(self) -> list[str]:
        """Every option of the other public tree: --cpp_ext, --cuda_ext, --xentropy, ..."""
        return list(dict.fromkeys(f"--{extension.option}" for extension in self.extensions))

    def _names(self) -> dict[str, set[str]]:
        """What a build may be asked by -> names of the extensions it asks for."""
        names: dict[str, set[str]] = {}
        for extension in self.extensions:
            option = extension.option
            keys = (extension.variable, *GROUPS[extension.group], f"APEX_{option.upper()}", f"--{option}")
            for key in keys:
                names.setdefault(key, set()).add(extension.name)
        return names


def _checked(table: dict, file: str) -> Extension:
    """The Extension of a table of the file, or BuildError."""
    about = f"{file}: extension {table.get('name', '?')}"
    try:
        found = of_table(table)
    except TypeError as error:
        raise BuildError(f"{about}: {error}") from None
    if missing := [name for name in NEEDED if not getattr(found, name)]:
        raise BuildError(f"{about}: {missing[0]} is missing")
    if found.group not in GROUPS:
        raise BuildError(f"{about}: group {found.group!r} is none of {', '.join(GROUPS)}")
    if found.state not in STATES:
        raise BuildError(f"{about}: state {found.state!r} is none of {', '.join(STATES)}")
    return found


def device_units() -> list[Path]:
    """Every device source. A unit is one `.cu`; helper units (no op of their own) count too."""
    return sorted((REPOSITORY / "csrc/device").glob("*.cu"))
