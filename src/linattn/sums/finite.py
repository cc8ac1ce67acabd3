"""NaN and infinity: one error for all engines, that names where they came from."""

from typing import NoReturn

import torch
from torch import Tensor


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
