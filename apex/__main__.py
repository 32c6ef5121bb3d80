"""`python -m apex`: the doctor. `python -m apex explain ...`: the same for a machine you are not on.
`python -m apex which`, `python -m apex compat ...`: which wheel serves this machine, or another.

Exit code: 0 fine, 1 degraded (slower code would run), 2 broken (something cannot run); of which and compat: 0 a wheel
serves, 2 none does. Wrong usage is 64 in all of them.

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
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    from apex._loader import ask

    if arguments[:1] in (["which"], ["compat"]):
        return getattr(ask, arguments[0])(arguments[1:], f"python -m apex {arguments[0]}")
    about = "What apex would run here, and why. Exit code 0: fine; 1: degraded; 2: broken; 64: wrong usage."
    parser = ask.Parser(prog="python -m apex", description=about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--version", action="store_true", help="print the version and nothing else")
    commands = parser.add_subparsers(dest="command")
    explain = commands.add_parser("explain", help="the same for a machine you are not on")
    explain.add_argument("--arch", action="append", help="sm_120, gfx942, cpu; may be repeated")
    for name in ("which", "compat"):  # for the help; they take options of their own
        about = {"which": "the pip line for this machine", "compat": "which wheel serves another machine"}
        commands.add_parser(name, help=about[name], add_help=False)
    explain.add_argument("--driver", help="NVIDIA driver: branch (550) or the CUDA that it serves (12.4)")
    explain.add_argument("--torch", help="2.14, or better 2.14.0+cu130; default: the release here")
    explain.add_argument("--cuda", help="12.8: of torch, where its label does not say")
    explain.add_argument("--rocm", help="7.2: of torch, where its label does not say")
    explain.add_argument("--cann", help="8.5.0: of Ascend NPUs")
    explain.add_argument("--git-version", help="torch.version.git_version of a build that is no release")
    explain.add_argument("--python", help="cp312; default: this one")
    explain.add_argument("--platform", help="linux_aarch64; default: this one")
    explain.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    options = parser.parse_args(arguments)
    if options.version:
        from apex._loader import layout

        print(layout.version())
        return 0

    from apex._loader import doctor

    if options.command == "explain":
        from apex._loader import explain as explaining

        try:
            named = {"cuda": options.cuda, "rocm": options.rocm, "git_version": options.git_version}
            named |= {"cann": options.cann}
            named |= {"driver": options.driver, "python": options.python, "system": options.platform}
            machine = explaining.machine(options.arch, torch=options.torch, **named)
        except ValueError as error:
            parser.error(str(error))  # exits with 64
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
