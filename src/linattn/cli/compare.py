"""`linattn compare`: kernels next to softmax, on this machine."""

import argparse
import os
from typing import TYPE_CHECKING, cast

from .._commandline import PLOT_SUFFIXES, add_output, real, require, seed, whole
from .._files import write_file, write_json, write_text
from .names import ENGINES, KERNELS, RULES
from .progress import progress

if TYPE_CHECKING:
    from ..engines import EngineName
    from ..measure.compare import Comparison, Row

EXAMPLES = """examples:
  linattn compare                                      the default table, about a minute
  linattn compare --causal --backward                  a training step of a causal model
  linattn compare --lengths 1024 65536 --kernels elu positive
  linattn compare --html report.html --json report.json --plot report.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    names = [name for name in KERNELS if name != "softmax"]
    lengths = [256, 512, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument("--lengths", type=whole(), nargs="+", metavar="N", default=lengths, help="tokens")
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=names,
        default=["elu", "positive", "trig", "nearfar"],
        metavar="NAME",
        help=f"of {', '.join(names)}",
    )
    parser.add_argument(
        "--rules",
        nargs="+",
        choices=[*RULES, "none"],
        default=list(RULES),
        metavar="NAME",
        help=f"update rules of today's models, of {', '.join(RULES)}, or none",
    )
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, metavar="NAME", help="torch, native (default: all that this build has)"
    )
    parser.add_argument("--batch", type=whole(), default=1, metavar="N", help="sequences at once")
    parser.add_argument("--heads", type=whole(), default=8, metavar="N", help="attention heads")
    parser.add_argument("--dim", type=whole(), default=64, metavar="N", help="of queries, keys and values")
    parser.add_argument("--causal", action="store_true", help="with a causal mask")
    parser.add_argument("--backward", action="store_true", help="time and memory of forward and backward together")
    spread = real(above=0, most=1e6)
    parser.add_argument("--spread", type=spread, default=1.0, help="standard deviation of q and k; larger is sharper")
    parser.add_argument(
        "--seconds", type=real(0, most=3600), default=0.2, help="least time spent on each figure, in seconds"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the random inputs")
    add_output(parser, "--json", "write all figures")
    add_output(parser, "--plot", "draw time, memory and speed-up (.png, .svg or .pdf)", suffixes=PLOT_SUFFIXES)
    add_output(parser, "--html", "write one self-contained page with plots and attention maps")


def run(args: argparse.Namespace) -> int:
    if args.html or args.plot:
        require("matplotlib")
    if args.html:
        require("jinja2")
    _check_memory(args)
    chosen = _usable_engines(args.engines)
    from ..measure.compare import compare

    result = compare(
        sorted(set(args.lengths)),
        list(dict.fromkeys(args.kernels)),
        engines=chosen,
        batch=args.batch,
        heads=args.heads,
        dim=args.dim,
        is_causal=args.causal,
        backward=args.backward,
        spread=args.spread,
        seed=args.seed,
        seconds=args.seconds,
        progress=progress,
    )
    chosen_rules = [name for name in dict.fromkeys(args.rules) if name != "none"]
    if chosen_rules:
        from ..measure.rules import compare_rules

        size = {"heads": args.heads, "dim": 2 * args.dim, "seed": args.seed, "seconds": args.seconds}
        result.rules += compare_rules(sorted(set(args.lengths)), chosen_rules, **size, progress=progress)
    print(as_text(result))
    if args.json:
        write_json(args.json, result.as_dict())
        print(f"figures: {args.json}")
    if args.plot:
        from ..measure.plots import growth

        figure = growth(result)
        write_file(args.plot, lambda path: figure.savefig(path, format=args.plot.suffix[1:].lower(), dpi=110))
        print(f"picture: {args.plot}")
    if args.html:
        from ..measure.comparison_page import comparison_page

        write_text(args.html, comparison_page(result))
        print(f"page:    {args.html}")
    return 0


def _usable_engines(wanted: list[str] | None) -> "list[EngineName]":
    from ..engines import describe

    reasons = describe()
    usable = [name for name, why in reasons.items() if why.startswith("available")]
    for name in wanted or ():
        if name not in usable:
            raise ValueError(f"engine {name!r} cannot be used here: {reasons[name]}.")
    return list(dict.fromkeys(cast("list[EngineName]", wanted or usable)))


def _check_memory(args: argparse.Namespace) -> None:
    """Refuses sizes that this machine cannot hold before anything is allocated: the kernel may kill the process instead."""
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return
    tensors = 14 if args.backward else 8  # inputs, their copies, outputs of two calls; gradients
    needed = 4 * tensors * args.batch * args.heads * max(args.lengths) * args.dim
    if needed > there:
        raise ValueError(
            f"{max(args.lengths)} tokens of {args.batch} x {args.heads} x {args.dim} take about {needed / 2**30:.3g} GiB, "
            f"this machine has {there / 2**30:.3g} GiB: lower --lengths, --batch, --heads or --dim."
        )


def as_text(result: "Comparison") -> str:
    """The tables of a comparison for a terminal."""
    setting, about = result.setting, result.machine
    lines = [
        f"linattn {about['linattn']}, torch {about['torch']}, {about['processor']}, {about['threads']} threads, float32",
        f"batch {setting['batch']}, {setting['heads']} heads, dim {setting['dim']}, "
        f"{'causal' if setting['causal'] else 'non-causal'}, {'forward + backward' if setting['backward'] else 'forward'}; "
        f"q, k Gaussian with standard deviation {setting['spread']}",
        "",
        f"{'tokens':>7}  {'kernel':12} {'engine':10} {'time':>10} {'x softmax':>9} {'peak extra':>11}  error (plain average)",
    ]
    for softmax in result.softmax:
        rows = [softmax, *(row for row in result.rows if row.tokens == softmax.tokens)]
        lines += [_line(row) for row in rows] + [""]
    lines.append("crossover: faster than softmax from this length on; growth: p in time ~ tokens^p")
    for entry in result.summary():
        cross, growth = entry["crossover"], entry["exponent"]
        where = "" if entry["kernel"] == "softmax" else "not up to here" if cross is None else f"{cross:.0f} tokens"
        power = "" if growth is None else f"{growth:.2f}"
        lines.append(f"  {entry['kernel']:12} {entry['engine']:10} crossover {where:16} growth {power}")
    return "\n".join(lines + _rule_lines(result))


def _rule_lines(result: "Comparison") -> list[str]:
    """The update rules, at the longest length."""
    if not result.rules:
        return []
    heads, dim = result.setting["heads"], 2 * int(str(result.setting["dim"]))
    lines = [
        "",
        f"update rules of today's models: causal, forward, {heads} heads, dim {dim} (mamba1: 1536 channels of 16), auto engine",
        f"{'rule':12} {'tokens':>7} {'time':>10} {'of matmul':>9} {'growth':>6} {'peak extra':>11} {'x transformers':>14}"
        "  one token",
    ]
    for row in result.rule_summary():
        share, peak, times = row["matmul_share"], row["peak_bytes"], row["reference_speedup"]
        cells = [
            "" if share is None else f"{share:.2f}",
            "" if row["exponent"] is None else f"{row['exponent']:.2f}",
            "?" if peak is None else f"{cast('int', peak) / 2**20:.1f} MiB",
            "" if times is None else f"{times:.1f}",
        ]
        step = f"{cast('float', row['step_seconds']) * 1e6:.0f} us, {row['step_copies']:.1f} copies of the state"
        lines.append(
            f"{row['rule']:12} {row['tokens']:>7} {cast('float', row['seconds']) * 1e3:>7.2f} ms {cells[0]:>9} {cells[1]:>6} "
            f"{cells[2]:>11} {cells[3]:>14}  {step}"
        )
    lines.append("of matmul: share of the rate of torch's 2048^3 product, on necessary FLOPs (linattn.measure.flops)")
    return lines


def _line(row: "Row") -> str:
    error = ""
    if row.relative_error is not None and row.baseline_error is not None:
        error = f"{row.relative_error:.3g} ({row.baseline_error:.3g})"
    speed = "1" if row.kernel == "softmax" else f"{row.speedup:.2f}"
    peak = "?" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f} MiB"
    return (
        f"{row.tokens:>7}  {row.kernel:12} {row.engine:10} {row.seconds * 1e3:>7.2f} ms {speed:>9} {peak:>11}  {error}"
    )
