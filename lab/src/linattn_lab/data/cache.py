"""The folder that data is kept in, and the digests it is checked by."""

from linattn._archives import check_digest
from linattn._commandline import CommandError
from linattn._files import cache_folder

__all__ = ["DataMissing", "cache_folder", "check_digest"]


class DataMissing(CommandError):
    """Data is not here and could not be fetched; the message says what to install."""
