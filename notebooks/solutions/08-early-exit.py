"""Solutions of 08-early-exit: one part per exercise, run in the notebook after it."""

# %% exercise 1
from linattn_lab.early_exit.rules import entropy


def my_exits(logits, tolerance):
    sure = torch.stack([entropy(own) < tolerance for own in logits])
    sure[-1] = True
    return sure.long().argmax(0)


# %% exercise 2
unsure = 21
