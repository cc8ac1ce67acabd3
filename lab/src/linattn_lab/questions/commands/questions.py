"""linattn lab questions: theory next to measurement."""

import argparse
import textwrap
from pathlib import Path

from ...commandline import add_common, add_output, describe, did_you_mean, progress, require, table, whole, write_json
from ...figures import add_figures, save_figures
from ...threads import one_thread
from .. import QUESTIONS
from ..answer import say
from ..figures import figures_of

HELP = """
Five questions about attention, each a small experiment with the library that prints theory next to measurement and draws
one plot:

  argmax           attention that takes only the best key: worked example, zero gradients, the limit of softmax
  variance         the variance of the dot product, and why attention divides by sqrt(d)
  polynomial       (q.k + 1)^2: exact features, the cross terms, the cost N D^2 M
  random-features  unbiased, error 1 / sqrt(r), and the variance that is often printed wrong
  causal           a state of constant size in place of a mask: the same numbers, time N instead of N^2

Times are measured on one thread and vary with the load of the machine. About a minute in all; --quick uses smaller
sizes.

examples:
  linattn lab questions
  linattn lab questions argmax causal --quick
  linattn lab questions --html questions.html --json questions.json
  linattn lab questions --pictures out/
  linattn lab questions --seeds 5 --figures figures.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    names = ", ".join(QUESTIONS)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"any of {names} (default: all)")
    add_output(parser, "--html", "one page of all, with the plots in it")
    parser.add_argument("--pictures", metavar="FOLDER", type=Path, help="one PNG for each question")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, some seconds")
    parser.add_argument(
        "--seeds", type=whole(1, 1000), default=1, help="for --figures: as many, from --seed on (default %(default)s)"
    )
    add_common(parser)
    add_figures(parser)


def run(args: argparse.Namespace) -> int:
    unknown = [name for name in args.questions if name not in QUESTIONS]
    if unknown:
        hint = did_you_mean(unknown[0], QUESTIONS) or f": choose from {', '.join(QUESTIONS)}."
        raise ValueError(f"unknown question {unknown[0]!r}{hint}")
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
    if args.figures:
        names = [answer.name for answer in answers]
        by_seed = {args.seed: answers}
        for number in progress(range(args.seed + 1, args.seed + args.seeds), desc="seeds"):
            with one_thread():
                by_seed[number] = [QUESTIONS[name](seed=number, quick=args.quick) for name in names]
        save_figures(args, figures_of(by_seed))
    if args.json:
        write_json(args.json, {answer.name: answer.figures() for answer in answers})
        print(f"wrote {args.json}")
    if args.pictures:
        from ..page import save_picture

        for answer in answers:
            save_picture(answer, args.pictures / f"{answer.name}.png")
            print(f"wrote {args.pictures / f'{answer.name}.png'}")
    if args.html:
        from ..page import write_page

        write_page(answers, args.html)
        print(f"wrote {args.html}")
    return 0
