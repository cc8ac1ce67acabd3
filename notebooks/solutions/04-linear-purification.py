"""Solutions of 04-linear-purification: one part per exercise, run in the notebook after it."""

# %% exercise 1
low, high = 1.0, 1.0  # lam <= 9 / 9 and lam >= 0.25 * 4: one number


# %% exercise 2
def purify_few(X, lam):
    return X @ np.linalg.inv(X.T @ X + lam * np.eye(X.shape[1])) @ X.T


# %% exercise 3
class Streaming:
    def __init__(self, features, lam):
        self.lam, self.C = lam, np.zeros((features, features))

    def see(self, x):
        self.C += np.outer(x, x)

    def matrix(self):
        return self.C @ np.linalg.inv(self.C + self.lam * np.eye(len(self.C)))
