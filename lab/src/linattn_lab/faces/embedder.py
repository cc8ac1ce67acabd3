"""A trained network ready for use: images in, unit vectors out, with the distance threshold for one person."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample, normalize

from linattn._files import parsing, write_json

from ..training.tensor_files import read_tensors, write_tensors
from .images import Source, open_image, to_tensor
from .networks import NetworkSpec, build
from .training.augmentation import Augmentation, augment

FORMAT = 1
# Shift across, down (of half the image), and scale.
VIEWS = ((0, 0, 1), (0.04, 0, 1), (-0.04, 0, 1), (0, 0.04, 1), (0, -0.04, 1), (0, 0, 0.94), (0, 0, 1.06))


def views(pictures: Tensor) -> Iterator[Tensor]:
    """The images, moved a little to each side, smaller and larger."""
    for across, down, scale in VIEWS:
        matrix = torch.tensor([[scale, 0.0, across], [0.0, scale, down]]).expand(len(pictures), 2, 3)
        grid = affine_grid(matrix, list(pictures.shape), align_corners=False)
        yield grid_sample(pictures, grid, padding_mode="border", align_corners=False)


@torch.no_grad()
def whitening_of(
    network: nn.Module, pictures: Tensor, labels: Tensor, how: Augmentation, shrink: float = 0.03, copies: int = 4
) -> Tensor:
    """The matrix (dim, dim) after which images of one person scatter alike in all directions.

    The scatter is that of the training people, over several augmented copies by torch's generator, with a share of the
    mean variance added to all directions: few people leave many directions unknown.
    """
    network.eval()
    vectors = torch.cat([network(augment(pictures, how)) for _ in range(copies)]).double()
    people = torch.unique(labels, return_inverse=True)[1].repeat(copies)
    count = int(people.max()) + 1
    means = torch.zeros(count, vectors.shape[1], dtype=torch.double).index_add_(0, people, vectors)
    within = vectors - (means / torch.bincount(people)[:, None])[people]
    covariance = within.T @ within / len(within)
    covariance += shrink * covariance.trace() / len(covariance) * torch.eye(len(covariance), dtype=torch.double)
    return torch.linalg.cholesky(torch.linalg.inv(covariance)).float()


def harmonic_whitening_of(network: nn.Module, pictures: Tensor, labels: Tensor, how: Augmentation) -> Tensor:
    """The matrix (dim, dim) for vectors that are compared with older ones, which had no whitening and cannot get one.

    A whitening W makes the product of two vectors x and y into x W W^T y: so W W^T on the new side alone makes the same
    of the product of a new vector with an old one. Mirror images count as further people.
    """
    both = torch.cat([pictures, pictures.flip(-1)])
    whitening = whitening_of(network, both, torch.cat([labels, labels + int(labels.max()) + 1]), how, shrink=0.3)
    return whitening @ whitening.T


class Embedder:
    """Turns images into unit vectors whose squared distance says whether they show one person.

    Args:
        spec: what the network is; see NetworkSpec.
        network: its weights; by default fresh ones.
        whitening: matrix (dim, dim) that the vectors go through last; see `whitening_of`. By default none.
        threshold: squared distance up to which two images are taken for one person.
        cut: mean squared distance up to which clusters of images merge; by default the threshold.
        about: what it was trained on, for people and for JSON.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        network: nn.Module | None = None,
        whitening: Tensor | None = None,
        *,
        threshold: float = 1.0,
        cut: float | None = None,
        about: dict[str, Any] | None = None,
    ):
        self.spec, self.threshold, self.about = spec, threshold, about or {}
        self.cut = threshold if cut is None else cut
        self.network = (build(spec) if network is None else network).eval()
        self.whitening = torch.eye(spec.dim) if whitening is None else whitening

    @property
    def dim(self) -> int:
        return self.spec.dim

    def embed(self, pictures: Sequence[Source], batch_size: int = 64) -> Tensor:
        """Unit vectors (N, dim) float32 of images or of paths, on the CPU. A file that cannot be read raises ValueError."""
        parts = []
        for start in range(0, len(pictures), batch_size):
            images = [open_image(picture) for picture in pictures[start : start + batch_size]]
            parts.append(self.embed_tensor(to_tensor(images, self.spec.size, self.spec.channels)))
        return torch.cat(parts) if parts else torch.empty(0, self.dim)

    @torch.no_grad()
    def embed_tensor(self, pictures: Tensor) -> Tensor:
        """Unit vectors of (N, channels, height, width) from 0 to 1. The mean of several views."""
        self.network.eval()
        total = torch.zeros(len(pictures), self.dim)
        for view in views(pictures):
            total += self.network(view) + self.network(view.flip(-1))
        return normalize(total @ self.whitening, dim=-1)

    def digest(self) -> str:
        """A name for these weights, so that vectors of two networks are never compared by mistake."""
        whole = hashlib.sha256(json.dumps(asdict(self.spec)).encode())
        for name, x in sorted(self._tensors().items()):
            whole.update(name.encode() + x.detach().contiguous().numpy().tobytes())
        return whole.hexdigest()[:16]

    def _tensors(self) -> dict[str, Tensor]:
        return {f"network.{name}": x for name, x in self.network.state_dict().items()} | {"whitening": self.whitening}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """embedder.safetensors and embedder.json."""
        top = Path(folder)
        top.mkdir(parents=True, exist_ok=True)
        write_tensors(top / "embedder.safetensors", self._tensors(), {"version": "1"})
        facts = {"format": FORMAT, "spec": asdict(self.spec), "threshold": self.threshold, "cut": self.cut}
        facts |= {"about": self.about}
        write_json(top / "embedder.json", facts)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "Embedder":
        """What `save` wrote."""
        top = Path(folder)
        if not (top / "embedder.json").is_file():
            raise ValueError(f"there is no embedder.json in {top}: make one with `linattn lab faces train`.")
        with parsing(top / "embedder.json"):
            facts = json.loads((top / "embedder.json").read_text(encoding="utf-8"))
            if facts.get("format") != FORMAT:
                raise ValueError(
                    f"{top / 'embedder.json'} has format {facts.get('format')}, this version reads {FORMAT}."
                )
            spec = NetworkSpec(**{**facts["spec"], "size": tuple(facts["spec"]["size"])})
            threshold = float(facts["threshold"])
            cut = float(facts.get("cut", threshold))  # models of earlier versions have one number for both
            embedder = cls(spec, threshold=threshold, cut=cut, about=facts["about"])
        with parsing(top / "embedder.safetensors"):
            tensors, _ = read_tensors(top / "embedder.safetensors")
            embedder.whitening = tensors.pop("whitening")
            embedder.network.load_state_dict({name.removeprefix("network."): x for name, x in tensors.items()})
        return embedder
