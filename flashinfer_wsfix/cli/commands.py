"""The command line, ``flashinfer-wsfix`` or ``python -m flashinfer_wsfix``. Each command imports what it needs."""

import argparse
import sys
from typing import NoReturn

from .. import __version__
from . import say


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"flashinfer-wsfix: {message} (flashinfer-wsfix --help lists the commands)\n")


def _parser() -> _Parser:
    about = "Keeps FlashInfer's cuDNN GEMM workspace where captured CUDA graphs expect it."
    parser = _Parser(prog="flashinfer-wsfix", description=about)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    doctor = commands.add_parser("doctor", help="say whether this environment is affected and guarded, and what to do")
    demo = commands.add_parser("demo", help="show the crash and the fix on the installed FlashInfer")
    for command in (doctor, demo):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    run = commands.add_parser("run", help="run a command, guarded with all its children")
    run.add_argument("argv", metavar="CMD ...", nargs=argparse.REMAINDER)
    commands.add_parser("enable", help="guard every process of this Python environment, from its start")
    commands.add_parser("disable", help="take that back")
    commands.add_parser("path", help="print the folder to put first on PYTHONPATH, which does what run does")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Raises SystemExit: 2 with one sentence where misused, 0 for --help."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if argv[:1] == ["run"] and argv[1:] not in ([], ["-h"], ["--help"]):  # verbatim: argparse would take the options
        from . import launcher

        return launcher.launch(argv[1:])
    options = parser.parse_args(argv)
    if options.command == "demo":
        from . import demo

        return demo.run(options.json)
    if options.command == "doctor":
        from . import doctor

        return doctor.main(options.json)
    if options.command == "run":
        parser.error("run needs a command, as in: flashinfer-wsfix run vllm serve ...")
    if options.command == "path":
        from . import launcher

        say(launcher.bootstrap_folder())
        return 0
    from . import startup_file

    return startup_file.enable() if options.command == "enable" else startup_file.disable()
