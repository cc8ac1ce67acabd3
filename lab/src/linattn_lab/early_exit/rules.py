"""Exit rules: by entropy, by confidence (one tolerance, or one for each exit), or by consecutive exits that agree."""

from dataclasses import dataclass

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Of the classes' probabilities, in nats: 0 is certain, log(classes) knows nothing. (n, classes) -> (n,)."""
    logs = logits.float().log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def confidence(logits: Tensor) -> Tensor:
    """Probability of the likeliest class. (n, classes) -> (n,)."""
    return logits.float().softmax(-1).amax(-1)


@dataclass(frozen=True)
class Entropy:
    """Leaves where the entropy, in nats, is under the tolerance."""

    tolerance: float

    def __call__(self, logits: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return entropy(logits) < self.tolerance, None


@dataclass(frozen=True)
class Confidence:
    """Leaves where the likeliest class has more than this probability."""

    tolerance: float

    def __call__(self, logits: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return confidence(logits) > self.tolerance, None


@dataclass(frozen=True)
class Patience:
    """Leaves where this many exits in a row named the same class; 1 leaves at the first exit."""

    tolerance: int

    def __call__(self, logits: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        named = logits.argmax(-1)
        agreeing = torch.ones_like(named)
        if memory is not None:  # (n, 2): the class named last, and by how many exits in a row
            agreeing += torch.where(memory[:, 0] == named, memory[:, 1], 0)
        return agreeing >= self.tolerance, torch.stack([named, agreeing], 1)


@dataclass(frozen=True)
class PerExit:
    """Leaves exit by exit where the likeliest class has more than that exit's probability; None leaves a head out.

    A head that is left out is not computed and costs nothing. The last exit has no tolerance.
    """

    tolerance: tuple[float | None, ...]

    def at(self, number: int) -> Confidence | None:
        own = self.tolerance[number]
        return None if own is None else Confidence(own)


Rule = Entropy | Confidence | Patience | PerExit
# A rule is a function of an exit's logits (n, classes) and of what it kept from the exit before (n, ...), None at the
# first. It returns who leaves, (n,) bool, and what to keep. What is kept is compacted with the batch. PerExit is such a
# function at each exit.
RULES: dict[str, type[Entropy | Confidence | Patience]] = {
    "entropy": Entropy,
    "confidence": Confidence,
    "patience": Patience,
}


def make_rule(name: str, tolerance: float) -> Entropy | Confidence | Patience:
    """A rule by its name; the tolerance is in nats, a probability, or a number of exits."""
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r}: choose from {', '.join(RULES)}.")
    if name == "patience":
        if tolerance != int(tolerance) or tolerance < 1:
            raise ValueError(f"patience is a number of exits from 1 up, got {tolerance:g}.")
        return Patience(int(tolerance))
    return Entropy(tolerance) if name == "entropy" else Confidence(tolerance)


def name_of(rule: Rule) -> str:
    return type(rule).__name__.lower()


def words_of(rule: Rule) -> str:
    """Name and tolerance, e.g. "entropy 0.2" or "confidence 0.8, 0.7, - by exit", where - is a head left out."""
    if isinstance(rule, PerExit):
        return "confidence " + ", ".join("-" if own is None else f"{own:.3g}" for own in rule.tolerance) + " by exit"
    return f"{name_of(rule)} {rule.tolerance:g}"


def rule_at(rule: Rule, number: int) -> Entropy | Confidence | Patience | None:
    """What decides at an exit; None where its head is left out."""
    return rule.at(number) if isinstance(rule, PerExit) else rule


def decide(logits: Tensor, rule: Rule) -> Tensor:
    """The exit that each example would take, 0 the first, from the logits of all exits. (exits, n, classes) -> (n,)."""
    exits = torch.full(logits.shape[1:2], len(logits) - 1)
    inside = torch.ones(logits.shape[1], dtype=torch.bool)
    memory = None
    for number, own in enumerate(logits[:-1]):
        here = rule_at(rule, number)
        if here is None:
            continue
        leaves, memory = here(own, memory)
        exits[inside & leaves] = number
        inside &= ~leaves
    return exits
