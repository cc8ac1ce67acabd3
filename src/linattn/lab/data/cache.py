"""The folder that data is kept in, and the digests it is checked by."""

import hashlib

from ..._files import cache_folder

__all__ = ["DataMissing", "cache_folder", "check_digest"]


class DataMissing(RuntimeError):
    """Data is not here and could not be fetched; the message says what to install."""


def check_digest(name: str, data: bytes, sha256: str) -> bytes:
    """The data itself, or a ValueError if it is not what was published."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{name} is damaged or another version: sha256 {found[:16]}.. instead of {sha256[:16]}..; "
            "delete it and run again to fetch it anew."
        )
    return data
