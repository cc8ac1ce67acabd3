"""Runs the benchmarks: prints the machine and every figure with its bar; writes out/bench.json.

    python benchmarks/run.py                       everything, about twenty minutes
    python benchmarks/run.py --list                the cases
    python benchmarks/run.py --only 'near/far*'    some cases, by name or pattern
    python benchmarks/run.py --quick               small sizes, to see that it runs

Ratios are taken within one run, by calls that take turns, because machines are shared and noisy. A case that fails is
reported, and the others go on; the exit code is 1 then. The file is written after each case.
"""

import argparse
import fnmatch
import importlib
import json
import time
import traceback
from pathlib import Path

import torch

import registry
from linattn.engines import describe
from linattn.measure.machine import machine

SUITES = Path(__file__).with_name("suites")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, and nothing that takes minutes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases by name; * stands for anything")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--threads", type=int, help="for torch and the native engine; torch's own number if not given")
    parser.add_argument("--budget", type=float, help="seconds for each group of calls (default 12, with --quick 0.3)")
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"), help="where the figures go")
    args = parser.parse_args(arguments)
    for path in sorted(SUITES.glob("*.py")):
        importlib.import_module(f"suites.{path.stem}")
    if args.list:
        for case in registry.CASES.values():
            print(f"{case.name:20} {case.about}")
        return 0
    cases = _chosen(parser, args.only, args.quick)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    about = {**machine(), "dtype": "float32", "threads": torch.get_num_threads(), "engines": describe()["native"]}
    for name, value in about.items():
        print(f"{name:15} {value}")
    settings = registry.Settings(args.quick, args.budget or (0.3 if args.quick else 12.0))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    rows: list[registry.Row] = []
    record: dict[str, list[dict[str, object]]] = {}
    failed = []
    for case in cases:
        found: list[registry.Row] = []
        try:
            _run(case, settings, found)
        except Exception:  # the other cases take minutes and are worth having
            traceback.print_exc()
            failed.append(case.name)
        rows += found
        record[case.name] = [row.record() for row in found]
        args.json.write_text(json.dumps({"machine": about, "cases": record, "failed": failed}, indent=1))
    met, missed = (sum(row.met is answer for row in rows) for answer in (True, False))
    print(f"\n{met} bars met, {missed} missed; {args.json}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _chosen(parser: argparse.ArgumentParser, only: list[str] | None, quick: bool) -> list[registry.Case]:
    patterns = only or ["*"]
    for pattern in patterns:
        if not fnmatch.filter(registry.CASES, pattern):
            parser.error(f"no case is called {pattern!r}; --list shows them")
    found = [case for case in registry.CASES.values() if any(fnmatch.fnmatch(case.name, p) for p in patterns)]
    return [case for case in found if only or not (quick and case.slow)]


def _run(case: registry.Case, settings: registry.Settings, rows: list[registry.Row]) -> None:
    """Prints the rows of a case and appends them to `rows`."""
    print(f"\n{case.name}: {case.about}", flush=True)
    begun = time.perf_counter()
    for row in case.run(settings):
        print(f"  {row}", flush=True)
        rows.append(row)
    print(f"  ({time.perf_counter() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
