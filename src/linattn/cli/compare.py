"""`linattn compare`: kernels beside softmax, on this machine."""

import argparse
import importlib.util

from .._files import write_json, write_text
from ..engines import describe
from ..kernels import NAMES
from ..measure.compare import Comparison, Row, compare
from .files import check_writable
from .progress import progress

EXAMPLES = """examples:
  linattn compare                                      the default table, about a minute
  linattn compare --causal --backward                  a training step of a causal model
  linattn compare --lengths 1024 65536 --kernels elu positive
  linattn compare --html report.html --json report.json --plot report.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    default_kernels = ["elu", "positive", "trig", "softmax"]
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="N", default=[256, 512, 1024, 2048, 4096, 8192, 16384], help="tokens"
    )
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=[n for n in NAMES if n != "exact"],
        default=default_kernels,
        metavar="NAME",
        help=f"of {', '.join(NAMES)}; softmax is near/far (default: {' '.join(default_kernels)})",
    )
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="torch, native (default: all that this build has)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64, help="of queries, keys and values (default 64)")
    parser.add_argument("--causal", action="store_true", help="with a causal mask")
    parser.add_argument("--backward", action="store_true", help="time and memory of forward and backward together")
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of q and k; larger is sharper")
    parser.add_argument("--seconds", type=float, default=0.2, help="least time spent on each figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--plot", metavar="FILE", help="draw time, memory and speed-up (.png, .svg or .pdf)")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with plots and attention maps")


def run(args: argparse.Namespace) -> int:
    if min(*args.lengths, args.batch, args.heads, args.dim) < 1 or args.spread <= 0:
        raise SystemExit("linattn compare: lengths, batch, heads, dim and spread must be positive.")
    if (args.html or args.plot) and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("linattn compare --html and --plot draw with matplotlib: pip install 'linattn[lab]'.")
    usable = [name for name, why in describe().items() if why.startswith("available")]
    chosen = args.engines or usable
    for name in chosen:
        if name not in usable:
            raise SystemExit(f"linattn compare: engine {name!r} cannot be used here; usable: {', '.join(usable)}.")
    check_writable(args.json, args.plot, args.html)
    result = compare(
        sorted(set(args.lengths)),
        args.kernels,
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
    print(as_text(result))
    if args.json:
        write_json(args.json, result.as_dict())
        print(f"figures: {args.json}")
    if args.plot:
        from ..measure.plots import growth

        growth(result).savefig(args.plot, dpi=110)
        print(f"picture: {args.plot}")
    if args.html:
        from ..measure.page import comparison_page

        write_text(args.html, comparison_page(result))
        print(f"page:    {args.html}")
    return 0


def as_text(result: Comparison) -> str:
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
    return "\n".join(lines)


def _line(row: Row) -> str:
    error = ""
    if row.relative_error is not None and row.baseline_error is not None:
        error = f"{row.relative_error:.3g} ({row.baseline_error:.3g})"
    speed = "1" if row.kernel == "softmax" else f"{row.speedup:.2f}"
    peak = "?" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f} MiB"
    return (
        f"{row.tokens:>7}  {row.kernel:12} {row.engine:10} {row.seconds * 1e3:>7.2f} ms {speed:>9} {peak:>11}  {error}"
    )
