"""linattn lab questions: theory beside measurement."""

import argparse
import textwrap
from pathlib import Path

from .._commandline import add_common, command, describe, progress, require, table, write_json
from .._threads import one_thread
from . import QUESTIONS
from .answer import say

HELP = """
Five questions about attention, each a small experiment on the library itself that prints what the theory says beside
what was measured here, and draws one plot:

  argmax           attention that takes only the best key: worked example, zero gradients, the limit of softmax
  variance         the variance of the dot product, and why attention divides by sqrt(d)
  polynomial       (q.k + 1)^2: exact features, the cross terms, the cost N D^2 M
  random-features  unbiased, error 1 / sqrt(r), and the variance that is often printed wrong
  causal           a state of constant size in place of a mask: the same numbers, time N instead of N^2

Times are taken on one thread while the machine runs whatever else it runs: growth is measured, not proved. About a
minute in all; --quick takes smaller sizes.

examples:
  linattn lab questions
  linattn lab questions argmax causal --quick
  linattn lab questions --html questions.html --json questions.json
  linattn lab questions --pictures out/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    names = ", ".join(QUESTIONS)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"any of {names} (default: all)")
    parser.add_argument("--html", metavar="FILE", type=Path, help="one page of all, with the plots in it")
    parser.add_argument("--pictures", metavar="FOLDER", type=Path, help="one PNG for each question")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, some seconds")
    add_common(parser)


@command
def run(args: argparse.Namespace) -> int:
    unknown = [name for name in args.questions if name not in QUESTIONS]
    if unknown:
        raise ValueError(f"unknown question {unknown[0]!r}: choose from {', '.join(QUESTIONS)}.")
    if args.html or args.pictures:
        require("matplotlib")
    answers = []
    for name in progress(args.questions or list(QUESTIONS), desc="questions"):
        with one_thread():
            answer = QUESTIONS[name](seed=args.seed, quick=args.quick)
        answers.append(answer)
        rows = [["", "theory", "measured", "agree"]]
        for f in answer.findings:
            rows.append([f.statement, say(f.predicted), say(f.measured), "yes" if f.agrees else "no"])
        print(f"{answer.question}\n{textwrap.fill(answer.text, 100)}\n\n{table(rows, ' rr')}\n", flush=True)
    if args.json:
        write_json(args.json, {answer.name: answer.figures() for answer in answers})
        print(f"wrote {args.json}")
    if args.pictures:
        from .page import save_picture

        for answer in answers:
            save_picture(answer, args.pictures / f"{answer.name}.png")
            print(f"wrote {args.pictures / f'{answer.name}.png'}")
    if args.html:
        from .page import write_page

        write_page(answers, args.html)
        print(f"wrote {args.html}")
    return 0
