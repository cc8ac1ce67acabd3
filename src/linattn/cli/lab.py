"""`linattn lab NAME`: the companion systems, each in a folder of linattn.lab."""

import argparse
import sys

from . import LABS, add_commands


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = sys.argv[2:3]
    add_commands(parser, LABS, words or list(LABS))


def run(args: argparse.Namespace) -> int:
    return int(args.run(args) or 0)
