"""What can be held in mind at once: files of at most 350 lines, functions of at most 60, a comment over each C++ function."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "csrc", "tests", "lab", "benchmarks", "examples", "docs", "notebooks")
MOST_LINES, MOST_FUNCTION_LINES = 350, 60
# Comments, directives and strings of C++, which may hold braces.
NOT_CODE = re.compile(
    r"""//[^\n]*|^[ ]*\#(?:[^\n]*\\\n)*[^\n]*|"(?:\\.|[^"\\])*"|\b(?:public|private|protected):""", re.M | re.X
)
CONTAINER = re.compile(r"(?:template <.*?>\s*)?(?:namespace|struct|class|union|enum|extern)\b")
EPILOGUE = {"start", "finish", "before", "after"}  # core/gemm.h says what they do; each struct says what for


def files(*suffixes: str) -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    assert len(found) > 50
    return found


class Function(NamedTuple):
    name: str
    lines: int
    documented: bool


def cpp_functions(text: str) -> Iterator[Function]:
    """The functions of a file: what has arguments before its braces, inside nothing but namespaces and classes."""
    code = NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    scopes: list[str] = []
    begin = header_begin = 0  # of what precedes a brace; of the function
    for at, char in enumerate(code):
        if char not in "{};":
            continue
        header = code[begin:at].lstrip()
        if char == "{":
            outside = all(scope == "container" for scope in scopes)
            if outside and not header.startswith(","):  # a comma: the next member that a constructor initialises
                header_begin = at - len(header)
            if outside and "(" not in header and CONTAINER.match(header):
                scopes.append("container")
            else:
                scopes.append("function" if outside and ("(" in header or header.startswith(",")) else "block")
        elif char == "}" and scopes.pop() == "function" and not code[at + 1 :].lstrip().startswith((",", "{")):
            name = code[header_begin:at].split("(")[0].split()[-1].lstrip("*&")
            above = text[: text.rindex("\n", 0, header_begin)].rpartition("\n")[2]
            yield Function(name, code.count("\n", header_begin, at) + 1, above.lstrip().startswith("///"))
        begin = at + 1
    assert scopes == []


def test_files_are_short():
    found = {str(path.relative_to(ROOT)): path for path in files(".py", ".h", ".cpp", ".js", ".css", ".j2")}
    lines = {name: path.read_text(encoding="utf-8").count("\n") for name, path in found.items()}
    assert {name: n for name, n in lines.items() if n > MOST_LINES} == {}


def test_functions_are_short():
    long = {}
    for path in files(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = node.end_lineno - body[0].lineno + 1 if body else 0
                if lines > MOST_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}: {node.name}"] = lines
    assert long == {}


def test_functions_of_the_native_engine_are_short_and_documented():
    wrong = []
    for path in files(".h", ".cpp"):
        for name, lines, documented in cpp_functions(path.read_text(encoding="utf-8")):
            if lines > MOST_FUNCTION_LINES:
                wrong.append(f"{path.relative_to(ROOT)}: {name} has {lines} lines")
            elif lines > 3 and not (documented or name in EPILOGUE or name[0].isupper()):  # a constructor has its class
                wrong.append(f"{path.relative_to(ROOT)}: {name} has no line with ///")
    assert wrong == []


def test_functions_are_found():
    """The check sees what it should, so that it can fail."""
    constructor = "/// A.\nstruct A {\n  A(int x)\n      : a{x},\n        b(x) {}\n};\n"
    text = constructor + "\nint f(int x) {\n  return x;\n}\n/// G.\nint g() { return 1; }\n"
    assert list(cpp_functions(text)) == [("A", 3, False), ("f", 3, False), ("g", 1, True)]
