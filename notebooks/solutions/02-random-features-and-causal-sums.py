"""Solutions of 02-random-features-and-causal-sums: one part per exercise, run in the notebook after it."""


# %% exercise 1
def variance_for(tau):
    return 1 / tau**2


# %% exercise 2
def positive_features(x, w):
    x = x / D**0.25
    return (x @ w.T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(len(w))


# %% exercise 3
def state_bytes(H, r, M):
    return 4 * H * r * (M + 1)


def cache_bytes(H, N, D, M):
    return 4 * H * N * (D + M)
