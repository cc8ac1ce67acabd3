"""Writing a summary token by token: the likeliest each time, by chance, or the best of several beams."""

from collections.abc import Callable

import torch
from torch import Tensor

from .model import END, PAD, START, Seq2Seq

MAX_TOKENS = 40
BEAM, LENGTH_PENALTY = 4, 0.8  # chosen on validation pairs
Pick = Callable[[Tensor], Tensor]  # log p (B, V) -> tokens (B,)


def likeliest(log_probs: Tensor) -> Tensor:
    return log_probs.argmax(-1)


def by_chance(temperature: float = 1.0, top_p: float = 1.0, generator: torch.Generator | None = None) -> Pick:
    """Draws a token; `top_p` keeps the fewest tokens that together have this share of the probability."""
    if not temperature > 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature must be above 0 and top_p in (0, 1], got {temperature} and {top_p}.")

    def pick(log_probs: Tensor) -> Tensor:
        probs, order = (log_probs / temperature).softmax(-1).sort(-1, descending=True)
        kept = probs * (probs.cumsum(-1) - probs < top_p)  # the first always stays
        drawn = torch.multinomial(kept, 1, generator=generator)
        return order.gather(-1, drawn).squeeze(-1)

    return pick


@torch.no_grad()
def write(model: Seq2Seq, source: Tensor, max_tokens: int, pick: Pick = likeliest) -> list[list[int]]:
    """A summary for each document (B, N), without start and end."""
    writing = model.start(model.encode(source))
    token = source.new_full((len(source),), START)
    ended = torch.zeros_like(token, dtype=torch.bool)
    rows = source.new_zeros(len(source), 0)
    for _ in range(max_tokens):
        said, writing = model.step(token, writing)
        token = pick(_allowed(said.log_probs, rows)).masked_fill(ended, PAD)
        ended = ended | (token == END)
        rows = torch.cat([rows, token[:, None]], 1)
        if bool(ended.all()):
            break
    return [_words(row) for row in rows.tolist()]


@torch.no_grad()
def beam_search(model: Seq2Seq, source: Tensor, beam: int, max_tokens: int, length_penalty: float) -> list[list[int]]:
    """The summary of highest log p / tokens^length_penalty that a search with `beam` candidates finds.

    Every candidate is a batch entry with states of its own; when one branches, its states are copied by `select`.
    """
    batch = len(source)
    writing = model.start(model.encode(source)).select(torch.arange(batch).repeat_interleave(beam))
    first = torch.arange(batch)[:, None] * beam  # (B, 1), where a document's candidates begin
    # All candidates are equal at first, so only one of them counts.
    scores = torch.full((batch, beam), -torch.inf).index_fill(1, torch.tensor([0]), 0.0)
    lengths, ended = torch.zeros(batch, beam), torch.zeros(batch, beam, dtype=torch.bool)
    token = source.new_full((batch * beam,), START)
    rows = source.new_zeros(batch * beam, 0)
    for _ in range(max_tokens):
        said, writing = model.step(token, writing)
        log_probs = _allowed(said.log_probs, rows).view(batch, beam, -1)
        best, tokens = log_probs.topk(beam, -1)  # (B, beam, beam): no more can survive of one candidate
        # A candidate that has ended goes on as it is, once.
        best = best.masked_fill(ended[..., None], -torch.inf)
        best[..., 0] = best[..., 0].masked_fill(ended, 0.0)
        tokens = tokens.masked_fill(ended[..., None], PAD)
        total = scores[..., None] + best
        longer = (lengths + ~ended)[..., None].expand_as(total)
        chosen = (total / longer**length_penalty).flatten(1).topk(beam, -1).indices  # (B, beam)
        parent = chosen // beam
        scores, lengths = total.flatten(1).gather(1, chosen), longer.flatten(1).gather(1, chosen)
        picked = tokens.flatten(1).gather(1, chosen)
        ended = ended.gather(1, parent) | (picked == END)
        kept = (first + parent).flatten()
        token = picked.flatten()
        rows = torch.cat([rows[kept], token[:, None]], 1)
        writing = writing.select(kept)
        if bool(ended.all()):
            break
    winners = (scores / lengths**length_penalty).argmax(1)
    return [_words(row) for row in rows.view(batch, beam, -1)[torch.arange(batch), winners].tolist()]


def _allowed(log_probs: Tensor, rows: Tensor) -> Tensor:
    """No padding, no second start, no empty summary, and no pair of tokens twice: rows (B, t) are those so far."""
    barred = [PAD, START] if rows.shape[1] else [PAD, START, END]
    log_probs = log_probs.index_fill(-1, torch.tensor(barred, device=log_probs.device), -torch.inf)
    followed = rows[:, :-1] == rows[:, -1:]  # the last token stood here before
    return log_probs.scatter(-1, torch.where(followed, rows[:, 1:], PAD), -torch.inf)


def _words(row: list[int]) -> list[int]:
    return [token for token in row if token not in (PAD, START, END)]
