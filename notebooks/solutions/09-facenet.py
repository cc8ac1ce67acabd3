"""Solutions of 09-facenet: one part per exercise, run in the notebook after it."""


# %% exercise 1
def semi_hard(dn, dp, margin=0.2):
    return (dn > dp) & (dn < dp + margin)


# %% exercise 2
def triplets(counts):
    total = sum(counts)
    return sum(m * (m - 1) * (total - m) for m in counts)


# %% exercise 3
def conv_macs(k, cin, cout, h, w):
    return k * k * cin * cout * h * w
