"""Budgets per layer and kv head: how slots are assigned, and the files that store them."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._files import write_json
from .._tensor_files import read_tensors, write_tensors
from ..nearfar import NearFar
from .modules import Layer

STEM = "linattn-budgets"
MOST_UNITS = 2**16  # of memory, in which budgets are handed out
RULE = 5  # by which near/far chooses what to pool and calibration what counts: files of another say nothing


# The arguments of a NearFar kernel that its errors depend on, whatever its slots and recall.
MEASURED = ("window", "sinks", "block", "alpha", "recall_bits", "state_bits")


def compact(window: int = 128, slots: int = 128) -> NearFar:
    """The kernel that models get unless they name another: 8 bits for the state and for recalled tokens."""
    return NearFar(window, slots, recall_bits=8, state_bits=8)


@dataclass
class Option:
    """One choice for a kv head: slots, blocks of recall, and the size of its state in slots."""

    slots: int
    recall: int
    price: int


@dataclass
class Calibration:
    """Budgets per layer and kv head, and the errors they were chosen by.

    Attributes:
        kernel: the arguments of the measured NearFar kernel, without slots and recall.
        options: the choices measured for every head, cheapest first.
        errors: (layers, kv heads, options), |W_o (approximate - exact)|^2 / |W_o exact|^2 of a layer's output.
        weights: (layers,), how much the errors of each layer count (`importance.layer_weights`).
        chosen: layer -> the option of each kv head. A layer is named by its index or, in encoder-decoder models, by its module.
    """

    kernel: dict[str, float]
    options: list[Option]
    errors: Tensor
    weights: Tensor
    chosen: dict[Layer, list[int]]

    @property
    def budgets(self) -> dict[Layer, list[int]]:
        """Layer -> slots of each kv head."""
        return {layer: [self.options[i].slots for i in row] for layer, row in self.chosen.items()}

    @property
    def recall(self) -> dict[Layer, list[int]]:
        """Layer -> blocks that each kv head recalls."""
        return {layer: [self.options[i].recall for i in row] for layer, row in self.chosen.items()}

    @property
    def mean_slots(self) -> float:
        """Mean size of a kv head's state, in slots; recalled tokens count as the slots of the same size."""
        heads = [self.options[i].price for row in self.chosen.values() for i in row]
        return sum(heads) / len(heads)

    def measured(self, kernel: NearFar) -> bool:
        """Whether these are errors of this kernel, whatever its slots and the blocks that it recalls."""
        names = [name for name in MEASURED if name != "recall_bits" or kernel.recall]
        return all(getattr(kernel, name) == self.kernel[name] for name in names)

    def near_far(self) -> NearFar:
        """The measured kernel, with its default slots and recall."""
        return NearFar(**cast(Any, self.kernel))

    def kernels(self) -> dict[Layer, NearFar]:
        """Layer -> its kernel, for `attach`."""
        plain, budgets, recall = self.near_far(), self.budgets, self.recall
        return {layer: plain.with_slots(budgets[layer], recall[layer]) for layer in self.chosen}

    def with_mean(self, mean_slots: int, *, recall: bool = True, recall_price: int | None = None) -> "Calibration":
        """A new assignment from the same errors: another mean, without recall, or with another price of recall in slots."""
        options = [option for option in self.options if recall or not option.recall]
        if recall_price is not None:
            options = [replace(o, price=o.slots + recall_price) if o.recall else o for o in options]
        kept = [i for i, option in enumerate(self.options) if recall or not option.recall]
        order = sorted(range(len(options)), key=lambda i: options[i].price)
        options, errors = [options[i] for i in order], self.errors[..., [kept[i] for i in order]]
        weighted = errors * self.weights[:, None, None]
        rows = hand_out(weighted, [option.price for option in options], mean_slots)
        return replace(self, options=options, errors=errors, chosen=dict(zip(self.chosen, rows, strict=True)))

    def _unfit(self) -> str | None:
        """What is wrong unless all parts are about the same layers, heads and options; else None."""
        sizes = len(self.chosen), len(next(iter(self.chosen.values()), ())), len(self.options)
        if tuple(self.errors.shape) != sizes or tuple(self.weights.shape) != sizes[:1]:
            return f"errors of shape {tuple(self.errors.shape)} for {sizes} layers, heads and options"
        if any(len(row) != sizes[1] or not all(0 <= i < sizes[2] for i in row) for row in self.chosen.values()):
            return "a layer without one option for each head"
        missing = set(MEASURED) - set(self.kernel)
        return f"a kernel without {min(missing)}" if missing else None

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes linattn-budgets.json and .safetensors into a folder, where `attach` finds them."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        tried = [asdict(option) for option in self.options]
        chosen = {str(k): v for k, v in self.chosen.items()}
        content = {"rule": RULE, "kernel": self.kernel, "options": tried, "chosen": chosen}
        write_tensors(path / f"{STEM}.safetensors", {"errors": self.errors, "weights": self.weights}, {"format": STEM})
        write_json(path / f"{STEM}.json", content)

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> "Calibration":
        """Reads a folder written by `save`."""
        path = Path(folder)
        try:
            content = json.loads((path / f"{STEM}.json").read_text())
            if content.get("rule") != RULE:
                raise ValueError(
                    f"the budgets in {path} were measured under another rule of near/far: calibrate anew "
                    f"(linattn.hf.calibrate, or linattn fidelity --calibrate), or remove {STEM}.json."
                )
            tensors, _ = read_tensors(path / f"{STEM}.safetensors")
            chosen = {int(k) if k.isdigit() else k: [int(i) for i in v] for k, v in content["chosen"].items()}
            options = [Option(**option) for option in content["options"]]
            found = Calibration(content["kernel"], options, tensors["errors"], tensors["weights"], chosen)
            if (why := found._unfit()) is not None:
                raise ValueError(f"{path / STEM}.json is not a calibration of linattn: it has {why}.")
            return found
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

        index = torch.tensor(list(self.chosen.values()))  # (layers, kv heads)
        prices = torch.tensor([option.price for option in self.options])[index].T
        left = self.errors.gather(2, index.unsqueeze(-1)).squeeze(-1).T
        figure = Figure(figsize=(10, 5), layout="constrained")
        for axis, table, title in zip(
            figure.subplots(2, 1), (prices, left), ("state, in slots", "error that is left"), strict=False
        ):
            shown = axis.imshow(table.clamp_min(1e-9).log10().numpy(), aspect="auto", cmap="viridis")
            axis.set(title=f"{title} (log10)", xlabel="layer", ylabel="kv head")
            figure.colorbar(shown, ax=axis)
        figure.savefig(path)


def hand_out(errors: Tensor, prices: Sequence[int], mean: int) -> list[list[int]]:
    """The assignment of options to heads with the least sum of errors, among those that cost `mean` or less on average.

    errors: (layers, kv heads, options); prices of the options, rising; mean: the price that a head may cost on average. Of
    options with equal errors the cheapest is taken.
    """
    layers, heads, _ = errors.shape
    extras = [price - prices[0] for price in prices]  # beyond the cheapest option, which every head can have
    total = max(mean - prices[0], 0) * layers * heads
    unit = max(1, math.gcd(*extras), -(-total // MOST_UNITS))
    costs, room = [-(-extra // unit) for extra in extras], total // unit
    # Dynamic programming: least[m] is the smallest error of the heads so far if they cost at most m units.
    least, taken = torch.zeros(room + 1, dtype=torch.float64), []
    for row in errors.flatten(0, 1).tolist():
        before, least = least, torch.full_like(least, torch.inf)
        option = torch.zeros(room + 1, dtype=torch.int16)
        for i, (cost, error) in enumerate(zip(costs, row, strict=True)):
            if cost > room:
                break
            found, best = before[: room + 1 - cost] + error, least[cost:]
            option[cost:].masked_fill_(found < best, i)
            torch.minimum(found, best, out=best)
        taken.append(option)
    at, chosen = int(least.argmin()), []
    for option in reversed(taken):
        chosen.append(int(option[at]))
        at -= costs[chosen[-1]]
    chosen.reverse()
    return [chosen[i * heads : (i + 1) * heads] for i in range(layers)]
