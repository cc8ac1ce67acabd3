"""linattn lab handmade: transformers whose weights are set by hand, beside what training finds."""

import argparse
from pathlib import Path

from ...commandline import (
    PLOT_SUFFIXES,
    add_common,
    add_output,
    describe,
    progress,
    require,
    seed_list,
    table,
    whole,
    write_json,
)
from ...figures import Figure, add_figures, save_figures
from ..attentions import attentions, try_attention
from ..comparison import compare, explain
from ..designs import DESIGNS, Design
from ..luck import RECIPES, rows_of, try_recipe
from ..robust import learn_robust
from ..selectors import GAP
from ..torch_head import TorchHead
from ..training import count_exact, learn, mean_squared_error

MAIN = ("identity", "first", "unique")
HELP = """
One layer, one attention head, positions concatenated to the token: its weights are set by hand to solve a task
exactly, and learned to see what training finds instead. Without a task: all tasks, counted on every sequence,
and the same hand weights under softmax, argmax and each kernel of the library. With a task: one sequence of yours,
the eight variables (Km, Qm, Vm, K, Q, V, attention, output) hand above learned in one image, the differences in
words, and why other kinds of attention break the design. With --seeds: how often each recipe of learning reaches the
marks of the tasks.

recipes:
{recipes}

tasks:
{tasks}

examples:
  linattn lab handmade
  linattn lab handmade --json handmade.json
  linattn lab handmade identity --sequence ABBCC
  linattn lab handmade unique --sequence ABBC --picture unique.png --seed 3
  linattn lab handmade --seeds 0-9 --json luck.json
  linattn lab handmade unique --seeds 0-4,7 --recipe robust
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = "\n".join(f"  {name:10} {d.summary}" for name, d in DESIGNS.items())
    recipes = "\n".join(f"  {name:10} {summary}" for name, summary in RECIPES.items())
    describe(parser, HELP.format(tasks=tasks, recipes=recipes))
    parser.add_argument("task", nargs="?", choices=list(DESIGNS), metavar="TASK", help=f"one of {', '.join(DESIGNS)}")
    parser.add_argument("--sequence", metavar="TEXT", help="letters A, B, C; each task has an example of its own")
    add_output(parser, "--picture", "of the eight variables (default handmade-TASK.png)", suffixes=PLOT_SUFFIXES)
    parser.add_argument(
        "--recipe", choices=list(RECIPES), help="of learning (default course; with --seeds both, one after the other)"
    )
    parser.add_argument("--seeds", type=seed_list, metavar="LIST", help="show the luck of a recipe, e.g. 0-9 or 0,3,5")
    parser.add_argument("--steps", type=whole(), help="of learning (default: the recipe's)")
    add_figures(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    if args.seeds is not None:
        if args.sequence is not None or args.picture is not None:
            raise ValueError("--seeds shows errors over all sequences: leave --sequence and --picture out.")
        return _luck(args)
    if args.figures is not None:
        raise ValueError("--figures goes with --seeds, e.g. `linattn lab handmade --seeds 0-9 --figures F`.")
    if args.task is None:
        if args.sequence is not None or args.picture is not None:
            raise ValueError(
                "--sequence and --picture go with a task, e.g. `linattn lab handmade identity --sequence AB`."
            )
        return _all(args)
    return _one(DESIGNS[args.task], args)


def _recipe(args: argparse.Namespace) -> str:
    return args.recipe or "course"


def _learn(design: Design, args: argparse.Namespace) -> TorchHead:
    steps = {} if args.steps is None else {"steps": args.steps}
    make = learn if _recipe(args) == "course" else learn_robust
    return make(design, seed=args.seed, **steps)


def _luck(args: argparse.Namespace) -> int:
    """Each recipe over the seeds: errors, and how many seeds reach the mark."""
    tasks = list(DESIGNS) if args.task is None else [args.task]
    everything: list[dict[str, object]] = []
    figures: dict[str, Figure] = {}
    for recipe in [args.recipe] if args.recipe else list(RECIPES):
        found = [try_recipe(recipe, task, args.seeds, args.steps) for task in tasks]
        rows = rows_of(found)
        print(f"recipe {recipe}: {RECIPES[recipe]}; mean squared error over all sequences, * at or under the mark\n")
        print(table(rows, " " + "r" * len(rows[0])) + "\n")
        everything += [one.facts() | {"task": one.task} for one in found]
        for one in found:
            figures |= one.figures()
    if args.json:
        write_json(args.json, everything)
        print(f"wrote {args.json}")
    save_figures(args, figures)
    return 0


def _all(args: argparse.Namespace) -> int:
    rows = [["task", "exact by hand", "learned MSE", "what it does"]]
    figures = {}
    for name, design in DESIGNS.items():
        exact, of = count_exact(design, design.weights())
        error = mean_squared_error(design, _learn(design, args))
        rows.append([name, f"{exact} of {of}", f"{error:.2g}", design.summary])
        if name in MAIN:
            figures[name] = {"exact": exact, "of": of, "learned_mse": error}
    print(f"Hand weights on every sequence, and learned twins (recipe {_recipe(args)}, seed {args.seed})\n")
    print(table(rows, " rr"))
    print("\nThe same hand weights under other attentions: sequences exact to 1e-8 (a task's name explains why)\n")
    print(_attention_counts())
    if args.json:
        write_json(args.json, figures)
        print(f"\nwrote {args.json}")
    return 0


def _attention_counts() -> str:
    rows = [["attention", *DESIGNS]]
    columns = []
    for design in progress(DESIGNS.values(), desc="attentions"):
        tried = attentions(design.weights().Km.shape[1])
        columns.append({name: try_attention(design, attend) for name, attend in tried.items()})
    for name in columns[0]:
        rows.append([name, *(f"{c[name].exact} of {c[name].of}" for c in columns)])
    return table(rows, " " + "r" * len(columns))


def _one(design: Design, args: argparse.Namespace) -> int:
    sequence = design.read(args.sequence if args.sequence is not None else design.example)
    require("matplotlib")
    from ..plots import draw

    path = args.picture or Path(f"handmade-{design.name}.png")
    head = _learn(design, args)
    comparison = compare(design, head.weights(), sequence)
    draw(comparison, path)
    exact, of = count_exact(design, design.weights())
    error = mean_squared_error(design, head)
    print(f"{design.name}: {design.summary}")
    print(f"{exact} of {of} sequences exact by hand; learned MSE {error:.2g} (seed {args.seed})\n")
    for line in explain(comparison):
        print(f"- {line}")
    print(f"\nThe same hand weights under other attentions (softmax: a chosen key has e^{GAP:g} times the weight)\n")
    rows = [["attention", "exact", "worst error", "first wrong", "why"]]
    for name, attend in attentions(design.weights().Km.shape[1]).items():
        o = try_attention(design, attend)
        rows.append([name, f"{o.exact} of {o.of}", f"{o.worst:.2g}", o.breaks_at or "-", o.why()])
    print(table(rows, " rr"))
    print(f"\nwrote {path}")
    if args.json:
        write_json(args.json, {design.name: {"exact": exact, "of": of, "learned_mse": error}})
        print(f"wrote {args.json}")
    return 0
