"""Prediction depth (Baldock, Maennel, Neyshabur 2021): how far into a network a picture's class is settled."""

import numpy as np
from torch import Tensor


def prediction_depth(probes: Tensor, network: Tensor) -> Tensor:
    """The first probe from which it and all later ones say what the NETWORK says; as many as there are probes if none.

    >>> import torch
    >>> probes = torch.tensor([[1, 0, 2], [0, 2, 2], [1, 2, 2], [1, 2, 0]])  # four probes, three pictures
    >>> prediction_depth(probes, network=torch.tensor([1, 2, 2])).tolist()
    [2, 1, 4]

    Args:
        probes: classes (probes, pictures), from the input on.
        network: its classes (pictures,), right or wrong.
    """
    if probes.dim() != 2 or probes.shape[1:] != network.shape:
        raise ValueError(
            f"probes must be (probes, pictures) and network (pictures,), "
            f"got {tuple(probes.shape)} and {tuple(network.shape)}."
        )
    agree = (probes == network).flip(0).long()
    return len(probes) - agree.cumprod(0).sum(0)


def bands(depth: np.ndarray, least: float = 0.1) -> list[tuple[int, int]]:
    """Neighbouring depths put together, from shallow to deep, until each band (low, high) holds a share of `least`."""
    found: list[tuple[int, int]] = []
    depths, counts = np.unique(depth, return_counts=True)
    low, held = None, 0
    for value, count in zip(depths, counts):
        low = value if low is None else low
        held += count
        if held >= least * len(depth):
            found.append((int(low), int(value)))
            low, held = None, 0
    if low is not None:  # too few at the deep end for a band of their own
        low = found.pop()[0] if found else low
        found.append((int(low), int(depths[-1])))
    return found
