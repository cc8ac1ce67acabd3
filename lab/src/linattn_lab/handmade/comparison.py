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
        correlation: of the two K, Q and V, and of the scores less each row's mean, which softmax does not see; None where
            one of the two is constant.
        score_span: from the least to the largest score of a row, the mean over rows, as (hand, learned).
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
    correlation: dict[str, float | None]
    score_span: tuple[float, float]


def compare(design: Design, learned: Weights, sequence: tuple[str, ...]) -> Comparison:
    """Runs both heads; learned positions are folded into the matrices, so that their rows mean the same as by hand."""
    tokens = design.encode(sequence)
    by_hand = single_head(tokens, design.weights())
    trained = single_head(tokens, learned.with_plain_positions())
    chosen = design.selector.selected(sequence)
    best = trained.attention.argmax(1)
    weights = [name for name, _ in by_hand.items()[:3]]
    scores = [_scores(by_hand), _scores(trained)]
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
        correlation={name: _correlation(getattr(by_hand, name), getattr(trained, name)) for name in ("K", "Q", "V")}
        | {"scores": _correlation(*scores)},
        score_span=(float(np.ptp(scores[0], 1).mean()), float(np.ptp(scores[1], 1).mean())),
    )


def explain(comparison: Comparison) -> list[str]:
    """The differences in sentences: at least one for each of the eight variables, in their order."""
    c = comparison
    exact = count_exact(c.design, c.design.weights())
    return [
        *_about_weights(c),
        *_about_projections(c),
        *_about_attention(c),
        _about_output(c),
        f"by hand, {exact[0]} of all {exact[1]} sequences are exact to 1e-8: the softmax gap is set, not found.",
    ]


def _about_weights(c: Comparison) -> list[str]:
    return [
        f"{name}: the hand entries spread by {hand:.2f}, the learned by {learned:.2f}; "
        f"{c.zeros[name][0]:.0%} of the hand entries are 0, {c.zeros[name][1]:.0%} of the learned are near it."
        for name, (hand, learned) in c.spread.items()
    ]


def _about_projections(c: Comparison) -> list[str]:
    """K and Q act through their scores alone, V by itself."""
    lines = []
    for name in ("K", "Q"):
        alike = c.correlation[name]
        word = "agree" if alike is not None and alike > 0.95 else "differ"
        lines.append(f"{name}: hand and learned {_by(alike)}: they {word}.")
    lines[-1] += (
        " K and Q need not agree, since a change of basis of both leaves every score alone; "
        f"the scores, less each row's mean, {_by(c.correlation['scores'])}, "
        f"and a row of them spans {c.score_span[0]:.1f} by hand and {c.score_span[1]:.1f} learned."
    )
    value = c.correlation["V"]
    return [*lines, f"V: hand and learned {_by(value)}. {_value_words(value)}"]


def _about_attention(c: Comparison) -> list[str]:
    hand_top, learned_top = c.hand.attention.max(1).mean(), c.learned.attention.max(1).mean()
    least = int(c.row_overlap.argmin())
    route = "the same route" if c.row_overlap.mean() > 0.8 else "another route to the same answer"
    return [
        f"attention: on average {c.row_overlap.mean():.1%} of a row's weight lies on the same keys "
        f"(least: {c.row_overlap.min():.1%}, at '{c.sequence[least]}' in place {least + 1} of {''.join(c.sequence)}); "
        f"in {int(c.same_keys.sum())} of {len(c.same_keys)} rows the learned head looks most at a key that the design chooses.",
        f"attention: the largest weight of a row is {hand_top:.3f} by hand and {learned_top:.3f} learned: {route}.",
    ]


def _about_output(c: Comparison) -> str:
    return (
        f"output: the learned one is off by {c.output_error.max():.3f} at most and {c.output_error.mean():.3f} on average; "
        f"read as a class or sign it is right for {_readings(c)} of {len(c.output_error)} tokens."
    )


def _by(correlation: float | None) -> str:
    return "cannot be correlated (one is constant)" if correlation is None else f"correlate by {correlation:+.2f}"


def _value_words(correlation: float | None) -> str:
    if correlation is None:
        return "All tokens of the sequence have the same value by hand or in training."
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


def _scores(trace: Trace) -> np.ndarray:
    """(n, n) scaled scores, less each row's mean."""
    scores = trace.Q @ trace.K.T / np.sqrt(trace.Q.shape[1])
    return scores - scores.mean(1, keepdims=True)


def _zeros(weights: np.ndarray) -> float:
    return float((np.abs(weights) < 0.01 * np.abs(weights).max()).mean())


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])
