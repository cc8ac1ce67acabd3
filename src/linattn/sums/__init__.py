"""Sums: how S and Z are formed, kept and passed on, and the naive twin they are tested against."""

from .state import Cache, State, Sums

__all__ = ["Cache", "State", "Sums"]
