"""Files that commands write: refused before the work if they cannot be written."""

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
