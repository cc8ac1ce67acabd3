"""Atomic file writing, and the cache folder of downloads."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_file(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """Lets `write` fill a temporary file of the same suffix beside the target, then moves it into place.

    Devices and pipes, such as /dev/stdout, are written to directly.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        write(target)
        return
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


@contextmanager
def parsing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns exceptions caused by damaged contents into a ValueError that names the file."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        said = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{os.fspath(path)} is damaged or of another version: {type(error).__name__} {said}"
        ) from error


def cache_folder() -> Path:
    """$LINATTN_CACHE, or the user's cache folder of the platform: ~/.cache/linattn on Linux."""
    chosen = os.environ.get("LINATTN_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("linattn", appauthor=False)
