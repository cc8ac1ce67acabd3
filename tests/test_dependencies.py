"""Whatever is imported is asked for by name: a package that comes along with another may stop coming."""

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)

import tomllib

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs", "csrc", "notebooks", "lab/src", "lab/tests")
# Where the package's name is not the module's.
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "faiss": "faiss-cpu", "multipart": "python-multipart"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    names = set()
    for file in (ROOT / "pyproject.toml", ROOT / "lab" / "pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        requirements = [*project["dependencies"], *(each for extra in extras for each in extra)]
        names |= {normalized(re.match(r"[\w.-]+", each)[0]) for each in requirements}
    return names | {"linattn-lab"}


def imports(file: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(node.module)
    return {module.partition(".")[0] for module in modules}


def test_every_import_is_a_declared_dependency():
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    own = {file.stem for file in files} | {file.parent.name for file in files}
    names = declared()
    missing = {
        f"{file.relative_to(ROOT)}: {module}"
        for file in files
        for module in imports(file) - own - set(sys.stdlib_module_names)
        if normalized(PACKAGES.get(module, module)) not in names
    }
    assert not missing, sorted(missing)
