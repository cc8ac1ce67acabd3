"""Prediction depth (Baldock, Maennel, Neyshabur 2021): how far into a network an image's class is settled."""

import numpy as np
from torch import Tensor


def prediction_depth(probes: Tensor, network: Tensor) -> Tensor:
    """The first probe from which it and all later ones say what the NETWORK says; as many as there are probes if none.

    >>> import torch
    >>> probes = torch.tensor([[1, 0, 2], [0, 2, 2], [1, 2, 2], [1, 2, 0]])  # four probes, three pictures
    >>> prediction_depth(probes, network=torch.tensor([1, 2, 2])).tolist()
    [2, 1, 4]

    Args:
        probes: classes (probes, images), from the input on.
        network: its classes (images,), right or wrong.
    """
    if probes.dim() != 2 or probes.shape[1:] != network.shape:
        raise ValueError(
            f"probes must be (probes, pictures) and network (pictures,), "
            f"got {tuple(probes.shape)} and {tuple(network.shape)}."
        )
    agree = (probes == network).flip(0).long()
    return len(probes) - agree.cumprod(0).sum(0)


def bands(depths: int, count: int = 4) -> list[tuple[int, int]]:
    """The depths 0 to depths - 1 in `count` bands (first, last) of like width, from shallow to deep.

    >>> bands(12)
    [(0, 2), (3, 5), (6, 8), (9, 11)]
    """
    parts = np.array_split(np.arange(depths), min(count, depths))
    return [(int(part[0]), int(part[-1])) for part in parts]
