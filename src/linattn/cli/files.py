"""Files that commands write: whole or not at all, and refused before the work if they cannot be written."""

import json
import os
import tempfile
from pathlib import Path


def check_writable(*paths: str | None) -> None:
    """Makes the folders of the files to come, so that a wrong path fails before the work and not after it."""
    for path in paths:
        if path is None:
            continue
        if Path(path).is_dir():
            raise SystemExit(f"linattn: {path} is a folder; name a file.")
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(f"linattn: cannot write {path}: {error.strerror}.") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes beside the target and renames."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, target)


def write_json(path: str | os.PathLike[str], figures: object) -> None:
    write_text(path, json.dumps(figures, indent=2, allow_nan=False) + "\n")
