"""Solutions of 01-kernelized-linear-attention: one part per exercise, run in the notebook after it."""


# %% exercise 1
def features(x, c):
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], 1)
    return torch.cat(
        [torch.full_like(x[..., :1], c), math.sqrt(2 * c) * x, x**2, math.sqrt(2) * x[..., i] * x[..., j]], -1
    )


# %% exercise 2
def crossing(D, M):
    r = 1 + D + D * (D + 1) // 2
    return 2 * r * M // (D + M) + 1


# %% exercise 3
def causal(Q, K, V):
    S, Z, rows = 0, 0, []
    for q, k, v in zip(phi(Q), phi(K), V):
        S, Z = S + k[:, None] * v, Z + k
        rows.append(q @ S / (q @ Z))
    return torch.stack(rows)
