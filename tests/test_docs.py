"""Every example in the documentation and in the docstrings runs."""

import ast
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
    # docs/_ext/course.py makes these when the site is built.
    made = {f"course/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")} | {"explorer.html"}
    for target in LINK.findall(CODE.sub("", page.read_text())):
        assert (page.parent / target).exists() or target in made, f"{page.name} links to {target}"


def public_names(package: str) -> list[str]:
    """__all__ of a package, read without importing it: extras may not be installed."""
    tree = ast.parse((ROOT / "src/linattn" / package / "__init__.py").read_text())
    (found,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    return list(ast.literal_eval(found))


@pytest.mark.parametrize("package", ["", "kernels", "states", "nn", "hf", "measure", "parallel"])
def test_the_reference_has_every_public_name(package):
    text = "\n".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    missing = [name for name in public_names(package) if not re.search(rf"\b{name}\b", text)]
    assert missing == []


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "README.md"]
    assert [page for page in pages if not re.search(rf"[ -]{re.escape(page)}$", navigation, re.MULTILINE)] == []


@pytest.mark.parametrize(
    "phrase", ["softmax itself", "softmax kept faithful", "near/far softmax", "softmax in linear time"]
)
def test_near_far_is_never_called_softmax(phrase):
    """It approximates softmax, and every text says so."""
    sources = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "src").rglob("*.py")]
    for path in sources:
        text = " ".join(path.read_text().lower().split())
        assert phrase not in text.replace(f"approximation of {phrase}", ""), path.relative_to(ROOT)


def modules():
    for found in pkgutil.walk_packages(linattn.__path__, "linattn."):
        # Extras are examined by their own tests; the core's docstrings must run with the core alone.
        if not found.name.startswith(
            (
                "linattn.hf",
                "linattn.serve",
                "linattn.measure.plots",
                "linattn.measure.comparison_page",
                "linattn.__main__",
                "linattn.engines.native._linattn",
            )
        ):
            yield found.name


@pytest.mark.parametrize("name", list(modules()))
def test_docstrings_run(name):
    torch.manual_seed(0)
    assert doctest.testmod(importlib.import_module(name)).failed == 0
