"""What can go wrong in a build. Each class is one kind of fault; the text says what was wanted and what to
do."""

from __future__ import annotations


class BuildError(Exception):
    """A fault of the build that has a name. The command line prints it in words and exits with
    `exit_code`."""

    exit_code = 1

    def __reduce__(self):
        # Subclasses take other arguments than Exception's pickling would give them; workers of a cluster send
        # faults as pickles.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[BuildError], arguments: tuple, fields: dict) -> BuildError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(fields)
    return error


class NoToml(BuildError):
    """This Python reads no TOML."""


class ToolchainMissing(BuildError):
    """A compiler is not here. `remedy` is one command."""

    exit_code = 3

    def __init__(self, toolchain: str, remedy: str):
        self.toolchain, self.remedy = toolchain, remedy
        super().__init__(f"{toolchain} is not here. Run: {remedy}")


class PythonMissing(BuildError):
    """An interpreter whose headers are needed is not here, or, with `bare` (a program), is here without them."""

    exit_code = 3

    def __init__(self, tag: str, bare: str = ""):
        self.tag = tag
        version = f"{tag[2]}.{tag[3:]}"
        self.remedy = f"apt-get install python{version}-dev" if bare else ""
        super().__init__(
            f"Python {version} is here ({bare}) without its headers. Run: {self.remedy}, or what your system calls it; "
            f"APEX_PYTHON_{tag} names another"
            if bare
            else f"Python {version} is not here: put python{version} on PATH or set APEX_PYTHON_{tag} to its path."
        )


class Incomplete(BuildError):
    """What is asked cannot be built here. `faults`: (what of the matrix, what is missing for it, the command or "");
    `what`: of a release by default."""

    exit_code = 3
    RELEASE = "the release cannot be whole here (--available builds the rest)"

    def __init__(self, faults: list[tuple[str, str, str]], what: str = RELEASE):
        self.faults = faults
        wanted: dict[str, list[str]] = {}
        for name, why, _ in faults:
            wanted.setdefault(why.partition(". Run: ")[0], []).append(name)
        lines = [f"{', '.join(names)}: {why}" for why, names in wanted.items()]
        super().__init__(f"{what}:\n" + "\n".join(lines) + self._command())

    def _command(self) -> str:
        """One command for all that a command can bring: packages are installed by one, toolchains brought by one."""
        remedies = list(dict.fromkeys(remedy for _, _, remedy in self.faults if remedy))

        def joined(start: str) -> list[str]:
            names = [remedy.removeprefix(start) for remedy in remedies if remedy.startswith(start)]
            return [start + " ".join(names)] if names else []

        first, last = "apt-get install ", "nox -s toolchain -- "
        others = [remedy for remedy in remedies if not remedy.startswith((first, last))]
        commands = [*joined(first), *others, *joined(last)]
        return f"\nRun: {' && '.join(commands)}" if commands else ""


class CompileError(BuildError):
    """A compiler refused a source; holds its own words."""

    exit_code = 4

    def __init__(self, what: str, command: list[str], log: str):
        self.what, self.command, self.log = what, command, log
        lines = log.strip().splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines
        more = f"\n(full log: {len(lines)} lines)" if len(errors) < len(lines) else ""
        super().__init__(f"{what} did not compile.\n{' '.join(command)}\n" + "\n".join(errors[:20]) + more)


class GateError(BuildError):
    """Something was built, and is not what it must be."""

    exit_code = 5

    def __init__(self, what: str, faults: list[str]):
        self.what, self.faults = what, faults
        super().__init__(f"{what} does not pass its gate:\n" + "\n".join(f"  {fault}" for fault in faults))


class LoadError(BuildError):
    """What was built does not load under a torch, prints no results there, or gives other bits."""

    exit_code = 5


class PinError(BuildError):
    """A pinned input differs from related_commits, or cannot be verified here."""

    exit_code = 6

    def __init__(self, component: str, pinned: str, have: str, verifiable: bool = True, remedy: str = ""):
        self.component, self.pinned, self.have, self.remedy = component, pinned, have, remedy
        if verifiable:
            text = (
                f"{component} is pinned to {pinned}, have {have}. Move the pin: nox -s toolchain -- --update"
            )
        else:
            text = f"{component} cannot be verified here: pinned {pinned}, have {have}"
            text += f". Run: {remedy}, or move the pin: nox -s toolchain -- --update" if remedy else ""
        super().__init__(text)


class PackageIndexError(BuildError):
    """The package index does not hold what was asked, or cannot be reached."""

    exit_code = 7


class StoreError(BuildError):
    """The store cannot take or give an output; or, with `variable`, another place that it names cannot. `root` is a
    folder, or the address of a shared store."""

    exit_code = 10

    def __init__(self, root: object, fault: str, variable: str = "APEX_STORE"):
        self.root = str(root)
        shared = "://" in self.root
        place = f"the store {root}" if shared or variable == "APEX_STORE" else root
        remedy = f"{'--store' if shared else variable} names another place"
        if self.root.startswith("s3://"):
            remedy += "; AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY say how it is reached"
        super().__init__(f"{fault} in {place}. {remedy}.")


class ReceiptError(BuildError):
    """A file that is no receipt of a test run, or not the one that was written; or a run that leaves none."""

    exit_code = 12

    def __init__(self, name: str, fault: str):
        self.name, self.fault = name, fault
        super().__init__(f"{_shown(name)}: {_shown(fault, keep=chr(10))}")


def _shown(text: str, keep: str = "") -> str:
    """A text of which another machine wrote a part: control characters of it move no cursor."""
    return "".join(
        letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1] for letter in text
    )


class NothingRan(ReceiptError):
    """Every test was skipped, or none was chosen: this machine lacks what they need."""

    exit_code = 3


class SignatureError(BuildError):
    """A wheel that is not signed, or not by the key that was asked for, or that is not what was signed."""

    exit_code = 13

    def __init__(self, name: str, fault: str):
        self.name, self.fault = name, fault
        super().__init__(f"{name}: {fault}")


class FarmError(BuildError):
    """Steps of a plan failed; `failures` holds (step, fault) of each, and `waiting` counts those that needed
    them. What was made stays in the store: the same command goes on from there."""

    def __init__(self, failures: list[tuple[str, str]], waiting: int, exit_code: int = 1):
        self.failures, self.waiting, self.exit_code = failures, waiting, exit_code
        lines = [f"{step}: {fault}" for step, fault in failures]
        after = f"\n{waiting} steps that need them were not run." if waiting else ""
        super().__init__(f"{len(failures)} steps failed:\n" + "\n".join(lines) + after)


class RequirementMissing(BuildError):
    """A source build, or a shared store, needs something that is not here; says what, for what, and the command."""

    exit_code = 9

    def __init__(self, what: str, wanted_for: str, remedy: str):
        self.what, self.wanted_for, self.remedy = what, wanted_for, remedy
        super().__init__(f"{what} is missing; {wanted_for} needs it. Run: {remedy}")


class ContainerError(BuildError):
    """A container or image cannot be run or made here. `remedy` is what would change that."""

    exit_code = 11

    def __init__(self, fault: str, remedy: str = ""):
        self.fault, self.remedy = fault, remedy
        super().__init__(f"{fault}. Run: {remedy}" if remedy else f"{fault}.")


class UnknownVariable(BuildError):
    """An APEX_BUILD_ variable or option that names no extension; pip shows the words, and no exit code of ours."""

    exit_code = 8

    def __init__(self, variable: str, near: list[str]):
        self.variable, self.near = variable, near
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        super().__init__(
            f"{variable} names no extension of apex.{hint} They are listed in csrc/extensions.toml."
        )


class NotInThisBuild(BuildError):
    """A variable or option asks for extensions that no build of this source has."""

    exit_code = 8

    def __init__(self, switch: str, successors: dict[str, str]):
        told = [f"{name} (use {use})" if use else name for name, use in successors.items()]
        super().__init__(
            f"{switch} asks for what is not in this build: {', '.join(told)}. Leave {switch} out; "
            "APEX_BUILD_CPP_OPS=1 APEX_BUILD_CUDA_OPS=1 take all that is here"
        )
