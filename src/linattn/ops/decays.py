"""Products of rows and keys under a decay, within chunks of C tokens.

Every exponent is a sum of log-decays, hence <= 0, and is formed as that sum: no ratio of exponentials, no difference of
long sums. A log-decay is None (nothing decays), (..., C) for all channels of a head, or (..., C, D) per channel.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 16  # of a per-channel decay: pairs within a block are formed channel by channel


def pairwise(log_decay: Tensor) -> Tensor:
    """(..., C) -> (..., C, C): at [i, j] the sum over j < t <= i, and -inf for j > i."""
    below = torch.ones(2 * log_decay.shape[-1:], dtype=torch.bool, device=log_decay.device).tril(-1)
    steps = log_decay.unsqueeze(-1).masked_fill(~below, 0)  # at [t, j]: log_decay_t if t > j
    return steps.cumsum(-2).masked_fill(below.mT, -torch.inf)


def pairwise_channels(log_decay: Tensor) -> Tensor:
    """(..., C, D) -> (..., C, C, D), the same for every channel."""
    below = torch.ones(2 * log_decay.shape[-2:-1], dtype=torch.bool, device=log_decay.device).tril(-1).unsqueeze(-1)
    steps = log_decay.unsqueeze(-2).masked_fill(~below, 0)
    return steps.cumsum(-3).masked_fill(below.transpose(0, 1), -torch.inf)


def from_start(log_decay: Tensor, dim: int) -> Tensor:
    """Of the tokens up to and including each."""
    return log_decay.cumsum(dim)


def to_end(log_decay: Tensor, dim: int) -> Tensor:
    """Of the tokens after each."""
    later = log_decay.narrow(dim, 1, log_decay.shape[dim] - 1).flip(dim).cumsum(dim).flip(dim)
    return torch.cat([later, torch.zeros_like(log_decay.narrow(dim, 0, 1))], dim)


def decayed_products(rows: Tensor, key: Tensor, log_decay: Tensor | None) -> Tensor:
    """(..., R, C, D), (..., C, D) -> (..., R, C, C): at [i, j] sum_d rows_i k_j exp(decay from j to i), 0 for j > i."""
    if log_decay is not None and log_decay.dim() == key.dim():
        return _per_channel(rows, key, log_decay)
    products = torch.unflatten(rows.flatten(-3, -2) @ key.mT, -2, rows.shape[-3:-1])
    return products.tril() if log_decay is None else products * pairwise(log_decay).exp().unsqueeze(-3)


def _per_channel(rows: Tensor, key: Tensor, log_decay: Tensor) -> Tensor:
    """Blocks of c tokens: pairs of one block directly; others by a product, with the decay split at the row's block."""
    C = key.shape[-2]
    c = min(BLOCK, C)
    blocks = C // c
    if blocks * c != C:
        raise ValueError(f"a chunk of {C} tokens is not made of blocks of {c}.")
    rows, key, log_decay = (
        torch.unflatten(x, -2, (blocks, c)) for x in (rows, key, log_decay)
    )  # (.., R, b, c, D), (.., b, c, D)
    weighted = pairwise_channels(log_decay).exp() * key.unsqueeze(-3)  # (.., b, i, j, D)
    near = weighted @ rows.movedim(-4, -1)  # (.., b, i, j, R)
    near = near.movedim(-1, -4)  # (.., R, b, i, j)
    if blocks == 1:
        return near.squeeze(-3)
    passed = rows * from_start(log_decay, -2).exp().unsqueeze(-4)
    between = pad(pairwise_channels(log_decay.sum(-2))[..., :-1, :, :], (0, 0, 0, 0, 1, 0), value=-torch.inf)
    rest = to_end(log_decay, -2).unsqueeze(-4) + between.unsqueeze(
        -2
    )  # (.., a, b, j, D): from j to the start of block a
    keys = (key.unsqueeze(-4) * rest.exp()).flatten(-3, -2)  # (.., a, C, D)
    far = passed.movedim(-4, -3).flatten(-3, -2) @ keys.mT  # (.., a, R * c, C)
    far = torch.unflatten(torch.unflatten(far, -2, (-1, c)).movedim(-3, -4), -1, (blocks, c))  # (.., R, a, i, b, j)
    same = torch.eye(blocks, dtype=near.dtype, device=near.device).reshape(blocks, 1, blocks, 1)
    return (far + near.unsqueeze(-2) * same).flatten(-2, -1).flatten(-3, -2)


def padded_chunks(x: Tensor, chunk: int, dim: int) -> Tensor:
    """Splits the token dimension `dim` (counted from the end) into (chunks, chunk), with zeros after the last token."""
    missing = -x.shape[dim] % chunk
    if missing:
        x = pad(x, [0, 0] * (-dim - 1) + [0, missing])
    return torch.unflatten(x, dim, (-1, chunk))


def chunk_length(tokens: int, longest: int, per_channel: bool) -> int:
    """Short sequences are one chunk; per-channel decays need whole blocks."""
    if tokens >= longest:
        return longest
    return min(longest, -(-tokens // BLOCK) * BLOCK) if per_channel else tokens
