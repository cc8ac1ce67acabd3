"""What a summarizer must beat: rules that take words or a sentence out of the document, or another's summary."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .pairs import Pair
from .rouge import rouge
from .sentences import first_sentence, inverse_frequency, lexrank, split_sentences, textrank

NEAREST = "nearest training summary"
ORACLE = "best single sentence (oracle)"
LEAD = "first sentence of five words or more"
VERB = re.compile(r"\b(?:is|provides|contains)\s+")
ARTICLE = re.compile(r"^(?:an?|the)\s+", re.IGNORECASE)


def after_verb(document: str, count: int = 8, article: bool = True) -> str:
    """The words after the first 'is', 'provides' or 'contains' of the first sentence; its first words without one."""
    sentence = first_sentence(document)
    found = VERB.search(sentence)
    rest = sentence[found.end() if found else 0 :]
    if not article:
        rest = ARTICLE.sub("", rest)
    return " ".join(rest.split()[:count])


def first_full_sentence(document: str, words: int = 5) -> str:
    """The first sentence that is no heading or name: at least so many words; the first of all where there is none."""
    sentences = split_sentences(document)
    return next((sentence for sentence in sentences if len(sentence.split()) >= words), sentences[0])


def best_sentence(pair: Pair) -> str:
    """The sentence with the highest ROUGE-1 against the summary: what no rule that takes one sentence can beat."""
    sentences = split_sentences(pair.document)
    return max(sentences, key=lambda sentence: rouge([sentence], [pair.summary])["rouge1"])


def nearest_summaries(documents: Sequence[str], train: Sequence[Pair]) -> list[str]:
    """The summary of the training document most like each document, by the cosine of TF-IDF."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+")
    known = vectorizer.fit_transform(pair.document for pair in train)
    found: list[str] = []
    for start in range(0, len(documents), 200):
        likeness = vectorizer.transform(documents[start : start + 200]) @ known.T
        found += [train[int(row.argmax())].summary for row in likeness]
    return found


def baselines(
    pairs: Sequence[Pair], train: Sequence[Pair], progress: Callable[..., Iterable[Any]] = lambda items, **_: items
) -> dict[str, list[str]]:
    """What each rule says of each document. Without training pairs there is no nearest summary."""
    documents = [pair.document for pair in pairs]
    idf = inverse_frequency([pair.document for pair in train] or documents)
    rules: dict[str, Callable[[Pair], str]] = {
        "TextRank": lambda pair: textrank(pair.document),
        "LexRank": lambda pair: lexrank(pair.document, idf),
        "first sentence": lambda pair: first_sentence(pair.document),
        LEAD: lambda pair: first_full_sentence(pair.document),
        "8 words after is/provides/contains": lambda pair: after_verb(pair.document),
        "the same without its article": lambda pair: after_verb(pair.document, article=False),
        ORACLE: best_sentence,
    }
    found = {name: [rule(pair) for pair in progress(pairs, desc=name)] for name, rule in rules.items()}
    if train:
        found[NEAREST] = nearest_summaries(documents, train)
    return found
