"""Budgets per layer and kv head: how slots are handed out, and the files they are kept in."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._files import write_json
from ..nearfar import NearFar
from ..sums import _safetensors

STEM = "linattn-budgets"


@dataclass
class Calibration:
    """Budgets per layer and kv head, and the errors they were chosen by.

    Attributes:
        kernel: the arguments of the NearFar kernel that was measured, slots aside.
        budgets: layer -> slots of each kv head.
        sizes: the numbers of slots that were tried.
        errors: (layers, kv heads, sizes), |W_o (approximate - exact)|^2 / |W_o exact|^2 of a layer's output.
    """

    kernel: dict[str, Any]
    budgets: dict[int, list[int]]
    sizes: list[int]
    errors: Tensor

    @property
    def mean_slots(self) -> float:
        heads = [m for row in self.budgets.values() for m in row]
        return sum(heads) / len(heads)

    def near_far(self) -> NearFar:
        return NearFar(**self.kernel)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes linattn-budgets.json and .safetensors into a folder, where `attach` finds them."""
        path = Path(folder)
        content = {**asdict(self), "budgets": {str(k): v for k, v in self.budgets.items()}}
        del content["errors"]
        _safetensors.save(path / f"{STEM}.safetensors", {"errors": self.errors}, {"format": STEM})
        write_json(path / f"{STEM}.json", content)

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> "Calibration":
        path = Path(folder)
        try:
            content = json.loads((path / f"{STEM}.json").read_text())
            tensors, _ = _safetensors.load(path / f"{STEM}.safetensors")
            budgets = {int(k): [int(m) for m in v] for k, v in content["budgets"].items()}
            return Calibration(content["kernel"], budgets, content["sizes"], tensors["errors"])
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path / STEM}.json is not a calibration of linattn: {error!r}") from error

    @staticmethod
    def find(model: PreTrainedModel) -> "Calibration | None":
        """The calibration in the folder that a model was loaded from, if there is one."""
        folder = Path(getattr(model, "name_or_path", "") or "/nonexistent")
        return Calibration.load(folder) if (folder / f"{STEM}.json").is_file() else None

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draws budgets and errors per layer and head. Needs matplotlib."""
        from matplotlib.figure import Figure

        layers = sorted(self.budgets)
        chosen = torch.tensor([self.budgets[i] for i in layers]).T
        index = torch.tensor([[self.sizes.index(m) for m in self.budgets[i]] for i in layers])
        left = self.errors.gather(2, index.unsqueeze(-1)).squeeze(-1).T
        figure = Figure(figsize=(10, 5), layout="constrained")
        for axis, table, title in zip(figure.subplots(2, 1), (chosen, left), ("slots", "error that is left")):
            shown = axis.imshow(table.clamp_min(1e-9).log10().numpy(), aspect="auto", cmap="viridis")
            axis.set(title=f"{title} (log10)", xlabel="layer", ylabel="kv head")
            figure.colorbar(shown, ax=axis)
        figure.savefig(path)


def hand_out(errors: Tensor, sizes: Sequence[int], mean_slots: int) -> list[list[int]]:
    """Greedy: the step that removes most error per slot goes first, until the mean is reached."""
    layers, heads, _ = errors.shape
    best = errors.cummin(-1).values.tolist()  # more slots never count as worse
    level = [[0] * heads for _ in range(layers)]
    left = mean_slots * layers * heads - sizes[0] * layers * heads
    while True:
        steps = [
            ((best[i][h][level[i][h]] - best[i][h][to]) / (sizes[to] - sizes[level[i][h]]), i, h, to)
            for i in range(layers)
            for h in range(heads)
            for to in range(level[i][h] + 1, len(sizes))
            if sizes[to] - sizes[level[i][h]] <= left
        ]
        gain, i, h, to = max(steps, default=(0.0, 0, 0, 0))
        if gain <= 0:
            return [[sizes[m] for m in row] for row in level]
        left -= sizes[to] - sizes[level[i][h]]
        level[i][h] = to
