"""linattn lab early-exit sweep: tolerances, and the one that a floor or a budget asks for."""

import argparse

from ...commandline import add_output, describe, real, require, table, write_json
from .options import add_folder, add_give_up

HELP = """
Sweeps the tolerances of all rules over the validation images of a trained network, chooses one for an accuracy floor
or a budget of MACs, and keeps the choice beside the network for `predict`. Without a floor or a budget the tolerances of
all exits are chosen together: the cheapest that lose no more than --give-up against the last exit.

examples:
  linattn lab early-exit sweep
  linattn lab early-exit sweep --floor 0.9
  linattn lab early-exit sweep --budget 5e6 --json sweep.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    add_folder(parser)
    add_give_up(parser)
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--floor", type=real(0), help="least accuracy")
    goal.add_argument("--budget", type=real(above=0), help="most MACs per picture, on average")
    add_output(parser, "--json", "write the figures for machines")


def run(args: argparse.Namespace) -> int:
    require("safetensors")
    from ..macs import CONVENTION, exit_costs
    from ..study import point_name
    from ..sweep import all_logits, choose, point, sweep
    from ..thresholds import ORDERING, choose_together, known
    from ..training import load_exits, write_choice

    model, pictures, _ = load_exits(args.folder)
    parts = pictures.split()
    costs = exit_costs(model, parts.validation.images[:1])
    validation = known(model, parts.validation)
    points = sweep(*validation, costs)
    if args.floor is None and args.budget is None:
        ordering = known(model, parts.train, ORDERING)
        rule = choose_together(ordering, validation, costs, allowed=args.give_up).rule
        chosen, goal = point(*validation, costs, rule), f"a loss of at most {args.give_up:g}"
    else:
        chosen = choose(points, floor=args.floor, budget=args.budget)
        goal = f"an accuracy of {args.floor:.4f}" if args.floor is not None else f"{args.budget:.4g} MACs"
    exits = [f"exit {number + 1}" for number in range(len(validation.logits))]
    rows = [["validation pictures", "accuracy", "MACs", "fewer", *exits]]
    for p in points:
        shares = [f"{100 * share:.0f} %" for share in p.shares]
        rows.append(
            [point_name(p), f"{p.accuracy:.4f}", f"{p.macs / 1e6:.2f} M", f"{costs.full / p.macs:.2f}x", *shares]
        )
    print(table(rows, " " + "r" * len(rows[0])))
    judged = point(all_logits(model, parts.test.images), parts.test.labels, costs, chosen.rule)
    print(f"\n{CONVENTION}")
    print(
        f"chosen for {goal}: {point_name(chosen)}; on test pictures accuracy {judged.accuracy:.4f}, "
        f"{costs.full / judged.macs:.2f} times fewer MACs than without exits"
    )
    write_choice(args.folder, chosen.rule)
    if args.json:
        figures = {"points": [p.figures() for p in points], "chosen": chosen.figures(), "test": judged.figures()}
        write_json(args.json, figures)
        print(f"wrote {args.json}")
    return 0
