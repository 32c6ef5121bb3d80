"""The registry of extensions (csrc/extensions.toml) and the schemas (csrc/ops.schemas), read and checked."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from build_matrix import REPOSITORY, toml
from build_matrix.errors import BuildError, UnknownVariable

GROUPS = {"cpp": ("APEX_BUILD_CPP_OPS", "APEX_BUILD_CPU_OPS"), "cuda": ("APEX_BUILD_CUDA_OPS",)}
STATES = ("complete", "planned")


@dataclass(frozen=True)
class Extension:
    """One import name of public apex, and the ops that make it up."""

    name: str
    variable: str
    group: str
    option: str
    ops: tuple[str, ...]
    minimum_torch: str
    state: str
    host_ops: tuple[str, ...] = ()
    release: str = ""
    aliases: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise BuildError(f"extension {self.name}: group {self.group!r} is none of {', '.join(GROUPS)}")
        if self.state not in STATES:
            raise BuildError(f"extension {self.name}: state {self.state!r} is none of {', '.join(STATES)}")


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
        """Raises BuildError when a line breaks a rule, TypeError when a field is unknown or missing."""
        path = path or REPOSITORY / "csrc/extensions.toml"
        extensions = []
        for table in toml.read(path).get("extension", []):
            lists = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
            try:
                extensions.append(Extension(**lists))
            except TypeError as error:
                raise BuildError(f"{path.name}: extension {table.get('name', '?')}: {error}") from None
        return cls(extensions)

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

    def asked(self, environment: dict[str, str], options: list[str] = ()) -> list[Extension]:
        """The extensions that APEX_BUILD_* variables and `--option`s ask for.

        A variable asks when it is set to anything but "", "0", "false", "no" or "off". Raises UnknownVariable
        for an APEX_BUILD_ variable or an option that names nothing.
        """
        groups = {variable: group for group, variables in GROUPS.items() for variable in variables}
        known = {extension.variable: extension for extension in self.extensions}
        wanted: set[str] = set()
        for variable, value in environment.items():
            if not variable.startswith("APEX_BUILD_"):
                continue
            if variable not in groups and variable not in known:
                raise UnknownVariable(variable, difflib.get_close_matches(variable, [*groups, *known], 2))
            if value.strip().lower() in ("", "0", "false", "no", "off"):
                continue
            if variable in groups:
                wanted |= {e.name for e in self.extensions if e.group == groups[variable]}
            else:
                wanted.add(known[variable].name)
        by_option = {extension.option for extension in self.extensions}
        for option in options:
            name = option.lstrip("-").replace("-", "_")
            if name not in by_option:
                near = [f"--{match}" for match in difflib.get_close_matches(name, sorted(by_option), 2)]
                raise UnknownVariable(option, near)
            wanted |= {e.name for e in self.extensions if e.option == name}
        return [extension for extension in self.extensions if extension.name in wanted]


def schemas(path: Path | None = None) -> list[str]:
    """The schema lines of csrc/ops.schemas, without comments."""
    lines = (path or REPOSITORY / "csrc/ops.schemas").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def device_units(folder: Path | None = None) -> list[Path]:
    """Every device source. A unit is one `.cu`; helper units (no op of their own) count too."""
    return sorted((folder or REPOSITORY / "csrc/device").glob("*.cu"))
