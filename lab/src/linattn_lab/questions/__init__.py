"""Questions about attention, each answered by a small experiment: theory next to measurement."""

from . import argmax, causal, polynomial, random_features, variance
from .answer import Answer, Finding
from .argmax import argmax_attention

QUESTIONS = {
    "argmax": argmax.ask,
    "variance": variance.ask,
    "polynomial": polynomial.ask,
    "random-features": random_features.ask,
    "causal": causal.ask,
}

__all__ = ["QUESTIONS", "Answer", "Finding", "argmax_attention"]
