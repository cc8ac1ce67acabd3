"""A trained network with what is needed to use it: pictures in, unit vectors out, and the distance that parts people."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ..._files import write_json
from ..trainer import read_tensors, write_tensors
from .images import Source, open_image, to_tensor
from .networks import NetworkSpec, build

FORMAT = 1


class Embedder:
    """Turns pictures into unit vectors whose squared distance says whether they show one person.

    Args:
        spec: what the network is; see NetworkSpec.
        network: its weights; by default fresh ones.
        threshold: squared distance up to which two pictures are taken for one person.
        about: what it was trained on, for people and for JSON.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        network: nn.Module | None = None,
        *,
        threshold: float = 1.0,
        about: dict[str, Any] | None = None,
    ):
        self.spec, self.threshold, self.about = spec, threshold, about or {}
        self.network = (build(spec) if network is None else network).eval()

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
        """Unit vectors of (N, channels, height, width) from 0 to 1. A picture and its mirror image count alike."""
        self.network.eval()
        both = self.network(pictures) + self.network(pictures.flip(-1))
        return normalize(both, dim=-1).float()

    def digest(self) -> str:
        """A name for these weights, so that vectors of two networks are never compared by mistake."""
        whole = hashlib.sha256(json.dumps(asdict(self.spec)).encode())
        for name, x in sorted(self.network.state_dict().items()):
            whole.update(name.encode() + x.detach().contiguous().numpy().tobytes())
        return whole.hexdigest()[:16]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """embedder.safetensors and embedder.json."""
        top = Path(folder)
        top.mkdir(parents=True, exist_ok=True)
        write_tensors(top / "embedder.safetensors", dict(self.network.state_dict()), {"version": "1"})
        facts = {"format": FORMAT, "spec": asdict(self.spec), "threshold": self.threshold, "about": self.about}
        write_json(top / "embedder.json", facts)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "Embedder":
        """What `save` wrote."""
        top = Path(folder)
        if not (top / "embedder.json").is_file():
            raise ValueError(f"there is no embedder.json in {top}: make one with `linattn lab faces train`.")
        facts = json.loads((top / "embedder.json").read_text(encoding="utf-8"))
        if facts.get("format") != FORMAT:
            raise ValueError(f"{top / 'embedder.json'} has format {facts.get('format')}, this version reads {FORMAT}.")
        spec = NetworkSpec(**{**facts["spec"], "size": tuple(facts["spec"]["size"])})
        embedder = cls(spec, threshold=float(facts["threshold"]), about=facts["about"])
        tensors, _ = read_tensors(top / "embedder.safetensors")
        embedder.network.load_state_dict(tensors)
        return embedder
