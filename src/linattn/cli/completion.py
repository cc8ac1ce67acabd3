"""`linattn completion`: a script that completes commands, options and choices in a shell."""

import argparse
from pathlib import Path

from .._commandline import require

SHELLS = ("bash", "zsh")
EXAMPLES = """examples:
  eval "$(linattn completion bash)"                                    this shell alone
  linattn completion bash > ~/.local/share/bash-completion/completions/linattn
  linattn completion zsh > ~/.zfunc/_linattn                           with ~/.zfunc in fpath
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def run(args: argparse.Namespace) -> int:
    require("shtab")
    import shtab

    from .parser import build

    parser = build(None)[0]
    for action in parser.every_action():
        if action.metavar == "FOLDER":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # where shtab looks for it
        elif action.type is Path or action.metavar == "FILE" or action.dest == "model":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=args.shell))
    return 0
