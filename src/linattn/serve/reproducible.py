"""Linear layers whose rows do not depend on how many rows a call has.

Matrix products choose other kernels, which add in another order, for one row than for eight. The difference is in the last
bits, and may decide between two tokens that are almost equally likely. Products of a padded number of rows are made by one
kernel; which padding is enough is found out on the machine.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

IMPOSSIBLE = (
    "on this machine, the numbers of a sequence depend on how many are computed together: answers of this model cannot be "
    "made independent of other requests to the last bit. Leave --reproducible out; differences are in the last bits only."
)
UNITS = (1, 4, 8, 16, 32, 64)
PROBES = (1, 2, 3, 5, 7, 8, 11, 16, 29, 64, 128)  # rows


@torch.inference_mode()
def needed_padding(layers: list[nn.Linear]) -> int | None:
    """The smallest unit so that products of any multiple of it give the same rows, bit for bit; None if there is none."""
    generator = torch.Generator().manual_seed(0)
    shapes = {(layer.in_features, layer.out_features, layer.weight.dtype): layer for layer in layers}
    samples = []
    for layer in shapes.values():
        x = torch.randn(max(PROBES), layer.in_features, generator=generator).to(layer.weight.dtype)
        samples.append((layer, x, layer(x)))

    def enough(unit: int) -> bool:
        return all(
            torch.equal(layer(_padded(x[:rows], unit))[:rows], whole[:rows])
            for layer, x, whole in samples
            for rows in PROBES
        )

    return next((unit for unit in UNITS if enough(unit)), None)


class PaddedLinear(nn.Linear):
    """nn.Linear that pads its rows to a multiple of `row_unit`."""

    row_unit: int

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        out = super().forward(_padded(rows, self.row_unit))[: rows.shape[0]]
        return out.reshape(*input.shape[:-1], out.shape[-1])


def pad_linears(model: nn.Module) -> int:
    """Makes every nn.Linear of a model pad its rows; returns the padding. ValueError if no padding is enough here."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    unit = needed_padding(layers)
    if unit is None:
        raise ValueError(IMPOSSIBLE)
    for layer in layers if unit > 1 else []:
        layer.__class__, layer.row_unit = PaddedLinear, unit  # type: ignore[assignment]
    return unit


def check(step: Callable[[list[int]], Tensor]) -> None:
    """Raises ValueError unless step(rows), the logits (rows, vocabulary) of sequences, has the same bits for each alone."""
    rows = list(range(5))
    together = step(rows)
    if not all(torch.equal(together[i], step([i])[0]) for i in rows):
        raise ValueError(IMPOSSIBLE)


def _padded(x: Tensor, unit: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % unit))
