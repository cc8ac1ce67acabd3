"""The explorer's page, saved once, in a browser for each file of tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser_support import chromium, watched_page
from explorer_support import wait
from linattn.cli import main


@pytest.fixture(scope="module")  # its event loop must not run on during tests of other files
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page that `linattn explore --save` writes."""
    pytest.importorskip("jinja2")
    path = tmp_path_factory.mktemp("explorer") / "page.html"
    assert main(["explore", "--save", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def explorer(browser: Any, saved: Path) -> Iterator[Any]:
    """The saved page in the browser, the same for all tests of a file."""
    with watched_page(browser, viewport={"width": 1280, "height": 900}) as page:
        page.goto(saved.as_uri())
        wait(page)
        yield page
