"""Solutions of 07-example-difficulty: one part per exercise, run in the notebook after it."""


# %% exercise 1
def my_depth(probes, network):
    agree = (probes == network).flip(0).long().cumprod(0).sum(0)
    return len(probes) - agree


# %% exercise 2
def my_vote(queries, references, labels, k):
    nearest = torch.cdist(queries, references).topk(k, largest=False).indices
    votes = torch.nn.functional.one_hot(labels[nearest], int(labels.max()) + 1).sum(1)
    return votes.argmax(1)
