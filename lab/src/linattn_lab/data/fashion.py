"""Fashion-MNIST: 70000 grey images of clothes, 28 x 28, from Debian's package dataset-fashion-mnist."""

import gzip
from pathlib import Path

import numpy as np

from .apt import fetch_deb
from .cache import DataMissing, cache_folder, check_digest

PACKAGE = "dataset-fashion-mnist"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
FASHION_CLASSES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
# Of the uncompressed files, which stay the same however a release packs them.
DIGESTS = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def fashion_mnist(split: str = "train", *, fetch: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Images (60000 or 10000, 28, 28) uint8 and classes (60000 or 10000,) uint8 of the split "train" or "test".

    Args:
        fetch: download the Debian package into the cache if it is neither there nor installed.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    stem = "train" if split == "train" else "t10k"
    folder = _find(fetch)
    return _read_idx(folder, f"{stem}-images-idx3-ubyte"), _read_idx(folder, f"{stem}-labels-idx1-ubyte")


def _find(fetch: bool) -> Path:
    cached = cache_folder() / "fashion-mnist"
    for folder in (cached, INSTALLED):
        if all((folder / f"{name}.gz").is_file() for name in DIGESTS):
            return folder
    reason = "fetching was not asked for"
    if fetch:
        try:
            fetch_deb(PACKAGE, INSTALLED.relative_to("/").as_posix(), cached)
            return cached
        except DataMissing as error:
            reason = str(error)
    raise DataMissing(f"Fashion-MNIST is missing: install it with `apt-get install {PACKAGE}` ({reason}).")


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """The IDX format: two zero bytes, a type (8 = uint8), the number of dimensions, their sizes, the data."""
    path = folder / f"{name}.gz"
    try:
        data = gzip.decompress(path.read_bytes())
    except (EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete its folder and run again to fetch it anew.") from error
    check_digest(str(path), data, DIGESTS[name])
    dims = data[3]
    shape = np.frombuffer(data, ">i4", dims, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)
