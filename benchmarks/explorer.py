"""How long the explorer's saved page takes to open, in a real Chromium: python benchmarks/explorer.py

Prints the milliseconds from the start of navigation until everything is drawn, over several new pages, beside the goal of
one second. Needs playwright and a Chromium (apt-get install chromium, or CHROMIUM=path).
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from linattn.cli import main as linattn

GOAL = 1000  # ms
DRAWN = "window.linattn && linattn.result && !linattn.busy"


def opening_times(page: Path, rounds: int) -> list[float]:
    """Milliseconds of each round, each in a page without a cache."""
    from playwright.sync_api import sync_playwright

    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        sys.exit("there is no chromium: apt-get install chromium, or name one in CHROMIUM")
    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(rounds):
            context = browser.new_context(viewport={"width": 1280, "height": 844})
            tab = context.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_function(DRAWN)
            found.append(float(tab.evaluate("performance.now()")))
            context.close()
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="pages to open (default 7)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        linattn(["explore", "--save", str(page)])
        times = opening_times(page, args.rounds)
        size = page.stat().st_size / 1e6
    middle = statistics.median(times)
    verdict = "met" if middle < GOAL else "missed"
    spread = f"{min(times):.0f} to {max(times):.0f}"
    print(f"saved page: {size:.2f} MB; opens in {middle:.0f} ms ({spread}), goal {GOAL}: {verdict}")


if __name__ == "__main__":
    main()
