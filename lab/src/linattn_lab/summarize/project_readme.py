"""The README of a Python project, out of the metadata of its package."""

import zipfile
from importlib import metadata

from ..data.cache import cache_folder
from ..data.projects import fetch_wheels, find_wheels, normal_name
from .documents import Document
from .markup import LONGEST
from .wheel_texts import metadata_readme, wheel_metadata


def read_project(name: str) -> Document:
    """A project's README as a document; ValueError where there is none.

    It is taken from the package if that is installed, otherwise from the wheel that pip downloads into the cache.
    """
    name = normal_name(name)
    try:
        data = (metadata.distribution(name).read_text("METADATA") or "").encode()
    except metadata.PackageNotFoundError:
        folder = cache_folder() / "summarize" / "readmes"
        missing = fetch_wheels([name], folder, pure=False)
        if missing:
            raise ValueError(f"{name} is not installed, and pip brings no wheel of it.") from None
        with zipfile.ZipFile(find_wheels(folder)[name]) as wheel:
            data = wheel_metadata(wheel)
    text = metadata_readme(data)
    if not text:
        raise ValueError(f"{name} has no README in its metadata.")
    return Document(name, text[:LONGEST], "readmes")
