"""Every example in the documentation and in the docstrings runs."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import linattn

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block that cannot run in a test says so: ```python no-run
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_examples_of_a_page_run(page, monkeypatch, tmp_path):
    """Blocks of a page run one after the other, as a reader would; their assertions hold."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for number, block in enumerate(BLOCK.findall(page.read_text()), 1):
        exec(compile(block, f"{page.name} block {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_links_of_a_page_lead_somewhere(page):
    for target in LINK.findall(CODE.sub("", page.read_text())):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def modules():
    for found in pkgutil.walk_packages(linattn.__path__, "linattn."):
        # Extras are examined by their own tests; the core's docstrings must run with the core alone.
        if not found.name.startswith(
            (
                "linattn.lab",
                "linattn.hf",
                "linattn.measure.plots",
                "linattn.__main__",
                "linattn.engines.native._linattn",
            )
        ):
            yield found.name


@pytest.mark.parametrize("name", list(modules()))
def test_docstrings_run(name):
    torch.manual_seed(0)
    assert doctest.testmod(importlib.import_module(name)).failed == 0
