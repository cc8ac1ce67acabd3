"""NaN and infinity: one error for all engines that names the source."""

from typing import NoReturn

import torch
from torch import Tensor

from .base import State


def of_state(state: State | None) -> dict[str, Tensor]:
    """The numbers of a state that must be finite, by names for `refuse`."""
    if state is None:
        return {}
    kinds = {name: spec.kind for name, spec in state.table.items()}
    return {f"the state's {name}": x for name, x in state.tensors().items() if kinds[name] in ("float", "entry")}


def refuse(dtype: torch.dtype, **tokens: Tensor) -> NoReturn:
    """Says which of the tokens hold NaN or infinity, or that the sums of finite ones left the range of dtype."""
    guilty = [name for name, x in tokens.items() if not bool(torch.isfinite(x).all())]
    if guilty:
        raise ValueError(
            f"{' and '.join(guilty)} must be finite, but hold NaN or infinity: attention would spread them."
        )
    raise ValueError(
        f"the sums left the range of {dtype}: the features of this kernel grow too large for these inputs. "
        "Scale them down, or pass float64."
    )
