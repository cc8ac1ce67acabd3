"""Sentences of a text, and which of them stands for all: LexRank and TextRank."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

# A blank after . ! or ? ends a sentence where a capital, a digit or a quote follows, unless a short form stands before.
SHORT = r"(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\betc\.)(?<!\bvs\.)(?<!\bcf\.)(?<!\bDr\.)(?<!\bMr\.)(?<!\b[A-Z]\.)"
ENDS = re.compile(rf"\n+|(?<=[.!?]){SHORT}\s+(?=[\"'(]?[A-Z0-9])|(?<=[.!?][\"')])\s+(?=[\"'(]?[A-Z0-9])")
WORD = re.compile(r"\w+")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, at least one; a new line ends one too."""
    return [found.strip() for found in ENDS.split(text) if found.strip()] or [text.strip()]


def first_sentence(text: str) -> str:
    return split_sentences(text)[0]


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def lexrank(text: str, idf: Callable[[str], float], threshold: float = 0.1) -> str:
    """The sentence most central among those alike (Erkan and Radev 2004): cosine of TF-IDF above a threshold."""
    sentences = split_sentences(text)
    vocabulary = {word: i for i, word in enumerate(sorted(set(words(text))))}
    counts = np.zeros((len(sentences), len(vocabulary)))
    for i, sentence in enumerate(sentences):
        for word in words(sentence):
            counts[i, vocabulary[word]] += 1
    weighted = counts * np.array([idf(word) for word in vocabulary])
    lengths = np.linalg.norm(weighted, axis=1, keepdims=True)
    unit = weighted / np.where(lengths > 0, lengths, 1)
    return sentences[_central((unit @ unit.T > threshold).astype(float))]


def textrank(text: str) -> str:
    """The sentence that shares most words with others (Mihalcea and Tarau 2004), over the logarithms of both lengths."""
    sentences = split_sentences(text)
    sets = [set(words(sentence)) for sentence in sentences]
    shared = np.zeros((len(sets), len(sets)))
    for i, a in enumerate(sets):
        for j, b in enumerate(sets[:i]):
            size = math.log(len(a) or 1) + math.log(len(b) or 1)
            shared[i, j] = shared[j, i] = len(a & b) / size if size > 0 else 0.0
    return sentences[_central(shared)]


def inverse_frequency(texts: Sequence[str]) -> Callable[[str], float]:
    """How rare a word is: log of the number of texts over those that have it, a word of none as one of one."""
    found = Counter(word for text in texts for word in set(words(text)))
    return lambda word: math.log((len(texts) + 1) / (found[word] or 1))


def _central(similarity: np.ndarray, damping: float = 0.85) -> int:
    """The place that a walk over the sentences, likelier from like to like, visits most; the first of equals."""
    count = len(similarity)
    rows = similarity.sum(1, keepdims=True)
    step = np.where(rows > 0, similarity / np.where(rows > 0, rows, 1), 1 / count)
    visits = np.full(count, 1 / count)
    for _ in range(100):
        after = (1 - damping) / count + damping * visits @ step
        done = np.abs(after - visits).max() < 1e-9
        visits = after
        if done:
            break
    return int(np.argmax(visits > visits.max() - 1e-7))
