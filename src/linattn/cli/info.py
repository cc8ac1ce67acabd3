"""`linattn info`: what this installation is and what it can use."""

import argparse
import json

EXAMPLES = """examples:
  linattn info                                         # versions, engines and why, threads, CPU features
  linattn info --json                                  # the same for machines
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    from ..engines.native.ffi import library
    from ..engines.native.output_pool import kept
    from ..kernels import NAMES
    from ..measure.machine import machine

    facts = machine()
    if args.json:
        memory = {"kept": kept(), "limit": library.memory_limit}
        print(json.dumps({**facts, "memory": memory, "kernels": list(NAMES)}, indent=2))
        return 0
    engines = facts.pop("engines")
    assert isinstance(engines, dict)
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):15} {value}")
    for name, why in engines.items():
        print(f"engine {name:8} {why}")
    at_most = f"{kept() / 2**20:.0f} MiB of freed outputs, at most {library.memory_limit / 2**20:.0f} (LINATTN_KEEP_MB)"
    print(f"{'kept memory':15} {at_most}")
    print(f"{'kernels':15} {', '.join(NAMES)}")
    return 0
