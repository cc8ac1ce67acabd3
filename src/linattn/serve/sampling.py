"""Choosing the next token from logits."""

import math
import random
import secrets
from dataclasses import dataclass, field

import torch
from torch import Tensor


class NotFiniteError(ValueError):
    """The model gave numbers that are not finite, from which no token can be chosen."""


@dataclass(frozen=True)
class SamplingOptions:
    """As in OpenAI's protocol.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: only the likeliest tokens with this much probability together.
        seed: of the random numbers; None takes a new one.
        stop: texts that end the answer; they are not part of it.
        top_logprobs: how many likeliest tokens to report for each token; None reports no log-probabilities.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = field(default=())
    top_logprobs: int | None = None


@dataclass(frozen=True)
class Choice:
    """A token, its log-probability, and the likeliest tokens with theirs; without them unless asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The random numbers of one answer: they depend on its seed alone, never on other requests."""

    def __init__(self, options: SamplingOptions, index: int = 0):
        self.options = options
        seed = secrets.randbits(63) if options.seed is None else options.seed + index
        self._random = random.Random(seed)

    def choose(self, logits: Tensor) -> Choice:
        """The next token from logits (vocabulary,); NotFiniteError if they are not numbers."""
        options = self.options
        likeliest = int(logits.argmax())  # the place of a number that is not finite, if there is one
        if not math.isfinite(logits[likeliest]):
            raise NotFiniteError("the model's logits are not finite: its weights or its dtype do not fit this text.")
        token = likeliest if options.temperature == 0 else self._draw(logits, logits[likeliest])
        if options.top_logprobs is None:
            return Choice(token)
        logprobs = logits.log_softmax(-1)
        found = logprobs.topk(min(options.top_logprobs, logprobs.shape[0]))
        top = tuple(zip(found.indices.tolist(), found.values.tolist(), strict=True))
        return Choice(token, float(logprobs[token]), top)

    def _draw(self, logits: Tensor, most: Tensor) -> int:
        # The largest is 0 before it is divided: no temperature, however low, makes it infinite.
        probabilities = ((logits.double() - most.double()) / self.options.temperature).softmax(-1)
        index: Tensor | None = None
        if self.options.top_p < 1:
            probabilities, index = probabilities.sort(descending=True, stable=True)
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.where(before < self.options.top_p, probabilities.new_zeros(()))
        total = probabilities.cumsum(-1)
        drawn = torch.tensor(self._random.random() * float(total[-1]), dtype=total.dtype)
        place = min(int(torch.searchsorted(total, drawn, right=True)), total.shape[0] - 1)
        return place if index is None else int(index[place])
