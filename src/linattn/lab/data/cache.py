"""The folder that data is kept in, and the digests it is checked by."""

import hashlib
import os
from pathlib import Path


class DataMissing(RuntimeError):
    """Data is not here and could not be fetched; the message says what to install."""


def cache_folder() -> Path:
    """$LINATTN_CACHE, or linattn/ in $XDG_CACHE_HOME, or ~/.cache/linattn."""
    chosen = os.environ.get("LINATTN_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "linattn"


def check_digest(name: str, data: bytes, sha256: str) -> bytes:
    """The data itself, or a ValueError if it is not what was published."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{name} is damaged or another version: sha256 {found[:16]}.. instead of {sha256[:16]}..; "
            "delete it and run again to fetch it anew."
        )
    return data
