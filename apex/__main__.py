"""`python -m apex`: the doctor. `python -m apex explain ...`: the same for a machine you are not on.

Exit code: 0 fine, 1 degraded (slower code would run), 2 broken (something cannot run, or wrong usage).

Where another distribution has overwritten `apex/__init__.py`, `python -m apex` would fail in its code; then
`python <site-packages>/apex/__main__.py` shows the same screen.
"""

import argparse
import os
import sys
import types


def _stand_in():
    """Makes `apex` importable without running its __init__.py, when this file is run by its path."""
    here = os.path.dirname(os.path.abspath(__file__))
    package = types.ModuleType("apex")
    package.__path__ = [here]
    sys.modules["apex"] = package
    if sys.path and os.path.abspath(sys.path[0]) == here:
        sys.path[0] = os.path.dirname(here)  # the folder of apex, not its inside, holds what can be imported


def main(arguments=None):
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m apex", description="What apex would run here, and why.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    commands = parser.add_subparsers(dest="command")
    explain = commands.add_parser("explain", help="the same for a machine you are not on")
    explain.add_argument("--arch", action="append", help="sm_120, gfx942, cpu; may be repeated")
    explain.add_argument("--driver", help="NVIDIA driver: branch (550) or the CUDA that it serves (12.4)")
    explain.add_argument("--torch", help="2.14, or better 2.14.0+cu130; default: the release here")
    explain.add_argument("--python", help="cp312; default: this one")
    explain.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    options = parser.parse_args(arguments)

    from apex._loader import doctor

    if options.command == "explain":
        from apex._loader import explain as explaining

        try:
            machine = explaining.machine(options.arch, options.driver, options.torch, options.python)
        except ValueError as error:
            parser.error(str(error))  # exits with 2
        report = doctor.assume(machine)
    else:
        report = doctor.examine()
    if options.json:
        print(doctor.as_json(report))
    else:
        doctor.show(report)
    return report.exit_code


if __name__ == "__main__":
    if not __package__:
        _stand_in()
    from apex._loader import streams

    sys.exit(streams.run(main))
