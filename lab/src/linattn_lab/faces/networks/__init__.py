"""Networks from an image to a unit vector."""

from .build import KINDS, NetworkSpec, build

__all__ = ["KINDS", "NetworkSpec", "build"]
