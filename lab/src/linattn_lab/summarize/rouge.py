"""ROUGE: how many words, pairs of words and words in order a summary shares with the one that a person wrote."""

from collections.abc import Sequence

from rouge_score import rouge_scorer

MEASURES = ("rouge1", "rouge2", "rougeL")
SCORER = rouge_scorer.RougeScorer(MEASURES, use_stemmer=True)


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean F1 x 100 of rouge1, rouge2 and rougeL, words reduced to their stems."""
    if len(predictions) != len(references) or not references:
        raise ValueError(f"expected a prediction for each reference, got {len(predictions)} and {len(references)}.")
    found = [SCORER.score(reference, prediction) for prediction, reference in zip(predictions, references, strict=True)]
    return {name: 100 * sum(scores[name].fmeasure for scores in found) / len(found) for name in MEASURES}
