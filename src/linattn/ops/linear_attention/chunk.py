"""The chunked sums of one segment of tokens, in plain differentiable torch.

Every key j carries a log-weight beta_j: what its features leave out, minus the logarithm of all decay up to j, -inf where
it is masked. Weights are always formed as exp(beta_j - mu) with mu a maximum over keys that the query may see, so nothing
overflows and nothing about later keys is ever touched. The scales are constants to autograd; beta is not. With decay beta is
float64, because the logarithms of a long segment add up; differences are taken before they are narrowed.

Shapes: B batch, H kv heads, G query heads per kv head, T tokens of the segment, C tokens of a chunk, n = T / C chunks,
r features, M value dim. Values come with a column of ones, so that S and Z are one matrix (B, H, r, M + 1).

Sums may come in a wider dtype than features and values, and leave in it: many small blocks are added to large sums.
"""

import torch
from torch import Tensor


def update_state(
    features: Tensor, beta: Tensor | None, values: Tensor, sums: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Adds keys to the sums. features (B,H,T,r), beta (B,H,T), values (B,H,T,M+1), sums (B,H,r,M+1), scale (B,H)."""
    if beta is None:
        block = _sum_of_products(features, values)
        return sums * _zero_where_empty(scale).exp()[..., None, None] + block, torch.zeros_like(scale)
    new_scale = torch.maximum(scale, beta.detach().amax(-1))
    top = _zero_where_empty(new_scale)
    weighted = features * (beta - top.unsqueeze(-1)).exp().to(features.dtype).unsqueeze(-1)
    block = _sum_of_products(weighted, values)
    return sums * (scale - top).exp().to(sums.dtype)[..., None, None] + block, new_scale


def causal(
    query_features: Tensor,
    features: Tensor,
    beta: Tensor | None,
    values: Tensor,
    sums: Tensor,
    scale: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Numerators and denominators (B,H,G,T,M+1) of a causal segment, the logarithm (B,H,T) of the factor that each row of
    them lacks (None for 1), and the sums and scale after it.

    Inside a chunk masked products of queries with keys, from chunk to chunk the sums.
    """
    B, H, G, T, r = query_features.shape
    n, C = T // chunk, chunk
    fq = query_features.reshape(B, H, G, n, C, r).transpose(2, 3).reshape(B, H, n, G * C, r)
    wide = values.shape[-1]
    fk, v = features.reshape(B, H, n, C, r), values.reshape(B, H, n, C, wide)
    scores = (fq @ fk.mT).reshape(B, H, n, G, C, C)
    later = torch.ones(C, C, dtype=torch.bool, device=fq.device).triu(1)
    if beta is None:
        sums = sums * _zero_where_empty(scale).exp()[..., None, None]
        added = (fk.mT @ v).cumsum(2)  # (B, H, n, r, M + 1)
        first = sums.to(fk.dtype).unsqueeze(2)
        prefix = torch.cat([first, first + added[:, :, :-1]], 2)  # the sums before each chunk
        sums = sums + added[:, :, -1]
        within = scores.masked_fill(later, 0)
        out = fq @ prefix + within.reshape(B, H, n, G * C, C) @ v
        row, new_scale = None, torch.zeros_like(scale)
    else:
        b = beta.reshape(B, H, n, C)
        log_scale = b.detach()
        peak = log_scale.amax(-1)  # (B, H, n)
        block_scale = torch.cat([scale.unsqueeze(-1), peak], -1)  # (B, H, n + 1), incoming sums first
        running = block_scale.cummax(-1).values
        mix = (block_scale.unsqueeze(-2) - _zero_where_empty(running).unsqueeze(-1)).tril().exp().tril().to(fk.dtype)
        weighted = fk * (b - _zero_where_empty(peak).unsqueeze(-1)).exp().to(fk.dtype).unsqueeze(-1)
        added = weighted.mT @ v
        blocks = torch.cat([sums.to(fk.dtype).unsqueeze(2), added], 2)
        prefix = (mix[..., :-1, :] @ blocks.flatten(3)).reshape(added.shape)  # the sums before each chunk
        last = (scale - _zero_where_empty(running[..., -1])).exp().to(sums.dtype)
        sums = sums * last[..., None, None] + (added * mix[..., -1, 1:, None, None]).sum(2)
        row = torch.maximum(running[..., :-1, None], log_scale.cummax(-1).values)  # (B, H, n, C): scale of each row
        row = _zero_where_empty(row)
        within = (
            (b.unsqueeze(-2) - row.unsqueeze(-1)).masked_fill(later, -torch.inf).exp().to(fk.dtype)
        )  # (B, H, n, C, C)
        within = scores * within.unsqueeze(3)
        before = (running[..., :-1, None] - row).exp().to(fk.dtype).repeat(1, 1, 1, G).unsqueeze(-1)
        out = before * (fq @ prefix) + within.reshape(B, H, n, G * C, C) @ v
        row, new_scale = row.reshape(B, H, T), running[..., -1]
    out = out.reshape(B, H, n, G, C, wide).transpose(2, 3).reshape(B, H, G, T, wide)
    return out, row, sums, new_scale


def _sum_of_products(features: Tensor, values: Tensor, block: int = 256) -> Tensor:
    """features^T values (B, H, r, M + 1), summed by blocks of tokens: one long product would add token after token."""
    T = features.shape[-2]
    if 2 * block > T:
        return features.mT @ values
    whole = T - T % block
    n = whole // block
    products = features[:, :, :whole].unflatten(2, (n, block)).mT @ values[:, :, :whole].unflatten(2, (n, block))
    total = products.sum(2)
    return total if whole == T else total + features[:, :, whole:].mT @ values[:, :, whole:]


def divide(out: Tensor) -> tuple[Tensor, Tensor]:
    """Splits (..., M + 1) into numerator and denominator and divides; rows that cannot be divided become 0.

    Returns the rows and where the guard acted.
    """
    numerator, denominator = out[..., :-1], out[..., -1:]
    small = denominator.detach().abs() <= smallest(out.dtype)
    return (numerator / denominator.masked_fill(small, 1)).masked_fill(small, 0), small.squeeze(-1)


def numerators(out: Tensor, *log_factors: Tensor | None) -> Tensor:
    """The numerators of (..., M + 1), each row times the exponentials of the given logarithms."""
    present = [x.to(torch.float64) for x in log_factors if x is not None]
    if not present:
        return out[..., :-1]
    return out[..., :-1] * sum(present[1:], present[0]).exp().to(out.dtype).unsqueeze(-1)


def smallest(dtype: torch.dtype) -> float:
    """Denominators up to this are not divided by: far enough above underflow that gradients do not overflow either."""
    return torch.finfo(dtype).tiny ** 0.8  # 5e-31 for float32


def _zero_where_empty(scale: Tensor) -> Tensor:
    """A maximum over no visible key is -inf; 0 in its place keeps -inf - (-inf) from becoming NaN."""
    return scale.masked_fill(scale == -torch.inf, 0)
