"""Compares hand-set and trained weights, in numbers and in sentences generated from them."""

from dataclasses import dataclass

import numpy as np

from .designs import Design
from .numpy_head import Trace, Weights, single_head
from .training import count_exact


@dataclass(frozen=True)
class Comparison:
    """Two traces of one sequence and what was measured on them.

    Attributes:
        row_overlap: for each query, the weight that both attentions put on the same key, from 0 to 1.
        same_keys: for each query, whether the key with the most learned weight is one that the hand design chooses.
        output_error: of the learned output against the expected one, for each token.
        spread: standard deviation of the entries of Km, Qm, Vm, as (hand, learned).
        zeros: share of entries near 0 (under a hundredth of the largest), as (hand, learned).
        value_correlation: of the two V; None where one of them is constant.
    """

    design: Design
    sequence: tuple[str, ...]
    hand: Trace
    learned: Trace
    row_overlap: np.ndarray
    same_keys: np.ndarray
    output_error: np.ndarray
    spread: dict[str, tuple[float, float]]
    zeros: dict[str, tuple[float, float]]
    value_correlation: float | None


def compare(design: Design, learned: Weights, sequence: tuple[str, ...]) -> Comparison:
    """Runs both heads; learned positions are folded into the matrices, so that their rows mean the same as by hand."""
    tokens = design.encode(sequence)
    by_hand = single_head(tokens, design.weights())
    trained = single_head(tokens, learned.with_plain_positions())
    chosen = design.selector.selected(sequence)
    best = trained.attention.argmax(1)
    weights = [name for name, _ in by_hand.items()[:3]]
    return Comparison(
        design,
        sequence,
        by_hand,
        trained,
        row_overlap=np.minimum(by_hand.attention, trained.attention).sum(1),
        same_keys=chosen[np.arange(len(sequence)), best],
        output_error=np.abs(trained.output - design.expected(sequence)).max(1),
        spread={w: (float(getattr(by_hand, w).std()), float(getattr(trained, w).std())) for w in weights},
        zeros={w: (_zeros(getattr(by_hand, w)), _zeros(getattr(trained, w))) for w in weights},
        value_correlation=_correlation(by_hand.V, trained.V),
    )


def explain(comparison: Comparison) -> list[str]:
    """The differences in sentences."""
    c = comparison
    text = "".join(c.sequence)
    lines = []
    for name, (hand, learned) in c.spread.items():
        zeros = c.zeros[name]
        lines.append(
            f"{name}: the hand entries spread by {hand:.2f}, the learned by {learned:.2f}; "
            f"{zeros[0]:.0%} of the hand entries are 0, {zeros[1]:.0%} of the learned are near it."
        )
    hand_top, learned_top = c.hand.attention.max(1).mean(), c.learned.attention.max(1).mean()
    lines.append(
        f"attention: on average {c.row_overlap.mean():.1%} of a row's weight lies on the same keys "
        f"(least: {c.row_overlap.min():.1%}, at '{c.sequence[int(c.row_overlap.argmin())]}' in place "
        f"{int(c.row_overlap.argmin()) + 1} of {text}); in {int(c.same_keys.sum())} of {len(c.same_keys)} rows the "
        f"learned head looks most at a key that the design chooses."
    )
    route = "the same route" if c.row_overlap.mean() > 0.8 else "another route to the same answer"
    lines.append(
        f"attention: the largest weight of a row is {hand_top:.3f} by hand and {learned_top:.3f} learned: {route}."
    )
    if c.value_correlation is not None:
        lines.append(
            f"V: hand and learned correlate by {c.value_correlation:+.2f}. {_value_words(c.value_correlation)}"
        )
    error = c.output_error
    lines.append(
        f"output: the learned one is off by {error.max():.3f} at most and {error.mean():.3f} on average; "
        f"read as a class or sign it is right for {_readings(c)} of {len(error)} tokens."
    )
    exact = count_exact(c.design, c.design.weights())
    lines.append(
        f"by hand, {exact[0]} of all {exact[1]} sequences are exact to 1e-8: the softmax gap is set, not found."
    )
    return lines


def _value_words(correlation: float) -> str:
    if correlation > 0.95:
        return "Training found the same values."
    if correlation < 0.5:
        return "Training put other values there, and its attention mixes them into the same output."
    return "Training found much the same values, with corrections for what its attention leaks."


def _readings(c: Comparison) -> int:
    expected = c.design.expected(c.sequence)
    if expected.shape[1] > 1:
        return int((c.learned.output.argmax(1) == expected.argmax(1)).sum())
    if (expected < 0).any() or c.design.name == "unique":
        return int((np.sign(c.learned.output) == np.sign(expected)).all(1).sum())
    counts = [np.round(1 / np.maximum(x[:, 0], 1e-3)) for x in (c.learned.output, expected)]
    return int((counts[0] == counts[1]).sum())


def _zeros(weights: np.ndarray) -> float:
    return float((np.abs(weights) < 0.01 * np.abs(weights).max()).mean())


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])
