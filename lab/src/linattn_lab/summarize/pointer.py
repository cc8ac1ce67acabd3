"""Words from the vocabulary or from the document: the pointer-generator (See et al., 2017), over tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

MATCHES = 2  # how many of the last tokens written are looked for in the document
TINY = 1e-20


@dataclass
class Page:
    """The document as the pointer sees it.

    Attributes:
        source: (B, N) token ids; padding: (B, N), True where there is no token.
        memory: (B, N, dim), what the encoder made of them; keys: (B, N, pointer dim).
    """

    source: Tensor
    padding: Tensor
    memory: Tensor
    keys: Tensor

    @property
    def mask(self) -> Tensor | None:
        """The padding, if there is any."""
        return self.padding if bool(self.padding.any()) else None

    def select(self, batch_index: Tensor) -> "Page":
        return Page(*(x[batch_index] for x in (self.source, self.padding, self.memory, self.keys)))


class Pointer(nn.Module):
    """Where in the document the next token may be copied from, and how far to trust the copy.

    The scores are exact softmax: there are few output tokens, so T x N is linear in the document. A place gets a bonus,
    as large as the model finds fit, if the tokens before it are the ones just written (names go on as they began), and
    one, mostly negative, if its token was written already.
    """

    def __init__(self, dim: int, pointer_dim: int):
        super().__init__()
        self.query, self.key = nn.Linear(dim, pointer_dim), nn.Linear(dim, pointer_dim)
        self.bonus = nn.Linear(dim, MATCHES + 1)
        self.gate = nn.Linear(2 * dim, 1)
        nn.init.zeros_(self.bonus.weight)
        with torch.no_grad():
            self.bonus.bias.copy_(torch.tensor([2.0] * MATCHES + [-1.0]))

    def page(self, source: Tensor, padding: Tensor, memory: Tensor) -> Page:
        return Page(source, padding, memory, self.key(memory))

    def forward(self, x: Tensor, recent: Tensor, written: Tensor, page: Page) -> tuple[Tensor, Tensor]:
        """Weights (B, T, N) over the document, and the logit (B, T) of taking the vocabulary instead.

        x: (B, T, dim) of the decoder. recent: (B, T, MATCHES), the token just written and those before it.
        written: (B, T, N), whether the token at a place of the document was written before.
        """
        scores = self.query(x) @ page.keys.mT * page.keys.shape[-1] ** -0.5
        bonus = self.bonus(x)
        scores = scores + bonus[..., -1:] * written
        match: Tensor | None = None
        for back in range(MATCHES):
            # place j matches at `back` if the token before it, and so on, up to `back` + 1 tokens, are those just written
            shifted = nn.functional.pad(page.source, (back + 1, 0), value=-1)[:, : page.source.shape[1]]
            same = recent[:, :, back, None] == shifted[:, None, :]
            match = same if match is None else match & same
            scores = scores + bonus[..., back, None] * match
        weights = scores.masked_fill(page.padding[:, None, :], -torch.inf).softmax(-1)
        return weights, self.gate(torch.cat([x, weights @ page.memory], -1)).squeeze(-1)


def log_likelihood(written: Tensor, weights: Tensor, gate: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """log p(target), (B, T), of the mixture, from its log p in the vocabulary: the mixture itself is never formed."""
    copied = (weights * (source[:, None, :] == target[..., None])).sum(-1).clamp_min(TINY).log()
    return torch.logaddexp(logsigmoid(gate) + written, logsigmoid(-gate) + copied)


def log_mixture(logits: Tensor, weights: Tensor, gate: Tensor, source: Tensor) -> Tensor:
    """log p of every token of the vocabulary, (B, T, V)."""
    share = gate.sigmoid().unsqueeze(-1)
    mixed = logits.softmax(-1) * share
    places = source[:, None, :].expand_as(weights)
    return mixed.scatter_add(-1, places, weights * (1 - share)).clamp_min(TINY).log()
