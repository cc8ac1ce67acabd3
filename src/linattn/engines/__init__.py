"""Engines: who computes the sums. `choose` picks one; each offers absorb, read and causal."""

from .choose import choose, describe

__all__ = ["choose", "describe"]
