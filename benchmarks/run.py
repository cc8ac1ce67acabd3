"""Prints the design's table of bars with this machine's figures beside them; writes JSON and a plot to out/.

python benchmarks/run.py            everything, about ten minutes
python benchmarks/run.py --quick    small sizes, to see that it runs
"""

import argparse
import json
from pathlib import Path

import cases
import peers
from linattn.engines import describe
from linattn.measure.machine import machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and no peers")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for bench.json and bench.png")
    args = parser.parse_args()
    if not describe()["native"].startswith("available"):
        print(f"The native engine is {describe()['native']}.")
        return 1
    about = {**machine(), "dtype": "float32", "engines": describe()["native"]}
    for name, value in about.items():
        print(f"{name:15} {value}")
    print()
    quick = args.quick
    budget = 0.3 if quick else 12.0
    rows = _show(cases.rates((512,) if quick else (4096, 16384), budget))
    rows += _show(cases.against_softmax(1024 if quick else 16384, budget))
    rows += _show(cases.crossover(budget))
    rows += _show(cases.decode((1024, 4096) if quick else (1024, 2**20), budget))
    grown, times = cases.growth(16384 if quick else 2**20, budget)
    rows += _show(grown)
    if not quick:
        rows += _show(peers.performer(8192, budget))
        rows += _show(peers.fast_transformers(8192, budget))
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"machine": about, "rows": [r.record() for r in rows], "growth": times}
    (args.out / "bench.json").write_text(json.dumps(record, indent=1))
    _plot(times, args.out / "bench.png")
    missed = [r for r in rows if r.met is False]
    print(f"\n{sum(r.met is True for r in rows)} bars met, {len(missed)} missed; {args.out / 'bench.json'}")
    return 0


def _show(rows: list[cases.Row]) -> list[cases.Row]:
    for row in rows:
        verdict = {True: "met", False: "MISSED", None: ""}[row.met]
        bar = "" if row.bar is None else f"{'>=' if row.at_least else '<='} {row.bar:g}"
        print(f"{row.what:72} {row.figure:9.3g} {row.unit:15} {bar:8} {verdict}", flush=True)
    return rows


def _plot(times: dict[int, float], path: Path) -> None:
    """Time against tokens, both logarithmic, with a line of slope 1. Needs matplotlib (the lab extra)."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    lengths = list(times)
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.loglog(lengths, list(times.values()), "o-", label="native, causal forward, 2 heads, r = 128")
    axes.loglog(lengths, [times[lengths[0]] * n / lengths[0] for n in lengths], "k:", label="slope 1")
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
