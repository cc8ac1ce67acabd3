"""A real Chromium for tests of pages, driven by playwright; tests are skipped, with the reason, where there is none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = Path(__file__).parent.parent / "out" / "screenshots"  # kept to be looked at


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's sync API."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no chromium: apt-get install chromium, or name one in CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched_page(browser: Any, **options: Any) -> Iterator[Any]:
    """A new page; any error in its console, or request that leaves the machine, fails the test."""
    page = browser.new_page(**options)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: None if is_local(request.url) else problems.append(f"asks for {request.url}"))
    try:
        yield page
        assert problems == []
    finally:
        page.close()


def is_local(address: str) -> bool:
    return address.startswith(("file:", "blob:", "data:", "about:", "http://127.0.0.1:", "http://localhost:"))


def screenshot(page: Any, name: str) -> Path:
    """Writes out/screenshots/<name>.png of the whole page."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    return path
