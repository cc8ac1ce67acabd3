"""The `linattn` command."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

# Command -> (module, summary). The module has `add_arguments(parser)` and `run(args) -> int` and is imported only when
# its command is used. A table in place of a module makes a command with commands of its own, and a third entry is text
# for the end of its --help.
FACES: dict[str, tuple[Any, ...]] = {
    "train": ("linattn.lab.faces.train_command", "an embedding from a folder with a folder for each person"),
    "report": ("linattn.lab.faces.report_command", "verification of unseen people, beside Fisherfaces; ablations"),
    "orl": ("linattn.lab.faces.orl_command", "write the ORL faces as a first folder of person/picture files"),
    "embed": ("linattn.lab.faces.embed_command", "put the faces of a folder into an index, which grows"),
    "verify": ("linattn.lab.faces.verify_command", "do two pictures show one person, and how sure is that"),
    "search": ("linattn.lab.faces.search_command", "find the faces of an index that are nearest to a picture"),
    "cluster": ("linattn.lab.faces.cluster_command", "put pictures of one person together: contact sheet and page"),
    "pairs": ("linattn.lab.faces.pairs_command", "a page of the pairs nearest the threshold, and what it costs"),
}
EARLY_EXIT: dict[str, tuple[Any, ...]] = {
    "train": ("linattn.lab.early_exit.commands.train", "train a network with exits"),
    "sweep": ("linattn.lab.early_exit.commands.sweep", "tolerances, and the one for an accuracy or a budget of MACs"),
    "report": ("linattn.lab.early_exit.commands.report", "everything trained, measured and drawn: one page"),
    "predict": ("linattn.lab.early_exit.commands.predict", "class, exit and confidence of picture files"),
}
DIFFICULTY: dict[str, tuple[Any, ...]] = {
    "train": ("linattn.lab.difficulty.train_command", "the networks whose depth is measured"),
    "measure": ("linattn.lab.difficulty.measure_command", "the prediction depth of every picture"),
    "report": ("linattn.lab.difficulty.report_command", "all of it, as one page and as figures"),
}
SUMMARIZE: dict[str, tuple[Any, ...]] = {
    "prepare": ("linattn.lab.summarize.prepare", "pairs to learn from: Debian's package descriptions, or your own"),
    "train": ("linattn.lab.summarize.train", "a model of your own, on pairs that were prepared"),
    "evaluate": ("linattn.lab.summarize.evaluate", "ROUGE of a model beside what simple rules reach"),
    "compare": ("linattn.lab.summarize.compare", "models that differ in their kernel, side by side"),
    "run": ("linattn.lab.summarize.run", "one line for each of your documents"),
}
FACES_PATH = """the whole path on the ORL faces:
  linattn lab faces orl orl-train --people 1-30    # a folder for each person, as your own pictures should be
  linattn lab faces orl orl-new --people 31-40     # people the model will not have seen
  linattn lab faces train orl-train                # writes faces-model
  linattn lab faces pairs orl-new                  # where the threshold stands: pairs.html
  linattn lab faces embed orl-new                  # writes faces-index
  linattn lab faces verify orl-new/s35/06.png orl-new/s35/07.png
  linattn lab faces search orl-new/s35/07.png
  linattn lab faces cluster                        # clusters.png, clusters.html"""
LABS: dict[str, tuple[Any, ...]] = {
    "handmade": ("linattn.lab.handmade.command", "transformers with weights set by hand, beside what training finds"),
    "questions": ("linattn.lab.questions.command", "five questions about attention: theory beside measurement"),
    "purify": ("linattn.lab.purification.command", "linear purification of noisy pictures, against truncated PCA"),
    "summarize": (SUMMARIZE, "documents of any length to one line, by a model that was trained here"),
    "early-exit": (EARLY_EXIT, "a network that every picture leaves as soon as it is sure of it"),
    "difficulty": (DIFFICULTY, "how deep into a network a picture's class is settled, and why"),
    "faces": (FACES, "FaceNet: distance means identity; train on any folder of people, and use it", FACES_PATH),
}
COMMANDS: dict[str, tuple[Any, ...]] = {
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


def _add_commands(parser: argparse.ArgumentParser, commands: dict[str, tuple[Any, ...]], words: Sequence[str]) -> None:
    """A subparser for each command, filled in only for the one that `words` ask for, so that --help stays quick."""
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (part, summary, *more) in commands.items():
        sub = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if more:
            sub.formatter_class, sub.epilog = argparse.RawDescriptionHelpFormatter, more[0]
        if name not in words[:1]:
            continue
        if isinstance(part, dict):
            _add_commands(sub, part, words[1:])
        else:
            module = importlib.import_module(part)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
