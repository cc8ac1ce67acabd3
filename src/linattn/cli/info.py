"""`linattn info`: what this installation is and what it can use."""

import argparse
import json

from ..kernels import NAMES
from ..measure.machine import machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    facts = machine()
    if args.json:
        print(json.dumps({**facts, "kernels": list(NAMES)}, indent=2))
        return 0
    engines = facts.pop("engines")
    assert isinstance(engines, dict)
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):15} {value}")
    for name, why in engines.items():
        print(f"engine {name:8} {why}")
    print(f"{'kernels':15} {', '.join(NAMES)}")
    return 0
