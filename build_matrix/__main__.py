"""python -m build_matrix: gathers the commands, and says in words what ends one."""

from __future__ import annotations

import errno
import importlib
import signal
import sys

from apex._loader import streams
from build_matrix import commands
from build_matrix.errors import BuildError, StoreError
from build_matrix.spec import identity

PROGRAM = "build_matrix"

try:
    import click
except ModuleNotFoundError as error:
    from build_matrix.commands import alone

    missing = error
    sys.exit(streams.run(lambda: alone.run(sys.argv[1:], missing), PROGRAM))

UNWRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EBUSY),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)
ENDED = 128  # and the number of the signal: exit codes, as shells have them


class Commands(click.Group):
    """The files of build_matrix/commands, each imported when it is asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Their names, as --help shows them."""
        return sorted(commands.NAMES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """One of them; None where there is none by that name."""
        if name not in commands.NAMES:
            return None
        return importlib.import_module(f"build_matrix.commands.{name.replace('-', '_')}").command

    def invoke(self, context: click.Context) -> object:
        """Runs one. click ends with 1 and without a word at any broken pipe; that may be said of our output alone."""
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            if error.filename == streams.OUTPUT:
                raise
            raise BuildError(f"who was written to went away: {error}") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(identity.version(), message="%(version)s")
def main() -> None:
    """Builds apex: device packs, host library, bindings, wheels, and the index that serves them."""


class Terminated(BaseException):
    """A signal that ends a process came: raised where it is, so that folders which live as long as a block go."""


def _end(number: int, frame: object) -> None:
    raise Terminated(number)


def run() -> None:
    """The entry point: faults that have a name are printed in words, never as a traceback."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, _end)
    try:
        sys.exit(main(standalone_mode=False) or 0)  # click returns the code of an Exit
    except click.Abort:  # what click makes of Ctrl-C
        click.echo("build_matrix: interrupted; the same command goes on from what is stored", err=True)
        sys.exit(ENDED + signal.SIGINT)
    except Terminated as error:
        number = signal.Signals(*error.args)
        click.echo(
            f"build_matrix: ended by {number.name}; the same command goes on from what is stored", err=True
        )
        sys.exit(ENDED + number)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BuildError as error:
        click.echo(f"build_matrix: {error}", err=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        from build_matrix.commands import alone

        sys.exit(alone.words(sys.argv[1] if sys.argv[1:] else "", error))
    except OSError as error:
        if error.filename == streams.OUTPUT:
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            click.echo(f"build_matrix: no space is left: {error}", err=True)
            sys.exit(StoreError.exit_code)
        if error.filename is None or error.errno not in UNWRITABLE:
            raise
        click.echo(
            f"build_matrix: {error.filename}: {error.strerror}; an option names another place", err=True
        )
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(streams.run(run, PROGRAM))
