"""Reads the explorer's page: goes to a link, waits, and returns the numbers that it shows."""

from typing import Any

import torch

LETTERS = "source=letters&text=the+cat+sat+on+the+mat&n=37&dim=8"
GAUSSIAN = "source=gaussian&n=50&dim=16&data=3"


def wait(page: Any) -> None:
    page.wait_for_function("globalThis.linattn && linattn.ready && !linattn.busy")


def show(page: Any, link: str) -> dict[str, Any]:
    """Goes to a link and returns the numbers of the page."""
    page.evaluate("link => { linattn.busy = true; location.hash = link; }", link)
    wait(page)
    return numbers(page)


def numbers(page: Any) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(
        """() => ({
          exact: [...linattn.result.exact], implied: [...linattn.result.implied], report: linattn.result.report,
          baseline: linattn.result.baseline, n: linattn.data.n, out: [...linattn.result.outImplied],
          code: document.getElementById("code").textContent })"""
    )
    for name in ("exact", "implied"):
        found[name] = torch.tensor(found[name], dtype=torch.float64).reshape(found["n"], found["n"])
    return found
