"""The architecture: data flows one way, and nothing lower imports anything higher."""

import ast
from pathlib import Path

import linattn
import warm_python

SOURCE = Path(linattn.__file__).parent
# From the bottom up. Files on the top level of the package stand beside the layer that they name.
LAYERS = [
    "_files",
    "_commandline",
    "_archives",
    "pages",
    "kernels",
    "ops",
    "states",
    "engines",
    "nearfar",
    "functional",
    "nn",
    "measure",
    "hf",
    "parallel",
    "serve",
    "explore",
    "cli",
]


def layer(module: str) -> int | None:
    part = module.split(".")[1] if module.startswith("linattn.") else None
    return LAYERS.index(part) if part in LAYERS else None


def imports(path: Path) -> list[str]:
    package = ["linattn", *path.relative_to(SOURCE).parent.parts]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [".".join([*base, name]) for name in names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def test_nothing_lower_imports_anything_higher():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        own = layer(".".join(["linattn", *path.relative_to(SOURCE).with_suffix("").parts]))
        if own is None:
            continue
        wrong += [f"{path.relative_to(SOURCE)} imports {m}" for m in imports(path) if (layer(m) or 0) > own]
    assert wrong == []


def test_the_core_does_not_import_the_lab():
    """The lab is a distribution of its own, on top of the core."""
    found = [path for path in SOURCE.rglob("*.py") if any(m.split(".")[0] == "linattn_lab" for m in imports(path))]
    assert found == []


def test_every_folder_is_a_known_layer():
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert folders <= set(LAYERS)


def test_the_core_needs_torch_numpy_and_safetensors_alone():
    """Importing and using the core loads none of the extras' packages."""
    script = (
        "import sys, torch, linattn, linattn.cli\n"
        "x = torch.randn(1, 2, 9, 4)\n"
        "linattn.attention(x, x, x, kernel='positive', is_causal=True)\n"
        "heavy = {'matplotlib', 'sklearn', 'scipy', 'PIL', 'transformers'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = warm_python.run("-c", script, check=True)
    assert done.stdout.strip() == "[]"
