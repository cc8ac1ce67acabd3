"""Files: written whole or not at all, and the folder that fetched ones are kept in."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_file(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """Lets `write` fill a temporary file of the same suffix beside the target, then moves it into place."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".linattn-", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: str | os.PathLike[str], figures: Any) -> None:
    write_text(path, json.dumps(figures, indent=2, allow_nan=False) + "\n")


def cache_folder() -> Path:
    """$LINATTN_CACHE, or linattn/ in $XDG_CACHE_HOME, or ~/.cache/linattn."""
    chosen = os.environ.get("LINATTN_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "linattn"
