"""ROUGE: how many words, pairs of words and words in order a summary shares with the one that a person wrote."""

from collections.abc import Sequence

import numpy as np
from rouge_score import rouge_scorer

MEASURES = ("rouge1", "rouge2", "rougeL")
NAMES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
SCORER = rouge_scorer.RougeScorer(MEASURES, use_stemmer=True)
RESAMPLES = 2000


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean F1 x 100 of rouge1, rouge2 and rougeL, words reduced to their stems."""
    return dict(zip(MEASURES, rouge_of_each(predictions, references).mean(0).tolist(), strict=True))


def rouge_of_each(predictions: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """F1 x 100 of each prediction: (predictions, MEASURES)."""
    if len(predictions) != len(references) or not references:
        raise ValueError(f"expected a prediction for each reference, got {len(predictions)} and {len(references)}.")
    found = [SCORER.score(reference, prediction) for prediction, reference in zip(predictions, references, strict=True)]
    return np.array([[100 * scores[name].fmeasure for name in MEASURES] for scores in found])


def bootstrap(each: np.ndarray, seed: int = 0, share: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Below and above which the means (MEASURES,) seldom lie when pairs are drawn anew: the percentile bootstrap."""
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(len(each), np.full(len(each), 1 / len(each)), RESAMPLES) / len(each)
    low, high = np.quantile(weights @ each, [(1 - share) / 2, (1 + share) / 2], axis=0)
    return low, high
