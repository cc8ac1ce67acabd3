"""Near/far attention written down again, token by token in float64: what both engines must give, whatever is done to scores.

Only which slots are merged is asked of the library (`merge`, which has tests of its own): pairs of nearly equal cost would
otherwise be a matter of rounding. Weights, means, positions, biases and the attention received are computed here.
"""

import torch

from linattn.nearfar.biases import SLOPE_UNIT
from linattn.nearfar.constants import DECAY, LEAST_WEIGHT
from linattn.nearfar.merge import anchor_and_metric, merge


class Twin:
    """One kv head of one sequence: queries (G, N, D), keys (N, D), values (N, M), all visible."""

    least_weight = LEAST_WEIGHT  # that one key of a recalled block must have

    def __init__(self, q, k, v, kernel, scale=None, heads=slice(None)):
        """heads: the query heads of this kv head among those that the kernel has biases for."""
        self.kernel, self.q, self.k, self.v = kernel, *(x.double() for x in (q, k, v))
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.slopes = None if kernel.alibi_slopes is None else kernel.alibi_slopes.double()[heads]
        table = kernel.bias_table()
        self.table = None if table is None else table.detach().double()[heads]
        self.slots = []  # key, value, position, bias, received, queries
        self.seen = {}  # token -> what it received, and from how many queries
        self.far = {}  # far token -> the slot that it is in, or None without slots, and its share of that slot

    def run(self):
        """(G, N, M)."""
        kernel, N = self.kernel, self.k.shape[0]
        out = self.q.new_zeros(*self.q.shape[:2], self.v.shape[1])
        for start in range(0, N, kernel.block):
            if start > 0 and kernel.slots > 0:
                self.observe(start - kernel.block)
            self.evict(start)
            for i in range(start, min(N, start + kernel.block)):
                weights, value, _ = self.weights(i, start)
                out[:, i] = weights @ value if kernel.recall == 0 or not self.far else self.recalled(i, start)
        return out

    def weights(self, i, start):
        """Of the queries at i in the block from `start` on: weights (G, n) of what they see, its values (n, M), and which
        of it are tokens; slots come last."""
        logits, value, tokens = self.logits(i, start)
        return logits.softmax(-1), value, tokens

    def logits(self, i, start):
        """The same before the softmax."""
        kernel = self.kernel
        sinks = range(min(start, kernel.sinks))
        tokens = [*sinks, *range(max(len(sinks), start - kernel.window), i + 1)]
        key, value, place = self.k[tokens], self.v[tokens], torch.tensor(tokens, dtype=torch.float64)
        bias = torch.zeros(len(tokens), dtype=torch.float64)
        if self.slots:
            columns = [
                torch.stack([torch.as_tensor(slot[c], dtype=torch.float64) for slot in self.slots]) for c in range(4)
            ]
            key, value, place, bias = (torch.cat(x) for x in zip((key, value, place, bias), columns, strict=True))
        return self.scores(i, key, place) + bias, value, tokens

    def recalled(self, i, start):
        """Outputs (G, M) of the queries at i, in which the tokens of the best blocks are no longer part of their slots."""
        logits, value, tokens = self.logits(i, start)
        log_z = logits.logsumexp(-1, keepdim=True)
        out, total = (logits - log_z).exp() @ value, torch.ones_like(log_z)
        for j in self.recalled_tokens(i, log_z):
            slot, share = self.far[j]
            gain = (self.scores(i, self.k[j : j + 1], torch.tensor([j], dtype=torch.float64)) - log_z).exp()
            if slot is not None:
                at = next(n for n, other in enumerate(self.slots) if other is slot)
                gain = gain - share * (logits[:, len(tokens) + at].unsqueeze(-1) - log_z).exp()
            out, total = out + gain * self.v[j], total + gain
        return out / total

    def recalled_tokens(self, i, log_z):
        """The far tokens in the blocks whose largest score, mean and two deviations, is best for one of the queries, and
        that have a key with some weight for one of them. All blocks, if there are no more than may be recalled."""
        kernel, blocks = self.kernel, {}
        for j in self.far:
            blocks.setdefault((j + kernel.window % kernel.block) // kernel.recall_unit, []).append(j)
        if len(blocks) <= kernel.recall:
            return list(self.far)
        best = {number: self.block_score(i, members, log_z) for number, members in blocks.items()}
        chosen = [blocks[n] for n in sorted(best, key=best.__getitem__, reverse=True)[: kernel.recall]]
        heavy = [
            members
            for members in chosen
            if (self.scores(i, self.k[members], torch.tensor(members).double()) - log_z).exp().max()
            >= self.least_weight
        ]
        return [j for members in heavy for j in members]

    def block_score(self, i, members, log_z):
        """The largest weight that a key of the block is expected to have, as a logarithm."""
        root = self.scale**0.5
        keys, x = root * self.k[members], root * self.q[:, i]
        place = torch.tensor(members, dtype=torch.float64)
        variance = x.square() @ keys.var(0, unbiased=False)
        if self.slopes is not None:
            variance = variance + self.slopes.square() * place.var(unbiased=False)
        scores = self.cap(x @ keys.mean(0) + 2 * variance.sqrt()) + self.by_position(i, place.mean()[None])[:, 0]
        return float((scores - log_z.squeeze(-1)).max())

    def scores(self, i, key, place):
        """(G, n)."""
        return self.cap(self.scale * (self.q[:, i] @ key.mT)) + self.by_position(i, place)

    def by_position(self, i, place):
        """The biases (G, n) of keys at these positions."""
        bias = self.q.new_zeros(len(self.q), len(place))
        if self.slopes is not None:
            bias = bias + self.slopes.unsqueeze(-1) * (place - i)
        if self.table is not None:
            reach = self.table.shape[1] // 2
            bias = bias + self.table[:, (place.round().long() - i).clamp(-reach, reach) + reach]
        return bias

    def cap(self, scores):
        cap = self.kernel.logit_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def observe(self, own):
        """The attention that the sampled queries of the block at `own` paid."""
        for slot in self.slots:
            slot[4], slot[5] = slot[4] * DECAY, slot[5] * DECAY
        self.seen = {j: [a * DECAY, n * DECAY] for j, (a, n) in self.seen.items()}
        for i in range(own, own + self.kernel.block, self.kernel.stride):
            weights, _, tokens = self.weights(i, own)
            paid = weights.sum(0).tolist()
            known = [self.seen.setdefault(j, [0.0, 0.0]) for j in tokens]
            for total, one in zip(paid, known, strict=False):
                one[0], one[1] = one[0] + total, one[1] + len(weights)
            for total, slot in zip(paid[len(tokens) :], self.slots, strict=True):
                slot[4], slot[5] = slot[4] + total, slot[5] + len(weights)

    def evict(self, start):
        """The keys that leave the window become slots; the merge is of as many as fit, and a block."""
        kernel = self.kernel
        leaving = range(max(kernel.sinks, start - kernel.window - kernel.block), start - kernel.window)
        self.far |= dict.fromkeys(leaving, (None, 1.0))
        if kernel.slots == 0 or not leaving:
            return
        for j in leaving:
            self.slots.append([self.k[j], self.v[j], float(j), 0.0, *self.seen.get(j, (0.0, 0.0))])
            self.far[j] = self.slots[-1], 1.0
        if len(self.slots) <= kernel.slots:
            return
        anchor, metric = self.statistics(start)
        moved = self.choose(anchor, metric)
        merged = []
        for place in range(kernel.slots):
            members = [slot for slot, to in zip(self.slots, moved, strict=True) if to == place]
            if members:
                merged.append(members[0] if len(members) == 1 else self.pool(members, anchor))
        self.slots = merged

    def pool(self, members, anchor):
        """One slot for several: weights exp(score for the mean query), the sum of which the bias keeps."""
        log_weight = torch.stack([self.anchor_score(m[0], m[2], anchor) + m[3] for m in members])
        share = log_weight.softmax(0)
        key, value = (sum(p * m[c] for p, m in zip(share, members, strict=True)) for c in (0, 1))
        position = float(sum(p * m[2] for p, m in zip(share, members, strict=True)))
        bias = float(log_weight.logsumexp(0) - self.anchor_score(key, position, anchor))
        made = [key, value, position, bias, sum(m[4] for m in members), max(m[5] for m in members)]
        for j, (slot, part) in self.far.items():
            for p, member in zip(share, members, strict=True):
                if slot is member:
                    self.far[j] = made, part * float(p)
        return made

    def anchor_score(self, key, position, anchor):
        """anchor: the mean query, scaled; then the mean slope."""
        score = self.cap(self.scale**0.5 * key @ anchor[: len(key)])
        return score if self.slopes is None else score + anchor[len(key)] * SLOPE_UNIT * position

    def wide(self, x, extra):
        """Scaled tokens (.., D), with the coordinate that positions have in the library."""
        x = x * self.scale**0.5
        return x if self.slopes is None else torch.cat([x, extra.reshape(*x.shape[:-1], 1)], -1)

    def statistics(self, start):
        """Mean and variance of the sampled queries of all finished blocks."""
        x = self.q[:, : start : self.kernel.stride]
        if self.slopes is not None:
            slopes = (self.slopes / SLOPE_UNIT).reshape(-1, 1).expand(x.shape[:2])
        x = self.wide(x, None if self.slopes is None else slopes).flatten(0, 1)
        x = torch.nn.functional.pad(x, (0, 1), value=1.0)
        anchor, metric = anchor_and_metric(torch.stack([x.sum(0), x.square().sum(0)])[None, None])
        return anchor[0, 0, 0], metric[0, 0, 0]

    def choose(self, anchor, metric):
        """Where each slot goes, as the library decides, among budget + block places."""
        keys = torch.stack([slot[0] for slot in self.slots])
        places = torch.tensor([slot[2] for slot in self.slots], dtype=torch.float64) * SLOPE_UNIT
        entries = torch.cat([self.wide(keys, places), torch.stack([slot[1] for slot in self.slots])], -1)
        numbers = torch.tensor([[s[3], s[4] / max(s[5], 1e-6)] for s in self.slots], dtype=torch.float64)
        total = self.kernel.slots + self.kernel.block
        room = (0, total - len(self.slots))
        bias = torch.nn.functional.pad(numbers[:, 0], room, value=-torch.inf)
        entries = torch.nn.functional.pad(entries, (0, 0, *room))
        rate = torch.nn.functional.pad(numbers[:, 1], room)
        given = (x[None, None] for x in (entries, bias, rate))
        options = self.kernel.slots, anchor[None, None, None], metric[None, None, None]
        _, _, index = merge(*given, *options, self.kernel.alpha, self.kernel.logit_cap)
        return index[0, 0, : len(self.slots)].tolist()


def twin(q, k, v, kernel, head=Twin, *, scale=None, mask=None):
    """(B, Hq, N, M) of queries (B, Hq, N, D), keys and values (B, H, N, ..). mask: (B, N), or None; 0 for hidden tokens."""
    groups = q.shape[1] // k.shape[1]
    out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b in range(q.shape[0]):
        shown = torch.arange(q.shape[2]) if mask is None else mask[b].nonzero().flatten()
        for h in range(k.shape[1]):
            own = slice(h * groups, (h + 1) * groups)
            one = head(q[b, own][:, shown], k[b, h, shown], v[b, h, shown], kernel, scale, own)
            out[b, own] = out[b, own].index_copy(1, shown, one.run())
    return out
