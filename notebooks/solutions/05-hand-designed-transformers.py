"""Solutions of 05-hand-designed-transformers: one part per exercise, run in the notebook after it."""

# %% exercise 1
from linattn_lab.handmade import by_mirror


def last_token():
    return aggregate(by_mirror("ABC", 4, lambda q, k: k == 0), {"A": [1, 0, 0], "B": [0, 1, 0], "C": [0, 0, 1]})


# %% exercise 2
gap = np.log(5e8) + 0.01
