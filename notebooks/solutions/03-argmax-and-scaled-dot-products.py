"""Solutions of 03-argmax-and-scaled-dot-products: one part per exercise, run in the notebook after it."""

# %% exercise 1
import math

temperature = 6 / math.log(100)

# %% exercise 2
divisor = math.sqrt(100 * 4 / 3)


# %% exercise 3
def straight_through(q, K, V):
    soft_weights = torch.softmax(q @ K.T, -1)
    hard = torch.nn.functional.one_hot(soft_weights.argmax(-1), K.shape[0]).to(V)
    return (hard + soft_weights - soft_weights.detach()) @ V
