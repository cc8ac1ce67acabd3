"""What can be held in mind at once: files of at most 350 lines."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "csrc", "tests", "lab", "benchmarks", "examples", "docs", "notebooks")
SUFFIXES = {".py", ".h", ".cpp", ".js", ".css", ".j2"}
MOST_LINES = 350


def test_files_are_short():
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in found}
    assert len(lines) > 500
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}
