"""The `linattn` command."""

import argparse
import importlib
import sys
from collections.abc import Sequence

# Subcommand -> module with `add_arguments(parser)` and `run(args) -> int`; imported only when its command is used.
COMMANDS = {
    "info": ("linattn.cli.info", "versions, engines and why, threads, CPU features"),
    "compare": ("linattn.cli.compare", "time, memory and error of kernels beside softmax, on this machine"),
    "lab": ("linattn.cli.lab", "the companion systems"),
}
LABS: dict[str, tuple[str, str]] = {}  # the same for `linattn lab NAME`


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="linattn", description="Attention in linear time: see what it costs and what it gives, on this machine."
    )
    add_commands(parser, COMMANDS, words[:1])
    args = parser.parse_args(words)
    try:
        return int(args.run(args) or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


def add_commands(
    parser: argparse.ArgumentParser, commands: dict[str, tuple[str, str]], wanted: Sequence[str]
) -> None:
    """A subparser for each command, filled in only for the one that is wanted, so that --help stays quick."""
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in commands.items():
        sub = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name in wanted:
            part = importlib.import_module(module)
            part.add_arguments(sub)
            sub.set_defaults(run=part.run)
