"""States: what a call passes on to the next one. They can be forked, selected, moved, saved and loaded."""

from .base import State
from .kv_cache import KeyValueCache
from .linear import LinearState
from .recurrent import RecurrentState
from .scan import ConvState, ScanState
from .snapshots import Snapshots

__all__ = ["ConvState", "KeyValueCache", "LinearState", "RecurrentState", "ScanState", "Snapshots", "State"]
