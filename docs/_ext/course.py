"""MkDocs hook: the notebooks as pages, with the outputs they are stored with, and the explorer as a page of the site."""

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def on_files(files: Files, config: Any) -> Files:
    from linattn.explore.page import explorer_page

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"course/{path.stem}.md", content=as_markdown(path)))
    files.append(File.generated(config, "explorer.html", content=explorer_page()))
    return files


def as_markdown(path: Path) -> str:
    """A notebook as Markdown: text, code, and below each cell what it printed and drew."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [shown for output in cell["outputs"] if (shown := _as_markdown(output))]
    name = path.name
    note = f"*The notebook [`notebooks/{name}`](https://github.com/linattn/linattn/blob/main/notebooks/{name}), as it was run.*"
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n"


def _as_markdown(output: dict[str, Any]) -> str:
    kind = output["output_type"]
    if kind == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    if kind == "error":
        return f"```text\n{output['ename']}: {output['evalue']}\n```"
    data = output["data"]
    if "image/png" in data:
        return f'<img alt="plot" src="data:image/png;base64,{"".join(data["image/png"]).replace(chr(10), "")}">'
    return f"```text\n{''.join(data.get('text/plain', ''))}\n```"
