"""Prints the table of docs/hybrids.md: what `attach` serves in each family, and how much faster it is.

python benchmarks/hybrid_table.py --threads 1            processor time of one thread: usable on a busy machine
python benchmarks/hybrid_table.py --only Mamba-2 Jamba   some families
"""

import argparse
import collections
import sys

import torch

import hybrid_models
import linattn
from suites.pretrained import ratios


def served(family: str) -> str:
    """The layers of a model, as '3 gated delta rule, 1 softmax'."""
    rows = linattn.hf.describe(hybrid_models.build(family)[1]).layers
    counts = collections.Counter(row.does for row in rows if row.engine != "transformers")
    return ", ".join(f"{n} {rule}" for rule, n in counts.items()) + f" of {len(rows)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of the prompt")
    parser.add_argument("--threads", type=int, help="with 1, processor time is measured, else wall time")
    parser.add_argument("--only", nargs="+", choices=list(hybrid_models.FAMILIES), metavar="FAMILY")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"| family | layers served | {args.tokens} tokens read | a token written |")
    print("| --- | --- | --- | --- |")
    for family in args.only or hybrid_models.FAMILIES:
        print(f"measuring {family}", file=sys.stderr)
        read, written = ratios(family, args.tokens)
        print(f"| {family} | {served(family)} | {read:.1f}x | {written:.1f}x |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
