"""The `linattn` command."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

# Command -> (module, summary). The module has `add_arguments(parser)` and `run(args) -> int` and is imported only when
# its command is used. A table in place of a module makes a command with commands of its own.
EARLY_EXIT: dict[str, tuple[Any, str]] = {
    "train": ("linattn.lab.early_exit.commands.train", "train a network with exits"),
    "sweep": ("linattn.lab.early_exit.commands.sweep", "tolerances, and the one for an accuracy or a budget of MACs"),
    "report": ("linattn.lab.early_exit.commands.report", "everything trained, measured and drawn: one page"),
    "predict": ("linattn.lab.early_exit.commands.predict", "class, exit and confidence of picture files"),
}
DIFFICULTY: dict[str, tuple[Any, str]] = {
    "train": ("linattn.lab.difficulty.train_command", "the networks whose depth is measured"),
    "measure": ("linattn.lab.difficulty.measure_command", "the prediction depth of every picture"),
    "report": ("linattn.lab.difficulty.report_command", "all of it, as one page and as figures"),
}
LABS: dict[str, tuple[Any, str]] = {
    "handmade": ("linattn.lab.handmade.command", "transformers with weights set by hand, beside what training finds"),
    "questions": ("linattn.lab.questions.command", "five questions about attention: theory beside measurement"),
    "purify": ("linattn.lab.purification.command", "linear purification of noisy pictures, against truncated PCA"),
    "early-exit": (EARLY_EXIT, "a network that every picture leaves as soon as it is sure of it"),
    "difficulty": (DIFFICULTY, "how deep into a network a picture's class is settled, and why"),
}
COMMANDS: dict[str, tuple[Any, str]] = {
    "info": ("linattn.cli.info", "versions, engines and why, threads, CPU features"),
    "compare": ("linattn.cli.compare", "time, memory and error of kernels beside softmax, on this machine"),
    "fidelity": ("linattn.cli.fidelity", "a pretrained model with its attention replaced, beside itself"),
    "generate": ("linattn.cli.generate", "go on with a long prompt, in memory that does not grow"),
    "lab": (LABS, "the companion systems"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="linattn", description="Attention in linear time: see what it costs and what it gives, on this machine."
    )
    _add_commands(parser, COMMANDS, words)
    args = parser.parse_args(words)
    try:
        return int(args.run(args) or 0)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `linattn ... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _add_commands(parser: argparse.ArgumentParser, commands: dict[str, tuple[Any, str]], words: Sequence[str]) -> None:
    """A subparser for each command, filled in only for the one that `words` ask for, so that --help stays quick."""
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (part, summary) in commands.items():
        sub = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name not in words[:1]:
            continue
        if isinstance(part, dict):
            _add_commands(sub, part, words[1:])
        else:
            module = importlib.import_module(part)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
